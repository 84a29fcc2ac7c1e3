"""Growing once ahead of many rows, and knowing which bucket an id lives in."""

from __future__ import annotations

import pytest
import torch

from dynamicemb import InvalidArgumentError
from tables import EXTREME_IDS, contents, equal_rows, make_table, tensor


def test_reserve_grows_once_and_keeps_rows() -> None:
    table = make_table(max_capacity=4096, init_capacity=16)
    table.find_or_insert(tensor(EXTREME_IDS[:5]))
    before = contents(table)
    table.reserve(1000)
    capacity = table.capacity
    assert capacity >= 2000  # at a load factor of one half
    after = contents(table)
    order, other = before.ids.argsort(), after.ids.argsort()
    assert torch.equal(before.embeddings[order], after.embeddings[other])
    table.find_or_insert(torch.arange(1000))
    assert table.capacity == capacity


def test_reserve_stops_at_the_maximum() -> None:
    table = make_table(max_capacity=64, init_capacity=16)
    table.reserve(10**15)
    assert table.capacity == 64
    with pytest.raises(InvalidArgumentError, match="rows is -1"):
        table.reserve(-1)


def test_bucket_of_is_where_rows_are() -> None:
    table = make_table(max_capacity=4096)
    ids = torch.cat([tensor(EXTREME_IDS), torch.arange(100, 1000)])
    slots = table.find_or_insert(ids).slots
    stored = slots >= 0
    assert torch.equal(table.bucket_of(ids)[stored], slots[stored] // table.bucket_capacity)


def test_progress_goes_over_to_another_table() -> None:
    one, two = make_table("STEP", seed=1), make_table("STEP", seed=2)
    one.find_or_insert(tensor([1, 2]))
    one.iteration = 7
    two.restore_progress(one.progress())
    assert two.progress() == one.progress()
    assert two.step == 2
    one.find_or_insert(tensor([3]))
    two.find_or_insert(tensor([1, 2]))
    two.find_or_insert(tensor([3]))
    three = contents(two)
    assert torch.equal(contents(one).embeddings, three.embeddings)
    assert not equal_rows(contents(one), three)  # one step later
