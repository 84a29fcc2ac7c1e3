"""An empty table can be made again what it was before rows came."""

from __future__ import annotations

import pytest
import torch

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import MAX_BUCKET_CAPACITY
from tables import STRATEGY, make_table


@pytest.mark.parametrize("bucket_capacity", [16, MAX_BUCKET_CAPACITY])
@pytest.mark.parametrize("strategy", list(STRATEGY))
def test_growth_counts_and_optimizer_are_undone(strategy: str, bucket_capacity: int) -> None:
    table = make_table(
        strategy, max_capacity=4096, init_capacity=64, bucket_capacity=bucket_capacity, seed=3
    )
    if strategy == "CUSTOMIZED":
        table.set_score(5)
    table.find_or_insert(torch.arange(10))
    table.erase(torch.arange(10))
    undo = table.undo_point()
    assert undo is not None
    before = table.stats(), table.progress(), table.optimizer, table.capacity
    table.set_optimizer(Optimizer(OptimizerKind.ADAM, OptimizerArgs()))
    table.find_or_insert(torch.arange(3000))
    table.iteration = 17
    undo()
    stats = vars(table.stats()) | {"bytes": before[0].bytes}
    assert stats == vars(before[0])
    assert (table.progress(), table.optimizer, table.capacity) == before[1:]
    assert not table.contains(torch.arange(3000)).any()
    assert list(table.export()) == []
    again = table.find_or_insert(torch.arange(50))
    assert (again.slots >= 0).all()
    assert len(table) == 50


def test_only_an_empty_table_that_logs_no_removals_can() -> None:
    table = make_table()
    table.find_or_insert(torch.tensor([1]))
    assert table.undo_point() is None
    table.clear()
    assert table.undo_point() is not None
    table.log_removals()
    assert table.undo_point() is None
