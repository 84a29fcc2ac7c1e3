"""Prefetching on a stream of its own, and memory that streams share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.table import create_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

STEPS, BAGS = 30, 64
SLOW = 2_000_000  # clock cycles, a millisecond: what does not wait for it is caught


def make(**options: Any) -> BatchedDynamicEmbeddingTables:
    fields: dict[str, Any] = {
        "dim": 16,
        "max_capacity": 512,
        "bucket_capacity": 64,
        "score_strategy": DynamicEmbScoreStrategy.STEP,
        **options,
    }
    return BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(**fields)] * 2, optimizer=EmbOptimType.ADAM, seed=1, device="cuda"
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    offsets = (torch.arange(2 * BAGS + 1, device="cpu") * 3).cuda()
    drawn = torch.randint(0, 300, (STEPS, 6 * BAGS), generator=generator, device="cpu")
    return [(ids.cuda(), offsets) for ids in drawn]


def contents(module: BatchedDynamicEmbeddingTables) -> list[torch.Tensor]:
    states = [table.state_dict() for table in module.tables]
    return [tensor for state in states for name, tensor in state.items() if name != "meta"]


def churn() -> None:
    """Memory of the current stream that was given back is taken and overwritten."""
    for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18):
        for _ in range(8):
            torch.full((size,), -1, dtype=torch.int64, device="cuda")


def trained(depth: int, side: torch.cuda.Stream | None, **options: Any) -> list[torch.Tensor]:
    """Outputs and rows after all steps, with ``depth`` batches prefetched on a stream."""
    module = make(**options)
    data = batches()
    torch.cuda.synchronize()
    outputs = []

    def ahead(step: int) -> None:
        if depth == 0 or step >= STEPS:
            return
        assert side is not None
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW)
            module.prefetch(*data[step])
            churn()

    for step in range(depth):
        ahead(step)
    for step, (ids, offsets) in enumerate(data):
        out = module(ids, offsets)
        ahead(step + depth)
        torch.cuda._sleep(SLOW // 4)
        out.backward(torch.full_like(out, 0.1))
        outputs.append(out.detach())
    torch.cuda.synchronize()
    return outputs + contents(module)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("growing", [False, True])
def test_prefetching_on_a_side_stream_gives_the_bits_of_no_prefetching(
    depth: int, growing: bool
) -> None:
    # Enough slots for the batches in flight: what is evicted does not depend on prefetching then.
    options = {"max_capacity": 1 << 14, "init_capacity": 256} if growing else {}
    expected = trained(0, None, **options)
    for one, two in zip(expected, trained(depth, torch.cuda.Stream(), **options), strict=True):
        assert torch.equal(one, two)


def test_a_table_made_on_one_stream_is_filled_on_another() -> None:
    side = torch.cuda.Stream()
    ids = torch.arange(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
        table = create_table(DynamicEmbTableOptions(dim=8, max_capacity=4096), device="cuda")
    rows = table.find_or_insert(ids).embeddings  # after the zeros that the side stream writes
    torch.cuda.synchronize()
    assert table.size() == 1000
    assert torch.equal(table.find(ids).embeddings, rows)


def test_a_table_that_is_dropped_while_another_stream_reads_it() -> None:
    side = torch.cuda.Stream()
    ids = torch.arange(4000, device="cuda")
    for _ in range(5):
        table = create_table(DynamicEmbTableOptions(dim=64, max_capacity=8192), device="cuda")
        expected = table.find_or_insert(ids).embeddings
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW)
            read = table.find(ids).embeddings
        del table
        churn()  # of the stream that made the table
        torch.cuda.synchronize()
        assert torch.equal(read, expected)
