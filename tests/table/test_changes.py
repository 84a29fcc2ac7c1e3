"""Marks: which rows changed and which ids left since a moment."""

from __future__ import annotations

import pytest
import torch

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbedding, UsageError
from dynamicemb.optimizers import EmbOptimType, Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table import Table
from tables import STRATEGY, contents, make_options, make_table, tensor


def changed(table: Table, mark: int) -> list[int]:
    return sorted(contents(table, changed_since=mark).ids.tolist())


@pytest.mark.parametrize("strategy", STRATEGY)
def test_rows_touched_after_the_mark_and_no_others(strategy: str) -> None:
    table = make_table(strategy, max_capacity=64)
    if strategy == "CUSTOMIZED":
        table.set_score(7)
    table.find_or_insert(tensor([1, 2, 3]))
    mark = table.mark_changes()
    assert changed(table, mark) == []
    table.find_or_insert(tensor([2, 5]))
    table.insert(tensor([6]), torch.zeros(1, 4))
    later = table.mark_changes()
    assert later > mark > 0
    table.assign(tensor([3, 9]), torch.zeros(2, 4))
    assert changed(table, mark) == [2, 3, 5, 6]
    assert changed(table, later) == [3]


def test_reading_changes_nothing() -> None:
    table = make_table(max_capacity=64)
    table.find_or_insert(tensor([1, 2, 3]))
    mark = table.mark_changes()
    table.find(tensor([1]))
    table.contains(tensor([2]))
    assert changed(table, mark) == []


def test_a_threshold_and_a_mark_ask_for_the_rows_of_either() -> None:
    table = make_table("STEP", max_capacity=64)
    for id_ in (1, 2, 3):
        table.find_or_insert(tensor([id_]))
    mark = table.mark_changes()
    table.assign(tensor([1]), torch.ones(1, 4))
    assert contents(table, score_threshold=3, changed_since=mark).ids.sort().values.tolist() == [
        1,
        3,
    ]


def test_growth_keeps_what_is_known() -> None:
    table = make_table(max_capacity=1024, init_capacity=16)
    table.find_or_insert(torch.arange(8))
    mark = table.mark_changes()
    table.find_or_insert(torch.arange(100, 500))
    assert table.capacity > 16
    assert changed(table, mark) == list(range(100, 500))


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_after_the_mark_of_a_lookup_before_it(fused: bool) -> None:
    options = DynamicEmbTableOptions(dim=4, max_capacity=256)
    module = BatchedDynamicEmbeddingTables(
        [options, options],
        table_names=["a", "b"],
        optimizer=EmbOptimType.SGD,
        learning_rate=0.5,
        separate_step=not fused,
    )
    a, b = module.tables
    out = module(torch.tensor([1, 2, 7, 8]), torch.tensor([0, 2, 4]))
    module(torch.tensor([5, 6]), torch.tensor([0, 1, 2]))  # no gradient
    mark, other = a.mark_changes(), b.mark_changes()
    assert changed(a, mark) == []
    out.sum().backward()
    if not fused:
        module.step()
    assert changed(a, mark) == [1, 2]
    assert changed(b, other) == [7, 8]


def test_a_row_that_was_evicted_and_came_back_before_its_update() -> None:
    embedding = DynamicEmbedding(4, options=make_options("STEP"))
    table = embedding.tables[0]
    out = embedding(tensor([1]))
    embedding(torch.arange(100, 116))  # evicts 1
    assert not table.contains(tensor([1])).any()
    embedding(tensor([1]))
    mark = table.mark_changes()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    out.sum().backward()
    optimizer.step()
    assert changed(table, mark) == [1]


def test_another_kind_of_optimizer_changes_every_row() -> None:
    table = make_table(max_capacity=64)
    table.find_or_insert(tensor([1, 2]))
    mark = table.mark_changes()
    table.set_optimizer(Optimizer(OptimizerKind.ADAM, OptimizerArgs()))
    assert changed(table, mark) == [1, 2]


def test_ids_that_left_and_did_not_come_back() -> None:
    table = make_table("STEP")  # one bucket of 16
    table.log_removals()
    table.find_or_insert(torch.arange(16))
    mark = table.mark_changes()
    table.find_or_insert(tensor([100, 101]))  # evicts 0, 1
    table.erase(tensor([5, 5, 77]))
    assert table.removed_since(mark).tolist() == [0, 1, 5]
    later = table.mark_changes()
    table.insert(tensor([5, 0]), torch.zeros(2, 4))  # 5 takes the free slot, 0 evicts 2
    assert table.removed_since(mark).tolist() == [1, 2]
    assert table.removed_since(later).tolist() == [2]
    table.clear()
    assert table.removed_since(later).tolist() == [0, *range(2, 16), 100, 101]
    assert changed(table, mark) == []


def test_ids_that_left_a_wide_bucket() -> None:
    table = make_table("STEP", max_capacity=2048, bucket_capacity=2**63 - 1)
    table.log_removals()
    mark = table.mark_changes()
    table.find_or_insert(torch.arange(2048))
    table.find_or_insert(torch.arange(5000, 5010))
    table.erase(tensor([5001]))
    assert table.removed_since(mark).tolist() == [*range(10), 5001]


@pytest.mark.parametrize("threads", [1, 2])
def test_removals_are_the_difference_of_two_contents(threads: int) -> None:
    torch.set_num_threads(threads)
    table = make_table("STEP", max_capacity=1024, bucket_capacity=128)
    generator = torch.Generator().manual_seed(3)
    table.log_removals()
    before: set[int] = set()
    for _ in range(20):
        mark = table.mark_changes()
        table.find_or_insert(torch.randint(-5000, 5000, (700,), generator=generator))
        table.erase(torch.randint(-5000, 5000, (50,), generator=generator))
        now = set(contents(table).ids.tolist())
        removed = set(table.removed_since(mark).tolist())
        assert before - now <= removed
        assert not removed & now
        assert now - before <= set(changed(table, mark))
        before = now


def test_a_table_that_does_not_log_says_so() -> None:
    table = make_table()
    mark = table.mark_changes()
    assert not table.logs_removals
    with pytest.raises(UsageError, match="does not remember which ids left it; call log_removals"):
        table.removed_since(mark)
    table.find_or_insert(tensor([1]))
    table.log_removals()
    assert table.logs_removals
    with pytest.raises(UsageError, match="not remember all ids .* the log began later"):
        table.removed_since(mark)


def test_the_log_forgets_the_oldest_beyond_its_limit() -> None:
    table = make_table("STEP")
    table.log_removals(limit=64)
    marks = []
    for i in range(40):
        marks.append(table.mark_changes())
        table.find_or_insert(torch.arange(16 * i, 16 * (i + 1)))
    with pytest.raises(UsageError, match="raise the limit"):
        table.removed_since(marks[0])
    assert table.removed_since(marks[-1]).tolist() == list(range(16 * 38, 16 * 39))


def test_an_id_that_leaves_again_and_again_takes_one_place() -> None:
    table = make_table("STEP")
    table.log_removals(limit=64)
    mark = table.mark_changes()
    before = table.stats().bytes
    for _ in range(1000):
        table.insert(tensor([1, 2]), torch.zeros(2, 4))
        table.erase(tensor([1, 2]))
    assert table.removed_since(mark).tolist() == [1, 2]
    assert table.stats().bytes - before < 64 * 1024


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
def test_limits_that_are_refused(limit: object) -> None:
    with pytest.raises((ValueError, TypeError), match="limit"):
        make_table().log_removals(limit)  # type: ignore[arg-type]
