"""Stores over stores: against a plain dictionary, and what happens when the lower one fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dict_store import DictStore
from stores import ADAM, OPTIONS, assert_holds, ids_in, make_rows

from dynamicemb import ArgumentTypeError, InvalidArgumentError, StoreError, UsageError
from dynamicemb.table import Rows
from dynamicemb.tiers import HostStore, SsdStore, Stack, Store

HOST_BYTES = 24_000  # about 256 rows
KINDS = ("host-python", "host-ssd", "ssd-python", "host-ssd-python")


def make_stack(kind: str, path: Path, **changes: Any) -> Store:
    parts: dict[str, Callable[..., Any]] = {
        "host": HostStore.within(HOST_BYTES),
        "ssd": SsdStore.at(path, segment_mb=1, max_rows=600 if "python" in kind else None),
        "python": DictStore,
    }
    made = Stack.of(*(parts[name] for name in kind.split("-")))(OPTIONS, ADAM)
    assert isinstance(made, Stack)
    return made


def levels(store: Store) -> list[Store]:
    return [store.upper, *levels(store.lower)] if isinstance(store, Stack) else [store]


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_against_a_dictionary(kind: str, tmp_path: Path) -> None:
    """Which version of each id the stack must have is a plain dictionary."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))

    def some(low: int, high: int) -> torch.Tensor:
        count = int(torch.randint(low, high, (), generator=generator))
        ids = torch.randint(0, 3000, (count,), generator=generator) * 0x123456789ABCDEF - 4
        return ids

    store = make_stack(kind, tmp_path / "s")
    model: dict[int, int] = {}
    for step in range(120):
        action = int(torch.randint(0, 12, (), generator=generator))
        ids = some(1, 250)
        if action < 7:  # also the same id several times
            store.insert(make_rows(ids, step))
            model.update(dict.fromkeys(ids.tolist(), step))
        elif action == 7:
            removed = store.erase(ids)
            expected = []
            for id_ in ids.tolist():
                expected.append(model.pop(id_, None) is not None)
            assert removed.tolist() == expected
        elif action == 8:
            store.flush()
        elif action == 9 and step < 60:
            store.clear()
            model.clear()
        found = store.find(torch.unique(ids))
        assert found.found.tolist() == [int(i) in model for i in torch.unique(ids)]
        if step % 10 == 9:
            assert_same(store, model)
    assert_same(store, model)
    assert all(len(one) for one in levels(store))  # every level was used
    store.close()


def assert_same(store: Store, model: dict[int, int]) -> None:
    assert store.size() == len(store) == len(model)
    assert ids_in(store) == sorted(model)
    ids = torch.tensor(sorted(model), dtype=torch.int64)
    found = store.find(ids)
    assert bool(found.found.all())
    assert bool(store.contains(ids).all())
    exported = {
        id_: row
        for rows in store.export()
        for id_, row in zip(rows.ids.tolist(), rows.embeddings, strict=True)
    }
    for version in set(model.values()):
        mine = torch.tensor([model[int(i)] == version for i in ids])
        expected = make_rows(ids[mine], version)
        assert torch.equal(found.embeddings[mine], expected.embeddings)
        assert torch.equal(found.state[mine], expected.state)
        assert torch.equal(found.scores[mine], expected.scores)
        for id_, row in zip(expected.ids.tolist(), expected.embeddings, strict=True):
            assert torch.equal(exported[id_], row)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_every_level_is_kept(kind: str, tmp_path: Path) -> None:
    store = make_stack(kind, tmp_path / "s")
    for k in range(40):
        store.insert(make_rows(range(k * 100, k * 100 + 100)))
    for one in levels(store)[:-1]:
        if isinstance(one, HostStore):
            assert one.stats().bytes_in_memory <= HOST_BYTES
            assert one.size() > 100
        else:
            assert one.size() <= 600
    assert_holds(store, range(4000))
    assert store.stats().rows == 4000


def test_a_call_larger_than_the_upper_store(tmp_path: Path) -> None:
    store = make_stack("host-ssd", tmp_path / "s")
    store.insert(make_rows([*range(5000), *range(10)], version=1))
    assert_holds(store, range(5000), version=1)
    store.close()


class _Failing(DictStore):
    fail = False

    def insert(self, rows: Rows) -> None:
        if self.fail:
            raise StoreError(errno.EIO, "the far end does not answer")
        super().insert(rows)


