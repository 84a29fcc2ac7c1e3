"""Memory does not grow over 10^5 steps after the warm-up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.incremental_dump import dump_delta
from dynamicemb.nn.expiry import expire_rows
from dynamicemb.tiers import SsdStore

STEPS = 100_000
WARM_UP = 5_000
IDS = 64  # of a batch, out of twenty times as many as a table has rows
ROWS = 1024
MOST_KIB = 2048  # a leak of 21 bytes in each step would be more
OFFSETS = torch.arange(0, IDS + 1, 2)


def own_kib() -> int:
    """Memory that is no file's: pages of mapped files come and go as the system likes."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError


def options(**changes: Any) -> DynamicEmbTableOptions:
    fields: dict[str, Any] = {"dim": 8, "max_capacity": ROWS, "bucket_capacity": 128}
    fields["score_strategy"] = DynamicEmbScoreStrategy.STEP
    return DynamicEmbTableOptions(**(fields | changes))


def under_torch_optim(_: Path) -> Callable[[torch.Tensor], None]:
    module = DynamicEmbedding(8, max_capacity=ROWS)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        module(ids).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return step


def fused(module: BatchedDynamicEmbeddingTables) -> Callable[[torch.Tensor], None]:
    def step(ids: torch.Tensor) -> None:
        module(ids, OFFSETS).sum().backward()

    return step


def with_prefetch(_: Path) -> Callable[[torch.Tensor], None]:
    module = BatchedDynamicEmbeddingTables([options()], optimizer="adam")
    ahead: list[torch.Tensor] = []

    def step(ids: torch.Tensor) -> None:
        module.prefetch(ids, OFFSETS)
        ahead.append(ids)
        if len(ahead) > 2:
            module(ahead.pop(0), OFFSETS).sum().backward()

    return step


def with_admission_and_expiry(_: Path) -> Callable[[torch.Tensor], None]:
    counted = options(
        admit_strategy=FrequencyAdmissionStrategy(2), admission_counter=KVCounter(ROWS)
    )
    module = BatchedDynamicEmbeddingTables([counted], optimizer="adam")
    expire_rows(module, steps=100, sweep=8)
    return fused(module)


def over_an_ssd(path: Path) -> Callable[[torch.Tensor], None]:
    stored = options(
        max_capacity=2**20,
        external_storage=SsdStore.at(path / "s", segment_mb=1),
        local_hbm_for_values=2**18,
    )
    return fused(BatchedDynamicEmbeddingTables([stored], optimizer="adam"))


def with_deltas(path: Path) -> Callable[[torch.Tensor], None]:
    """Removals are remembered between deltas, up to a bound that the warm-up reaches."""
    module = BatchedDynamicEmbeddingTables([options()], optimizer="sgd")
    dump_delta(path, module, removal_limit=4 * ROWS)
    return fused(module)


KINDS = [under_torch_optim, with_prefetch, with_admission_and_expiry, over_an_ssd, with_deltas]


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.__name__)
def test_memory_does_not_grow_over_a_hundred_thousand_steps(kind: Any, memory_path: Path) -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(7)
    step = kind(memory_path)

    def steps(count: int) -> None:
        for _ in range(count):
            step(torch.randint(0, 20 * ROWS, (IDS,), generator=draw))

    steps(WARM_UP)
    before = own_kib()
    steps(STEPS)
    assert own_kib() - before < MOST_KIB
