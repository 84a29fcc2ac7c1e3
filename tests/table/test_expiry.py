"""Rows that were not used for long are evicted, in bounded work per training batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from dynamicemb import DynamicEmbedding, DynamicEmbTableOptions
from dynamicemb.errors import DynamicEmbError, InvalidArgumentError, UsageError
from dynamicemb.expiry import expire_rows
from dynamicemb.incremental_dump import incremental_dump, track_removals
from dynamicemb.options import MAX_BUCKET_CAPACITY, DynamicEmbScoreStrategy
from tables import Clock, make_table


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def stored(table: object) -> list[int]:
    return sorted(int(one) for rows in table.export() for one in rows.ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["TIMESTAMP", "TIMESTAMP_LFU"])
def test_rows_older_than_an_age_leave(strategy: str) -> None:
    clock = Clock(time=10**10)
    table = make_table(strategy, clock=clock)
    table.expire_after(age=5.0)
    table.find_or_insert(ids(1, 2, 3))
    clock.time += 5 * 10**9
    table.find_or_insert(ids(3))
    assert stored(table) == [1, 2, 3]  # not longer ago than the age
    clock.time += 1
    table.find_or_insert(ids(4))
    assert stored(table) == [3, 4]
    assert table.stats().evictions == 2
    table.expire_after()
    clock.time += 10**12
    table.find_or_insert(ids(5))
    assert stored(table) == [3, 4, 5]


def test_rows_unused_for_a_number_of_steps_leave() -> None:
    table = make_table("STEP")
    table.expire_after(steps=2)
    table.find_or_insert(ids(1, 2))
    table.find_or_insert(ids(2))
    table.find_or_insert(ids(3))
    assert stored(table) == [1, 2, 3]
    table.find_or_insert(ids(3))
    assert stored(table) == [2, 3]
    table.find_or_insert(ids(3))
    assert stored(table) == [3]


@pytest.mark.parametrize("bucket_capacity", [128, MAX_BUCKET_CAPACITY])
def test_work_per_batch_is_bounded_and_every_slot_has_its_turn(bucket_capacity: int) -> None:
    table = make_table(
        "STEP", max_capacity=32_768, init_capacity=32_768, bucket_capacity=bucket_capacity
    )
    everything = torch.arange(20_000)
    table.find_or_insert(everything)
    table.expire_after(steps=1, sweep=4)
    sizes = []
    for _ in range(6):
        table.find_or_insert(ids(-1))
        sizes.append(table.size())
    assert sizes[0] == 20_001  # not older than a step yet
    removed = [before - after for before, after in itertools.pairwise(sizes)]
    assert min(removed) >= 0
    assert max(removed) <= 32_768 // 4  # the slots of a sweep
    assert sizes[-1] == 1
    table.find_or_insert(everything)  # the freed slots are as good as new
    assert table.size() == 20_001
    assert torch.equal(table.contains(everything), torch.ones(20_000, dtype=torch.bool))


def test_expired_ids_reach_the_incremental_dump() -> None:
    options = DynamicEmbTableOptions(
        dim=4, max_capacity=128, score_strategy=DynamicEmbScoreStrategy.STEP
    )
    model = torch.nn.ModuleDict({"users": DynamicEmbedding(4, options=options)})
    scores = track_removals(model)
    expire_rows(model, steps=1)
    model["users"](ids(1, 2, 3))
    model["users"](ids(2))
    dumped = incremental_dump(model, scores, removed=True)
    assert dumped is not None
    (rows, scores, gone) = dumped  # type: ignore[misc]
    path, table = next((path, name) for path, tables in gone.items() for name in tables)
    assert gone[path][table].tolist() == []
    model["users"](ids(2))
    (rows, scores, gone) = incremental_dump(model, scores, removed=True)  # type: ignore[misc]
    assert gone[path][table].tolist() == [1, 3]
    assert rows[path][table][0].tolist() == [2]
    assert len(model["users"].tables[0]) == 1


def test_a_gradient_of_an_expired_row_is_counted() -> None:
    options = DynamicEmbTableOptions(
        dim=4, max_capacity=128, score_strategy=DynamicEmbScoreStrategy.STEP
    )
    module = DynamicEmbedding(4, options=options)
    expire_rows(module, steps=1)
    waiting = module(ids(1))
    for _ in range(3):
        module(ids(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    waiting.sum().backward()
    optimizer.step()
    assert module.tables[0].stats().dropped_gradients == 1


def test_what_cannot_expire_is_refused() -> None:
    for strategy, arguments in (
        ("STEP", {"age": 1.0}),
        ("TIMESTAMP", {"steps": 1}),
        ("LFU", {"age": 1.0}),
        ("NO_EVICTION", {"steps": 1}),
        ("STEP", {"steps": 0}),
        ("STEP", {"steps": 1, "age": 1.0}),
        ("STEP", {"steps": 1, "sweep": 0}),
        ("TIMESTAMP", {"age": 0.0}),
    ):
        with pytest.raises(DynamicEmbError):
            make_table(strategy).expire_after(**arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="slots is 0"):
        make_table().expire(1, slots=0)
    with pytest.raises(UsageError, match="no dynamic"):
        expire_rows(torch.nn.Linear(1, 1), steps=1)


def test_a_model_with_a_table_that_cannot_expire_is_not_changed() -> None:
    stepped, timed = (
        DynamicEmbedding(4, options=DynamicEmbTableOptions(max_capacity=128, score_strategy=one))
        for one in (DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.TIMESTAMP)
    )
    model = torch.nn.ModuleDict({"first": stepped, "second": timed})
    with pytest.raises(InvalidArgumentError, match="steps"):
        expire_rows(model, steps=1)
    for number in range(4):
        stepped(ids(number))
    assert len(stepped.tables[0]) == 4
