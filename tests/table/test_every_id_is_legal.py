"""Every 64-bit id is stored like any other: no value is a marker for "empty" or "deleted"."""

from __future__ import annotations

import pytest
import torch

from reference import STRATEGIES
from tables import EXTREME_IDS, contents, debug_value, make_table, tensor

# 0 and all ones are what fresh or erased memory holds; the others are reserved in other tables.
IDS = [*EXTREME_IDS, 2**32, -(2**32), 2**62, 0x7F7F7F7F7F7F7F7F, 0xFF]


@pytest.mark.parametrize("id_", IDS)
def test_an_id_goes_through_its_whole_life(id_: int) -> None:
    table = make_table(max_capacity=64)
    ids = tensor([id_])
    expected = [[debug_value(id_)] * 4]

    assert table.contains(ids).tolist() == [False]
    assert table.find(ids).found.tolist() == [False]
    assert table.erase(ids).tolist() == [False]

    trained = table.find_or_insert(ids)
    assert trained.slots.item() >= 0
    assert trained.embeddings.tolist() == expected
    assert table.contains(ids).tolist() == [True]
    assert table.find(ids).embeddings.tolist() == expected
    assert contents(table).ids.tolist() == ids.tolist()
    assert len(table) == 1
    assert table.stats().misses == 1

    table.find_or_insert(ids)
    assert (table.stats().hits, len(table)) == (1, 1)

    assert table.assign(ids, torch.full((1, 4), 2.5)).tolist() == [True]
    assert table.find(ids).embeddings.tolist() == [[2.5] * 4]
    assert table.erase(ids).tolist() == [True]
    assert table.contains(ids).tolist() == [False]
    assert len(table) == 0

    assert table.insert(ids, torch.full((1, 4), 3.5)).written.tolist() == [True]
    assert table.find(ids).embeddings.tolist() == [[3.5] * 4]
    table.clear()
    assert table.contains(ids).tolist() == [False]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_of_them_live_together(strategy: str) -> None:
    table = make_table(strategy, max_capacity=16)
    if strategy == "CUSTOMIZED":
        table.set_score(1)
    ids = tensor(IDS)
    assert not table.contains(ids).any()
    out = table.find_or_insert(ids)
    assert out.slots.tolist() == list(range(len(IDS)))
    assert out.embeddings.tolist() == [[debug_value(i)] * 4 for i in IDS]
    assert contents(table).ids.tolist() == ids.tolist()
    assert table.erase(ids[::2]).all()
    assert table.contains(ids).tolist() == [position % 2 == 1 for position in range(len(IDS))]


@pytest.mark.parametrize("id_", IDS)
def test_a_full_bucket_evicts_and_takes_it(id_: int) -> None:
    table = make_table(max_capacity=16)
    table.find_or_insert(tensor([id_]))
    table.find_or_insert(tensor(range(1000, 1015)))
    out = table.find_or_insert(tensor([2000]), return_evicted=True)
    assert out.evicted.ids.tolist() == tensor([id_]).tolist()
    assert out.evicted.embeddings.tolist() == [[debug_value(id_)] * 4]
    out = table.find_or_insert(tensor([id_]), return_evicted=True)
    assert out.slots.item() >= 0
    assert out.evicted.ids.tolist() == [1000]


def test_growth_keeps_all_of_them() -> None:
    table = make_table(max_capacity=1024, init_capacity=16, max_load_factor=0.5)
    table.find_or_insert(tensor(IDS))
    for start in range(10_000, 10_400, 50):
        table.find_or_insert(tensor(range(start, start + 50)))
    assert table.capacity > 64
    found = table.find(tensor(IDS))
    assert found.found.all()
    assert found.embeddings.tolist() == [[debug_value(i)] * 4 for i in IDS]


def test_unsigned_ids_are_the_same_ids() -> None:
    table = make_table(max_capacity=64)
    values = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    unsigned = torch.tensor(values, dtype=torch.uint64)
    slots = table.find_or_insert(unsigned).slots.tolist()
    assert table.contains(tensor(values)).all()
    assert table.find_or_insert(tensor(values)).slots.tolist() == slots
    assert table.contains(unsigned).all()
    assert table.find(unsigned).embeddings[:, 0].tolist() == [debug_value(v) for v in values]
    assert table.erase(unsigned).all()
    assert len(table) == 0