@pytest.mark.parametrize("upper", ["host", "ssd"])
def test_a_lower_store_that_fails_loses_nothing(upper: str, tmp_path: Path) -> None:
    above = HostStore.within(HOST_BYTES)
    if upper == "ssd":
        above = SsdStore.at(tmp_path / "s", segment_mb=1, max_rows=200)  # type: ignore[assignment]
    store = Stack.of(above, _Failing)(OPTIONS, ADAM)
    store.insert(make_rows(range(600)))
    store.lower.fail = True
    for k in (2, 3, 4):
        with pytest.raises(StoreError, match="does not answer") as raised:
            store.insert(make_rows(range(k * 300, k * 300 + 300), version=k))
        assert raised.value.kept
        assert_holds(store, range(k * 300, k * 300 + 300), version=k)
    with pytest.raises(StoreError, match="does not answer"):
        store.flush()
    store.lower.fail = False
    store.flush()
    assert_holds(store, range(600))
    for k in (2, 3, 4):
        assert_holds(store, range(k * 300, k * 300 + 300), version=k)
    assert store.size() == 1500


def test_flush_writes_only_what_changed_to_the_lower_store() -> None:
    written: list[int] = []

    class Counting(DictStore):
        def insert(self, rows: Rows) -> None:
            written.append(len(rows))
            super().insert(rows)

    store = Stack.of(HostStore.within(HOST_BYTES), Counting)(OPTIONS, ADAM)
    store.insert(make_rows(range(100)))
    store.flush()
    assert sum(written) == 100
    store.insert(make_rows(range(10), version=1))
    store.flush()
    assert sum(written) == 110
    store.flush()
    assert sum(written) == 110


def test_snapshots_of_a_stack(tmp_path: Path) -> None:
    store = make_stack("host-ssd", tmp_path / "s")
    store.insert(make_rows(range(1000)))
    store.snapshot("first", b"note")
    store.insert(make_rows(range(1500), version=1))
    store.close()
    store = make_stack("host-ssd", tmp_path / "s")
    assert_holds(store, range(1500), version=1)
    assert store.snapshots() == ["first"]
    assert store.load_snapshot("first") == b"note"
    assert_holds(store, range(1000))
    assert store.size() == 1000
    with pytest.raises(StoreError, match="no snapshot"):
        store.load_snapshot("second")
    store.drop_snapshot("first")
    assert store.snapshots() == []
    store.close()
    without = make_stack("host-python", tmp_path / "t")
    with pytest.raises(UsageError, match="no snapshots"):
        without.snapshot("first")


def test_two_lasting_stores_snapshot_and_open_again_together(tmp_path: Path) -> None:
    def make() -> Any:
        upper = SsdStore.at(tmp_path / "a", segment_mb=1, max_rows=300)
        return Stack.of(upper, SsdStore.at(tmp_path / "b", segment_mb=1))(OPTIONS, ADAM)

    store = make()
    store.insert(make_rows(range(1000)))
    store.snapshot("first")
    store.insert(make_rows(range(400), version=1))
    store.close()
    store = make()
    assert_holds(store, range(400), version=1)
    assert_holds(store, range(400, 1000))
    assert 0 < store.upper.size() <= 300
    store.load_snapshot("first")
    assert_holds(store, range(1000))
    assert store.size() == 1000
    store.close()


def test_a_bound_without_a_store_below_is_a_full_store(tmp_path: Path) -> None:
    store = SsdStore(OPTIONS, ADAM, path=tmp_path / "s", max_rows=100)
    store.insert(make_rows(range(100)))
    store.insert(make_rows(range(50), version=1))
    with pytest.raises(StoreError, match="max_rows is 100") as raised:
        store.insert(make_rows([100]))
    assert raised.value.errno == errno.ENOSPC
    assert_holds(store, range(50), version=1)
    store.close()


def test_wrong_stacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one"):
        Stack.of()
    with pytest.raises(ArgumentTypeError, match="stores is 3"):
        Stack.of(HostStore, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="BoundedStore"):
        Stack.of(DictStore, HostStore)(OPTIONS, ADAM)
    with pytest.raises(ArgumentTypeError, match="lowest store"):
        Stack.of(HostStore, lambda options, optimizer: 3)(OPTIONS, ADAM)
    with pytest.raises(InvalidArgumentError, match="budget"):
        HostStore(OPTIONS, ADAM, budget=5)
    with pytest.raises(InvalidArgumentError, match="max_rows"):
        SsdStore(OPTIONS, ADAM, path=tmp_path / "s", max_rows=0)
