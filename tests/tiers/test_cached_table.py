"""The cached table's own operations, its limits and its errors."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from dict_store import DictStore
from stores import ADAM, READ, WRITE

from dynamicemb import (
    DynamicEmbTableOptions,
    InvalidArgumentError,
    StoreError,
    UsageError,
    _engine,
)
from dynamicemb.table import create_table
from dynamicemb.tiers import CachedTable, HostStore, SsdStore
from reference import U64
from tables import DEBUG, EXTREME_IDS, STRATEGY, Clock, tensor


def make(store: Any = DictStore, *, rows: int = 32, **changes: Any) -> CachedTable:
    fields: dict[str, Any] = {
        "dim": 4,
        "max_capacity": 4096,
        "bucket_capacity": 16,
        "initializer_args": DEBUG,
        "external_storage": store,
        "local_hbm_for_values": rows * (16 + 32 + 25),
        "score_strategy": STRATEGY["STEP"],
    }
    table = create_table(
        DynamicEmbTableOptions(**(fields | changes)), optimizer=ADAM, clock=Clock(step=1), seed=1
    )
    assert isinstance(table, CachedTable)
    return table


def test_the_cache_keeps_its_budget() -> None:
    table = make(rows=100)
    assert table.cache.capacity == 96
    assert table.cache.stats().bytes <= 100 * 73


def test_every_operation_sees_both_levels() -> None:
    table = make()
    ids = torch.arange(200)
    for part in ids.split(8):
        table.find_or_insert(part)
    assert len(table) == 200
    assert len(table.cache) <= 32
    found = table.find(tensor([0, 199, 1000, 0]))
    assert found.found.tolist() == [True, True, False, True]
    assert found.embeddings[0].tolist() == [0.0] * 4
    assert table.contains(ids).all()
    assert sorted(i for rows in table.export() for i in rows.ids.tolist()) == ids.tolist()
    assert sum(len(rows) for rows in table.export(score_threshold=20)) == 200 - 19 * 8
    done = table.assign(tensor([0, 199, 1000]), torch.ones(3, 4))
    assert done.tolist() == [True, True, False]
    assert table.find(tensor([0, 199])).embeddings.sum() == 8
    assert table.erase(tensor([0, 199, 1000, 0])).tolist() == [True, True, False, False]
    assert len(table) == 198
    table.clear()
    assert len(table) == 0
    assert not table.contains(ids).any()


def test_every_id_is_legal() -> None:
    table = make()
    ids = tensor(EXTREME_IDS)
    table.find_or_insert(ids)
    for part in torch.arange(1000, 1400).split(8):
        table.find_or_insert(part)
    assert not (table.cache.find_slots(ids) >= 0).all()
    found = table.find(ids)
    assert found.found.all()
    assert found.embeddings[:, 0].tolist() == [float((i & U64) % 100000) for i in EXTREME_IDS]


def test_insert_with_and_without_scores() -> None:
    table = make()
    table.insert(
        torch.arange(100), torch.ones(100, 4), state=torch.ones(100, 8), scores=torch.arange(100)
    )
    assert len(table) == 100
    assert len(table.cache) == 0  # whole rows go below
    table.insert(torch.arange(50, 150), torch.full((100, 4), 2.0))  # state of existing rows stays
    assert len(table) == 150
    found = table.find(torch.arange(150))
    assert found.embeddings.sum() == 50 * 4 + 100 * 8
    assert found.state.sum() == 100 * 8
    table.insert(torch.arange(3), torch.zeros(3, 4), scores=torch.arange(3))
    assert table.find(torch.arange(3)).state.sum() == 3 * 8


def test_a_batch_that_does_not_fit_is_an_error_and_loses_nothing() -> None:
    table = make()
    for part in torch.arange(200).split(8):
        table.find_or_insert(part)
    with pytest.raises(UsageError, match="find no place in the cache"):
        table.find_or_insert(torch.arange(200))
    found = table.find(torch.arange(200))
    assert found.found.all()
    assert found.embeddings[:, 0].tolist() == list(range(200))
    table.find_or_insert(torch.arange(8))


def test_a_full_disk_loses_no_row_and_work_resumes(tmp_path: Path) -> None:
    files = _engine.FailingFiles(WRITE, 2, 5, errno.ENOSPC)
    table = make(SsdStore.at(tmp_path / "s", files=files), rows=2048, max_capacity=2**20)
    errors = []
    k = 0
    while k < 200:
        try:
            table.find_or_insert(torch.arange(k * 500, k * 500 + 500))
            k += 1
        except StoreError as error:
            errors.append(error)
        assert len(errors) < 10
    assert len(errors) == 4  # the first was met after a batch; the next one raised
    assert all(str(tmp_path) in str(error) for error in errors)
    assert len(table) == 100_000
    found = table.find(torch.arange(100_000))
    assert found.found.all()
    assert torch.equal(found.embeddings[:, 0], torch.arange(100_000).float())


def test_a_disk_that_cannot_read_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    files = _engine.FailingFiles(READ, 40, 3, errno.EIO)
    table = make(SsdStore.at(tmp_path / "s", files=files), max_capacity=2**16)
    errors = []
    generator = torch.Generator().manual_seed(1)
    for k in range(300):
        ids = torch.randint(0, 400, (8,), generator=generator) + (0 if k > 60 else k * 8)
        for _ in range(5):  # until the disk reads again
            try:
                table.find_or_insert(ids)
                break
            except StoreError as error:
                errors.append(error)
        if k % 10 == 9:
            table.flush()
    assert 1 <= len(errors) <= 3
    assert all(error.errno == errno.EIO and str(tmp_path) in str(error) for error in errors)
    found = table.find(torch.arange(400))
    assert torch.equal(found.embeddings[found.found][:, 0], torch.arange(400.0)[found.found])
    assert int(found.found.sum()) > 300


class _Stubborn(DictStore):
    fail = False

    def insert(self, rows: Any) -> None:
        if self.fail:
            raise StoreError(errno.EIO, "the far end does not answer")
        super().insert(rows)


def test_rows_that_a_store_refuses_are_kept_until_it_takes_them() -> None:
    table = make(_Stubborn)
    for part in torch.arange(200).split(8):
        table.find_or_insert(part)
    table.store.fail = True  # type: ignore[attr-defined]
    table.find_or_insert(torch.arange(200, 208))  # it ran when rows left for it
    for _ in range(3):
        with pytest.raises(StoreError, match="does not answer"):
            table.find_or_insert(torch.arange(208, 216))
    table.store.fail = False  # type: ignore[attr-defined]
    for part in torch.arange(208, 400).split(8):
        table.find_or_insert(part)
    assert len(table) == 400
    assert table.find(torch.arange(400)).found.all()


def test_flush_writes_what_changed() -> None:
    table = make()
    table.find_or_insert(torch.arange(16))
    assert table.store.size() == 0
    table.flush()
    assert table.store.size() == len(table) == 16
    before = table.cache_stats().written_back
    table.find_or_insert(torch.arange(2))
    table.flush()
    assert table.cache_stats().written_back == before + 2
    table.drop_cache()
    assert len(table.cache) == 0
    assert len(table) == 16


def test_another_kind_of_optimizer_needs_an_empty_store(tmp_path: Path) -> None:
    from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind

    adagrad = Optimizer(OptimizerKind.ADAGRAD, OptimizerArgs())
    table = make(SsdStore.at(tmp_path / "s"))
    table.set_optimizer(adagrad)
    for part in torch.arange(64).split(8):
        table.find_or_insert(part)
    assert table.find(torch.arange(64)).state.shape == (64, 4)
    with pytest.raises(UsageError, match="needs an empty store"):
        table.set_optimizer(ADAM)


def test_wrong_options() -> None:
    with pytest.raises(InvalidArgumentError, match="local_hbm_for_values"):
        create_table(DynamicEmbTableOptions(dim=4, max_capacity=100, caching=True))
    with pytest.raises(TypeError, match="external_storage"):
        make(lambda options, optimizer: object())
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(make())
    with pytest.raises(UsageError, match="CUSTOMIZED"):
        make(score_strategy=STRATEGY["CUSTOMIZED"]).find_or_insert(torch.arange(3))


def test_a_host_store_evicts_by_score_beyond_its_capacity() -> None:
    table = make(HostStore, max_capacity=64)
    for part in torch.arange(400).split(8):
        table.find_or_insert(part)
    assert len(table) <= 64 + 32
    assert table.stats().evictions > 0
    assert table.contains(torch.arange(392, 400)).all()


def test_a_host_store_drops_nothing_before_it_is_as_large_as_it_may_be() -> None:
    """A bucket may be full long before the table is: it grows then."""
    table = make(HostStore, max_capacity=2**16)
    ids = torch.arange(9000)
    for part in ids.split(16):
        table.find_or_insert(part)
    assert len(table) == 9000
    assert table.stats().evictions == 0
    assert table.contains(ids).all()
