"""Tables of other kinds have the memory of the dynamic ones, and torch's optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynamicemb.cli.training.batch import Schema
from dynamicemb.cli.training.hashed import RowWiseAdagrad, hashed_rows
from dynamicemb.cli.training.learner import new_learner
from dynamicemb.cli.training.options import OPTIMIZER_NAMES, TABLE_NAMES, TrainOptions
from dynamicemb.cli.training.tables import full_bytes, hashed_capacity, row_bytes, tables_of
from dynamicemb.cli.training.zch import zch_capacity

SCHEMA = Schema(dense=("x",), tables={"user": ("user",)})


@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_a_full_dynamic_table_and_the_hashed_one_have_the_same_bytes(optimizer: str) -> None:
    options = TrainOptions(optimizer=optimizer, capacity=4096)
    learner = new_learner("dynamic", options, SCHEMA, torch.device("cpu"), {})
    (table,) = tables_of(learner.model)
    ids = torch.arange(100_000)
    table.insert(ids, torch.zeros(len(ids), options.dim))
    assert len(table) == table.capacity == 4096
    static = hashed_capacity(options) * row_bytes(options)
    assert 0 <= table.stats().bytes - static < row_bytes(options)  # no whole row is missing


@pytest.mark.parametrize("score", ["step", "lfu", "timestamp_lfu"])
def test_tables_with_managed_collision_have_the_same_bytes_map_included(score: str) -> None:
    options = TrainOptions(score=score, capacity=4096)
    learner = new_learner("zch", options, SCHEMA, torch.device("cpu"), {})
    (table,) = learner.tables
    (weight,) = [one for name, one in learner.parameters().items() if "embedding_bags" in name]
    assert len(weight) == table.capacity == zch_capacity(options)
    missing = full_bytes(options) - table.sizes()["bytes"]
    assert 0 <= missing < 2 * row_bytes(options)


def test_all_models_start_from_the_same_dense_layers() -> None:
    options = TrainOptions(capacity=1024)
    dynamic, *others = (
        new_learner(kind, options, SCHEMA, torch.device("cpu"), {}).parameters()
        for kind in TABLE_NAMES
    )
    for other in others:
        assert len(other) == len(dynamic) + 1  # the static table
        assert all(torch.equal(value, other[name]) for name, value in dynamic.items())


def test_hashed_rows_are_spread_evenly() -> None:
    rows = hashed_rows(torch.arange(100_000) - 50_000, 1000)
    assert rows.min() >= 0
    counts = torch.bincount(rows, minlength=1000)
    assert len(counts) == 1000
    assert counts.max() < 200


def test_row_wise_adagrad_is_the_formula_on_the_rows_of_the_batch() -> None:
    bag = nn.EmbeddingBag(5, 4, sparse=True, mode="sum")
    before = bag.weight.detach().clone()
    optimizer = RowWiseAdagrad([bag.weight], lr=0.1)
    sums = torch.zeros(5)
    for _ in range(2):
        optimizer.zero_grad()
        (bag(torch.tensor([[1, 1, 3]])) * torch.arange(1.0, 5)).sum().backward()
        optimizer.step()
        for row, count in ((1, 2), (3, 1)):
            gradient = count * torch.arange(1.0, 5)
            sums[row] += gradient.square().mean()
            before[row] -= 0.1 * gradient / (sums[row].sqrt() + 1e-8)
    torch.testing.assert_close(bag.weight.detach(), before)
