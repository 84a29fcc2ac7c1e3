"""One training run on the CPU and one on a GPU, from one seed: every bit is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

STEPS, BAGS, IDS = 150, 512, 4


def run(device: str, pooling: DynamicEmbPoolingMode, optimizer: EmbOptimType) -> list[Any]:
    """Losses of every step, then ids, slots, rows, scores and counts."""
    strategies = (DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.LFU)
    tables = [
        DynamicEmbTableOptions(
            dim=32,
            max_capacity=2048,  # fewer than there are ids: rows are evicted
            init_capacity=256,
            score_strategy=strategy,
            initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM),
        )
        for strategy in strategies
    ]
    module = BatchedDynamicEmbeddingTables(
        tables, pooling_mode=pooling, optimizer=optimizer, learning_rate=0.05, seed=3, device=device
    )
    generator = torch.Generator().manual_seed(4)
    offsets = (torch.arange(2 * BAGS + 1, device="cpu") * IDS).to(device)
    losses = []
    for _ in range(STEPS):
        draws = torch.rand(2 * BAGS * IDS, generator=generator, device="cpu", dtype=torch.float64)
        ids = (9000 * draws**2).to(torch.int64).to(device)
        out = module(ids, offsets)
        target = torch.randn(out.shape, generator=generator, device="cpu").to(device)
        difference = out - target
        difference.square().sum().backward()
        losses.append(difference.detach().cpu().square().sum())  # added in one order on both
    parts: list[Any] = losses
    for table in module.tables:
        state = table.state_dict()
        parts += [tensor.cpu() for name, tensor in state.items() if name != "meta"]
        parts.append(table.find_slots(state["ids"]).cpu())
        stats = table.stats()
        assert stats.evictions > 100
        parts.append(torch.tensor([stats.size, stats.evictions, stats.inserts, stats.hits]))
    return parts


@pytest.mark.parametrize("optimizer", [EmbOptimType.ADAM, EmbOptimType.EXACT_ROWWISE_ADAGRAD])
@pytest.mark.parametrize("pooling", list(DynamicEmbPoolingMode))
def test_losses_rows_and_evictions(pooling: DynamicEmbPoolingMode, optimizer: EmbOptimType) -> None:
    pytest.importorskip("dynamicemb._engine")
    runs = [run(device, pooling, optimizer) for device in ("cpu", "cuda")]
    for place, (one, two) in enumerate(zip(*runs, strict=True)):
        assert torch.equal(one, two), place
