"""A batch that fails in a store and is tried again is counted once."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from dict_store import DictStore
from flaky_store import Faults, FlakyStore
from stores import WRITE

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbCheckMode,
    DynamicEmbedding,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
    _engine,
)
from dynamicemb.errors import InsertionError, StoreError
from dynamicemb.table import Table, create_table
from dynamicemb.table.rows import UNPOOLED
from dynamicemb.tiers import CachedTable, HostStore, RemoteStore, SsdStore, Stack
from redis_servers import PATIENT, Proxy, RedisServer
from tables import STRATEGY

FAILURES = (StoreError, ConnectionResetError)
IDS, BATCH, STEPS = 700, 60, 20
ResultT = TypeVar("ResultT")


def again(work: Callable[[], ResultT], *, most: int = 200) -> ResultT:
    """``work``, tried until it does not fail."""
    for _ in range(most):
        try:
            return work()
        except FAILURES:
            pass
    raise AssertionError(f"it failed {most} times")


def below(kind: str, path: Path) -> Callable[..., Any]:
    parts: dict[str, Callable[..., Any]] = {
        "python": DictStore,
        "host": HostStore,
        "ssd": SsdStore.at(path, segment_mb=1),
        "stack": Stack.of(HostStore.within(30_000), SsdStore.at(path, segment_mb=1)),
    }
    return parts[kind]


def options(store: Any, strategy: str, admission: str | None = None) -> DynamicEmbTableOptions:
    more: dict[str, Any] = {}
    if admission == "frequency":
        more["admit_strategy"] = FrequencyAdmissionStrategy(2)
        more["admission_counter"] = KVCounter(4096)
    elif admission == "probability":
        more["admit_strategy"] = ProbabilityAdmissionStrategy(0.5)
    return DynamicEmbTableOptions(
        dim=4,
        max_capacity=8192,
        bucket_capacity=64,
        score_strategy=STRATEGY[strategy],
        external_storage=store,
        local_hbm_for_values=256 * 120,
        **more,
    )


def clock() -> Callable[[], int]:
    """Readings of their own, so that two runs have the same."""
    numbers = iter(range(1, 2**62))
    return lambda: next(numbers)


def state_of(table: Table) -> dict[str, Any]:
    """Everything that two runs must agree on."""
    rows = list(table.export())
    ids = torch.cat([one.ids for one in rows])
    order = torch.argsort(ids)
    names = ("ids", "embeddings", "state", "scores")
    result: dict[str, Any] = {
        name: torch.cat([getattr(one, name) for one in rows])[order] for name in names
    }
    stats = vars(table.stats())
    counts = ["hits", "misses", "inserts", "failures", "rejections", "dropped_gradients", "size"]
    result |= {name: stats[name] for name in counts}
    result["progress"] = table.progress()
    if (counter := table.export_counter()) is not None:
        order = torch.argsort(counter[0])
        result["counter"] = torch.stack([part[order] for part in counter])
    if isinstance(table, CachedTable):
        of_cache = vars(table.cache_stats())
        names = ("hits", "misses", "brought_up", "written_back", "size")
        result |= {f"cache {name}": of_cache[name] for name in names}
    return result


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def assert_alike(
    one: tuple[list[torch.Tensor], list[dict[str, Any]]],
    other: tuple[list[torch.Tensor], list[dict[str, Any]]],
) -> None:
    """Two runs: losses, and tables."""
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b)
    for table, same in zip(one[1], other[1], strict=True):
        assert_equal(table, same)


def batches(seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, offsets) of two tables."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(STEPS):
        ids = (torch.rand(2 * BATCH, generator=generator) ** 2 * IDS).long()
        result.append((ids, torch.arange(0, 2 * BATCH + 1)))
    return result


def train(
    stores: list[Any],
    strategy: str = "STEP",
    *,
    admission: str | None = None,
    way: str = "plain",
    before_step: Callable[[int], None] = lambda step: None,
) -> tuple[list[torch.Tensor], BatchedDynamicEmbeddingTables]:
    """Train two tables, one after the other in a group, trying again what fails."""
    module = BatchedDynamicEmbeddingTables(
        [options(store, strategy, admission) for store in stores],
        ["a", "b"],
        pooling_mode=DynamicEmbPoolingMode.NONE,
        optimizer="adam",
        learning_rate=0.05,
        separate_step=way == "separate step",
        seed=1,
    )
    for table in module.tables:
        table._clock_function = clock()
    if strategy == "CUSTOMIZED":
        module.set_score({"a": 5, "b": 6})
    losses = []
    waiting: list[torch.Tensor] = []
    todo = batches()
    for step, (ids, offsets) in enumerate(todo):
        before_step(step)
        if way == "prefetch":
            if step == 0:
                module.prefetch(ids, offsets)
            if step + 1 < len(todo):
                module.prefetch(*todo[step + 1])
        loss = again(lambda: module(ids, offsets)).square().mean()  # noqa: B023
        losses.append(loss.detach())
        if way == "two forwards":  # rows of the first may have left when its backward comes
            waiting.append(loss)
            if len(waiting) < 2:
                continue
            for one in waiting:
                one.backward()
            waiting.clear()
        else:
            loss.backward()
        if way == "separate step":
            again(module.step)
        if step % 8 == 7:
            again(module.flush)
            module.eval()
            losses.append(again(lambda: module(ids, offsets)).sum())  # noqa: B023
            module.train()
    return losses, module


def run(
    kind: str,
    path: Path,
    faults: Faults,
    strategy: str,
    *,
    admission: str | None = None,
    way: str = "plain",
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    stores = [
        functools.partial(FlakyStore, below=below(kind, path / name), faults=faults)
        for name in "ab"
    ]
    losses, module = train(stores, strategy, admission=admission, way=way)
    faults.rate = 0.0
    return losses, [state_of(table) for table in module.tables]


CASES = [
    ("python", "STEP", None, "plain"),
    ("python", "LFU", "frequency", "plain"),
    ("host", "TIMESTAMP_LFU", "probability", "prefetch"),
    ("ssd", "TIMESTAMP", "frequency", "prefetch"),
    ("stack", "LFU", "frequency", "two forwards"),
    ("python", "STEP", "frequency", "two forwards"),
    ("ssd", "CUSTOMIZED", None, "separate step"),
    ("stack", "STEP", "probability", "separate step"),
    ("stack", "NO_EVICTION", "frequency", "two forwards"),
    ("python", "NO_EVICTION", None, "prefetch"),
]


@pytest.mark.parametrize(("kind", "strategy", "admission", "way"), CASES)
def test_a_run_with_failures_is_equal_to_one_without(
    tmp_path: Path, kind: str, strategy: str, admission: str | None, way: str
) -> None:
    expected = run(kind, tmp_path / "without", Faults(0.0), strategy, admission=admission, way=way)
    faults = Faults(0.3, seed=len(kind + strategy))
    failed = run(kind, tmp_path / "with", faults, strategy, admission=admission, way=way)
    assert faults.count > 10
    assert_alike(expected, failed)


def test_a_disk_that_is_full_for_a_while_changes_no_count(tmp_path: Path) -> None:
    results = []
    for name in ("without", "with"):
        files = _engine.FailingFiles(WRITE, 2, 4 if name == "with" else 0, errno.ENOSPC)
        store = SsdStore.at(tmp_path / name, segment_mb=1, files=files)
        made = replace(options(store, "LFU"), local_hbm_for_values=2**18)
        table = create_table(made, seed=1)
        generator = torch.Generator().manual_seed(5)
        failures = 0
        for _ in range(250):
            ids = torch.randint(0, 2**17, (500,), generator=generator)
            while True:
                try:
                    table.find_or_insert(ids)
                    break
                except StoreError:
                    failures += 1
        assert files.seen > 6
        assert (0 < failures < 4) == (name == "with")  # at least one was met after a batch ran
        results.append(state_of(table))
    assert_equal(*results)


def test_a_server_whose_connections_are_cut_changes_no_count(tmp_path: Path) -> None:
    server = RedisServer()
    results = []
    try:
        for name in ("without", "with"):
            proxy = Proxy(server.port)
            url = server.url(f"?prefix={name}&&retry_limit=0&&{PATIENT}", port=proxy.port)
            stores = [RemoteStore.at(url, table=one) for one in "ab"]
            generator = torch.Generator().manual_seed(6)

            def cut(step: int, proxy: Proxy = proxy, generator: Any = generator) -> None:
                places = torch.randint(0, 2000, (2,), generator=generator)
                proxy.cut_after(*places.tolist())  # of replies: to reads, or to writes

            before_step = cut if name == "with" else lambda step: None
            losses, module = train(stores, admission="frequency", before_step=before_step)
            proxy._cuts.clear()
            results.append((losses, [state_of(table) for table in module.tables]))
            assert (proxy.resets > 4) == (name == "with")
            proxy.close()
    finally:
        server.close()
    assert_alike(*results)


def one_table(faults: Faults, strategy: str = "LFU", **changes: Any) -> CachedTable:
    store = functools.partial(FlakyStore, below=DictStore, faults=faults)
    made = replace(options(store, strategy), **changes)
    table = create_table(made, seed=1, clock=clock())
    assert isinstance(table, CachedTable)
    return table


@pytest.mark.parametrize("call", ["find_or_insert", "insert"])
@pytest.mark.parametrize(("strategy", "capacity"), [("LFU", 8192), ("NO_EVICTION", 448)])
def test_calls_of_a_table_count_once(call: str, strategy: str, capacity: int) -> None:
    results = []
    for rate in (0.0, 0.4):
        faults = Faults(rate, seed=4)
        table = one_table(faults, strategy, max_capacity=capacity)
        generator = torch.Generator().manual_seed(5)
        for _ in range(20):
            ids = torch.randint(0, 600, (200,), generator=generator)
            if call == "insert":  # in parts: more ids than the cache takes at once
                again(lambda: table.insert(ids, torch.ones(len(ids), 4)))  # noqa: B023
            else:
                again(lambda: table.find_or_insert(ids))  # noqa: B023
        faults.rate = 0.0
        results.append(state_of(table))
        assert (faults.count > 10) == bool(rate)
        assert (results[-1]["failures"] > 10) == (strategy == "NO_EVICTION")
    assert_equal(*results)


class _Broken(DictStore):
    """Takes and gives rows unless it is told not to."""

    takes = gives = True

    def insert(self, rows: Any) -> None:
        if not self.takes:
            raise StoreError(errno.ENOSPC, "full")
        super().insert(rows)

    def find(self, ids: torch.Tensor) -> Any:
        if not self.gives:
            raise StoreError(errno.EIO, "away")
        return super().find(ids)


def broken_table(**changes: Any) -> tuple[CachedTable, _Broken]:
    table = create_table(replace(options(_Broken, "STEP"), **changes), seed=1)
    assert isinstance(table, CachedTable)
    assert isinstance(table.store, _Broken)
    return table, table.store


def test_a_batch_that_ran_is_not_undone_by_the_rows_that_leave_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, store = broken_table()
    for part in torch.arange(200).split(40):
        table.find_or_insert(part)
    store.takes = False
    with caplog.at_level(logging.WARNING, logger="dynamicemb.tiers"):
        while not caplog.records:
            table.find_or_insert(torch.arange(table.size(), table.size() + 40))
    assert "rows that left a cache wait in memory" in caplog.text
    before, step = len(table.cache), table.get_score()
    for _ in range(3):  # and no more of them than of one batch
        with pytest.raises(StoreError, match="full"):
            table.find_or_insert(torch.arange(5000, 5040))
        assert (len(table.cache), table.get_score()) == (before, step)
    store.takes = True
    table.find_or_insert(torch.arange(5000, 5040))
    assert table.get_score() == step + 1


def test_evaluation_sees_rows_that_wait_for_the_store() -> None:
    store: Any = _Broken
    module = BatchedDynamicEmbeddingTables(
        [options(store, "STEP")], pooling_mode=DynamicEmbPoolingMode.NONE, seed=1
    )
    (table,) = module.tables
    assert isinstance(table, CachedTable)
    below = table.store
    assert isinstance(below, _Broken)
    ids = torch.arange(800)
    rows = []
    for k, part in enumerate(ids.split(40)):
        below.takes = k < 19  # rows leave for the last batch and wait
        rows.append(module(part, torch.arange(41)).detach())
    module.eval()
    with pytest.raises(StoreError, match="full"):  # not rows that never were
        module(ids, torch.arange(801))
    below.takes = True
    assert torch.equal(module(ids, torch.arange(801)), torch.cat(rows))


def test_rows_that_wait_are_not_read_ahead_from_the_store() -> None:
    """The store has older ones, or none."""
    module = BatchedDynamicEmbeddingTables(
        [options(_Broken, "STEP")],
        pooling_mode=DynamicEmbPoolingMode.NONE,
        optimizer="sgd",
        learning_rate=1.0,
        seed=1,
    )
    (table,) = module.tables
    assert isinstance(table, CachedTable)
    store = table.store
    assert isinstance(store, _Broken)
    offsets, first = torch.arange(41), torch.arange(40)
    for k in range(40):
        module(first + 40 * k, offsets).sum().backward()
    module(first, offsets).sum().backward()  # they come up, and change
    expected = table.find(first).embeddings
    for k in range(40, 100):
        store.takes = False
        module(first + 40 * k, offsets)
        if int((table.cache.find_slots(first) < 0).sum()):  # of them, some wait
            break
        store.takes = True
        table.size()
    module.prefetch(first, offsets)
    for ahead in table.levels.below._ahead:
        ahead._done.wait()
    store.takes = True
    assert torch.equal(module(first, offsets), expected)


def test_a_backward_needs_no_store() -> None:
    """Rows that left after the forward come up again from memory."""
    results = []
    for fails in (False, True):
        table, store = broken_table()
        group = table.make_group([table])
        lookup = group.find_or_insert(torch.arange(100), (0, 100))
        for k in range(1, 12):
            group.find_or_insert(torch.arange(100 * k, 100 * k + 100), (0, 100))
        assert int((table.cache.find_slots(torch.arange(100)) < 0).sum()) > 50
        store.takes = store.gives = not fails
        group.update(lookup, UNPOOLED, torch.ones(100, 4))
        store.takes = store.gives = True
        results.append(state_of(table))
    assert_equal(*results)


def test_a_backward_knows_what_changed_in_the_store() -> None:
    table, store = broken_table()
    group = table.make_group([table])
    lookup = group.find_or_insert(torch.arange(100), (0, 100))
    for k in range(1, 12):
        group.find_or_insert(torch.arange(100 * k, 100 * k + 100), (0, 100))
    away = torch.arange(100)[table.cache.find_slots(torch.arange(100)) < 0]
    table.assign(away[:1], torch.full((1, 4), 7.0))
    store.gives = False
    with pytest.raises(StoreError, match="away"):  # what memory has is not the truth any more
        group.update(lookup, UNPOOLED, torch.ones(100, 4))
    store.gives = True
    group.update(lookup, UNPOOLED, torch.ones(100, 4))
    assert torch.equal(table.find(away[:1]).embeddings, torch.full((1, 4), 6.99))


def test_a_step_over_two_modules_is_taken_once() -> None:
    """The rows of one must not be updated before those of the other can be read."""
    results = []
    for fails in (False, True):
        modules = [DynamicEmbedding(4, options=options(_Broken, "STEP"), seed=s) for s in (1, 2)]
        sgd = torch.optim.SGD([p for one in modules for p in one.parameters()], lr=0.1)
        store: Any = modules[1].table.store
        failures = 0
        for _ in range(3):
            for one in modules:
                one(torch.arange(100)).square().sum().backward()
                for part in torch.arange(1000, 1600).split(100):  # rows with gradients leave
                    one(part)
            store.gives = not fails
            try:
                sgd.step()
            except StoreError:
                failures += 1
                store.gives = True
                sgd.step()
            sgd.zero_grad()
        results.append([state_of(one.table) for one in modules])
    assert failures == 3
    for table, same in zip(*results, strict=True):
        assert_equal(table, same)


def test_an_insert_with_an_insertion_error_loses_no_row() -> None:
    """Those that left the cache for it are with the error, which nobody looks into."""
    table, _ = broken_table(safe_check_mode=DynamicEmbCheckMode.ERROR, bucket_capacity=16)
    ids = torch.arange(100_000)
    ids = ids[table.bucket_of(ids) == 3]
    table.find_or_insert(ids[:16])
    assert table.cache.capacity >= 17 * 8  # ids of a part of the insert
    with pytest.raises(InsertionError):
        table.insert(ids[16:40], torch.ones(24, 4))
    assert table.contains(ids[:32]).all()
    assert len(table) == sum(len(rows) for rows in table.export()) == 32


def test_a_batch_with_an_insertion_error_counts_its_new_rows() -> None:
    table, _ = broken_table(safe_check_mode=DynamicEmbCheckMode.ERROR)
    with pytest.raises(InsertionError):
        table.find_or_insert(torch.arange(5000))
    ids = torch.cat([rows.ids for rows in table.export()])
    assert len(table) == len(ids) > 200
