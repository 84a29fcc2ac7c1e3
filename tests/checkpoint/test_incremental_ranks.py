"""incremental_dump of tables that are spread over ranks, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbTableOptions
from dynamicemb.incremental_dump import incremental_dump, track_removals
from dynamicemb.routing import Routing
from processes import run_ranks
from tables import STRATEGY, Clock


def sharded(rank: int, world_size: int, strategy: str) -> nn.Module:
    """A model whose table is spread over all ranks; the clocks of the ranks differ by a lot."""
    model = nn.Module()
    options = DynamicEmbTableOptions(
        dim=4, max_capacity=1024, score_strategy=STRATEGY[strategy], bucket_capacity=16
    )
    model.emb = BatchedDynamicEmbeddingTables([options], table_names=["t"], seed=1)
    routing = Routing("roundrobin", world_size, rank)
    model.emb.routings = {"t": routing}
    model.emb.tables[0]._clock_function = Clock(time=10**9 * (world_size - rank), step=1)
    return model


def step(model: nn.Module, ids: list[int]) -> None:
    mine = torch.tensor(ids, dtype=torch.int64)
    mine = mine[model.emb.routings["t"].owned(mine)]
    model.emb(mine, torch.tensor([0, len(mine)])).sum().backward()


def spread(rank: int, world_size: int, strategy: str) -> list[list[int]]:
    model = sharded(rank, world_size, strategy)
    scores: Any = track_removals(model)
    seen = []
    scores = 0
    for ids in ([1, 2, 3, 4], [4, 5], [], [2]):
        step(model, ids)
        rows, scores = incremental_dump(model, scores)
        keys, values = rows["model.emb"]["t"]
        assert values.shape == (len(keys), 4)
        seen.append(sorted(keys.tolist()))
    model.emb.tables[0].erase(torch.tensor([1, 2]))
    _, _, removed = incremental_dump(model, scores, removed=True)
    return [*seen, removed["model.emb"]["t"].sort().values.tolist()]


@pytest.mark.parametrize("strategy", ["TIMESTAMP", "STEP"])
def test_every_rank_gets_the_rows_of_all_ranks_whatever_their_clocks(strategy: str) -> None:
    expected = [[1, 2, 3, 4], [4, 5], [], [2], [1, 2]]
    assert run_ranks(3, spread, 3, strategy) == [expected] * 3


def groups(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    model = sharded(rank, world_size, "STEP")
    ids = torch.arange(8)
    step(model, ids.tolist())
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rows, _ = incremental_dump(model, 0, pairs[rank // 2])
    model.emb.routings = None  # a table that is not sharded is dumped by its own process
    alone, _ = incremental_dump(model, 0)
    return [sorted(result["model.emb"]["t"][0].tolist()) for result in (rows, alone)]  # type: ignore[return-value]


def test_the_ranks_of_a_process_group() -> None:
    results = run_ranks(4, groups, 4)
    assert [both for both, _ in results] == [[0, 1, 4, 5]] * 2 + [[2, 3, 6, 7]] * 2
    assert [alone for _, alone in results] == [[r, r + 4] for r in range(4)]


def one_does_not_know(rank: int, world_size: int) -> str:
    model = sharded(rank, world_size, "STEP")
    if rank == 0:
        track_removals(model)
    step(model, [1, 2])
    try:
        incremental_dump(model, 0, removed=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_know_its_removals_fails_all_ranks() -> None:
    first, second = run_ranks(2, one_does_not_know, 2)
    assert first.startswith("rank 1: which ids left table 't'")
    assert second.startswith("which ids left table 't'")
