"""What changed in a cached table and which ids left it, against one in memory; copies."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from dict_store import DictStore
from stores import ADAM

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbTableOptions,
    EmbOptimType,
    UsageError,
)
from dynamicemb.incremental_dump import incremental_dump, track_removals
from dynamicemb.table import create_table
from dynamicemb.table.id_log import IdLog
from dynamicemb.tiers import CachedTable, HostStore, SsdStore, Stack
from dynamicemb.tiers.sizing import table_bytes
from tables import DEBUG, STRATEGY


def options(store: Any, slots: int = 32, **changes: Any) -> DynamicEmbTableOptions:
    fields: dict[str, Any] = {
        "dim": 4,
        "max_capacity": 4096,
        "bucket_capacity": 16,
        "initializer_args": DEBUG,
        "score_strategy": STRATEGY["STEP"],
    }
    made = DynamicEmbTableOptions(**(fields | changes))
    if store is not None:
        made.external_storage = store
        made.local_hbm_for_values = table_bytes(slots, made, ADAM, cache=True)
    return made


def make(store: Any = DictStore, **changes: Any) -> Any:
    return create_table(options(store, **changes), optimizer=ADAM, seed=1)


def ids_of(batches: Any) -> list[int]:
    return sorted(i for rows in batches for i in rows.ids.tolist())


def stack(path: Path) -> Any:
    return Stack.of(HostStore.within(4000), SsdStore.at(path))


@pytest.mark.parametrize("kind", ["python", "host", "stack"])
def test_rows_that_changed_after_a_mark(kind: str, tmp_path: Path) -> None:
    store = {"python": DictStore, "host": HostStore, "stack": stack(tmp_path / "s")}[kind]
    table, plain = make(store), make(None)
    both = (table, plain)
    for one in both:
        for part in torch.arange(200).split(8):
            one.find_or_insert(part)
    marks = [one.mark_changes() for one in both]
    for one in both:
        one.find_or_insert(torch.arange(100, 108))
        one.find_or_insert(torch.arange(300, 308))
        one.assign(torch.tensor([3, 5000]), torch.ones(2, 4))
        one.insert(
            torch.tensor([7, 400]),
            torch.ones(2, 4),
            state=torch.zeros(2, 8),
            scores=torch.tensor([1, 2]),
        )
    expected = ids_of(plain.export(changed_since=marks[1]))
    assert expected == [3, 7, *range(100, 108), *range(300, 308), 400]
    changed = ids_of(table.export(changed_since=marks[0]))
    assert set(expected) <= set(changed)
    assert len(changed) == len(set(changed)) <= len(expected) + 32  # and what left the cache
    table.drop_cache()
    later = table.mark_changes()
    assert ids_of(table.export(changed_since=later)) == []
    assert set(expected) <= set(ids_of(table.export(changed_since=marks[0])))
    assert torch.equal(table.find(torch.tensor([3])).embeddings, torch.ones(1, 4))
    table.find_or_insert(torch.tensor([55]))
    assert ids_of(table.export(changed_since=later)) == [55]
    # Either a score or a change.
    by_score = ids_of(plain.export(score_threshold=26))
    both_ways = ids_of(table.export(score_threshold=26, changed_since=later))
    assert set(by_score) | {55} <= set(both_ways)
    assert len(both_ways) == len(set(both_ways))


def test_ids_that_left_after_a_mark() -> None:
    table = make()
    with pytest.raises(UsageError, match="does not remember"):
        table.removed_since(1)
    table.log_removals()
    assert table.logs_removals
    for part in torch.arange(200).split(8):
        table.find_or_insert(part)
    first = table.mark_changes()
    assert table.removed_since(first).tolist() == []  # what left the cache is still there
    table.erase(torch.tensor([1, 199, 5000, 1]))
    second = table.mark_changes()
    table.erase(torch.tensor([50]))
    table.find_or_insert(torch.tensor([1]))
    assert table.removed_since(first).tolist() == [50, 199]
    assert table.removed_since(second).tolist() == [50]
    table.clear()
    assert table.removed_since(second).tolist() == list(range(199))


def test_rows_that_the_lowest_store_drops_are_removals() -> None:
    table = make(HostStore, slots=16)
    table.log_removals()
    mark = table.mark_changes()
    for part in torch.arange(6000).split(8):
        table.find_or_insert(part)
    gone = table.removed_since(mark)
    assert len(gone) == 6000 - len(table) > 500
    assert not bool(table.contains(gone).any())


def test_a_snapshot_that_is_loaded_makes_older_marks_unknown(tmp_path: Path) -> None:
    table = make(SsdStore.at(tmp_path / "s"))
    table.log_removals()
    table.find_or_insert(torch.arange(20))
    table.snapshot("first")
    mark = table.mark_changes()
    table.find_or_insert(torch.arange(20, 40))
    table.load_snapshot("first")
    with pytest.raises(UsageError, match="does not remember all"):
        table.removed_since(mark)
    assert ids_of(table.export(changed_since=mark)) == list(range(20))  # rather all than too few
    assert ids_of(table.export(changed_since=table.mark_changes())) == []


@pytest.mark.parametrize("strategy", ["STEP", "NO_EVICTION"])
def test_an_incremental_dump_with_deletions(strategy: str, tmp_path: Path) -> None:
    """The sum of dumps is the table, although rows went to the store between them."""
    module = BatchedDynamicEmbeddingTables(
        [options(stack(tmp_path / "s"), slots=64, score_strategy=STRATEGY[strategy])],
        ["t"],
        optimizer=EmbOptimType.ADAM,
        seed=1,
    )
    scores = track_removals(module)
    offsets = torch.arange(9)
    generator = torch.Generator().manual_seed(3)
    copied: dict[int, torch.Tensor] = {}
    for step in range(30):
        module(torch.randint(0, 300, (8,), generator=generator), offsets).sum().backward()
        if step % 5 == 2:
            module.tables[0].erase(torch.randint(0, 300, (20,), generator=generator))
        if step % 6 == 5:
            assert scores is not None
            dumped, scores, removed = incremental_dump(module, scores, removed=True)  # type: ignore[misc]
            (path,) = dumped
            ids, rows = dumped[path]["t"]
            copied.update(zip(ids.tolist(), rows, strict=True))
            for id_ in removed[path]["t"].tolist():
                copied.pop(id_, None)
            state = module.tables[0].state_dict()
            assert set(copied) == set(state["ids"].tolist())
            for id_, row in zip(state["ids"].tolist(), state["embeddings"], strict=True):
                assert torch.equal(copied[id_], row)


def test_the_log_forgets_the_oldest_beyond_its_limit() -> None:
    log = IdLog(limit=1000, known_since=1)
    for mark in range(1, 40):
        log.add(mark, torch.arange(mark * 30, mark * 30 + 60))
    assert log.known_since > 1
    for mark in range(log.known_since, 40):
        assert log.after(mark).tolist() == list(range(mark * 30, 39 * 30 + 60))
    log.set_limit(100)
    assert log.known_since == 38
    assert log.after(38).tolist() == list(range(38 * 30, 39 * 30 + 60))
    assert log.bytes == 8 * 90
    many = IdLog(limit=2**20, known_since=1)
    for _ in range(3000):
        many.add(1, torch.arange(100))
    assert many._count < 2**17
    assert many.after(1).tolist() == list(range(100))
    assert many.after(2).tolist() == []


def test_a_table_over_main_memory_is_copied_with_its_rows() -> None:
    table = make(HostStore)
    for part in torch.arange(200).split(8):
        table.find_or_insert(part)
    before = table.state_dict()
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert isinstance(other, CachedTable)
        assert other.cache.capacity == table.cache.capacity
        other.find_or_insert(torch.arange(1000, 1008))
        other.erase(torch.arange(10))
        assert len(other) == 198
        assert other.step == table.step + 1
    for name, tensor in table.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_table_over_another_store_is_not_copied(tmp_path: Path) -> None:
    for store in (DictStore, SsdStore.at(tmp_path / "s"), stack(tmp_path / "t")):
        table = make(store)
        with pytest.raises(UsageError, match="two tables would share the store"):
            copy.deepcopy(table)
