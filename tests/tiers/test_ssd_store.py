"""The SSD store through Python: rows, snapshots, bounds on memory and disk, errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import ADAM, OPTIONS, SYNC, WRITE, assert_holds, ids_in, make_rows, make_ssd

from dynamicemb import (
    CorruptStoreError,
    DynamicEmbTableOptions,
    InvalidArgumentError,
    StoreError,
    UsageError,
    _engine,
)
from dynamicemb.options import DynamicEmbScoreStrategy
from dynamicemb.tiers import RowLayout, SsdStore

MakeStore = Callable[..., SsdStore]


def test_rows_come_back_bit_by_bit(ssd: MakeStore) -> None:
    store = ssd()
    ids = [0, -1, 2**63 - 1, -(2**63), 5]
    store.insert(make_rows(ids))
    assert_holds(store, ids)
    assert not bool(store.find(torch.tensor([1, 2, -4])).found.any())
    store.insert(make_rows([5, 6, 5], version=1))
    assert_holds(store, [5, 6], version=1)
    assert_holds(store, ids[:-1])
    assert len(store) == 6
    assert ids_in(store) == sorted([*ids, 6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pair", [False, True])
def test_every_layout(tmp_path: Path, dtype: torch.dtype, pair: bool) -> None:
    strategies = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
    options = DynamicEmbTableOptions(
        dim=5,
        max_capacity=100,
        embedding_dtype=dtype,
        score_strategy=strategies if pair else strategies[0],
    )
    with_state = SsdStore(options, ADAM, path=tmp_path / "s")
    with_state.insert(make_rows(range(50), layout=RowLayout.of(options, ADAM)))
    assert_holds(with_state, range(50))
    with_state.close()


def test_erased_rows_stay_away(ssd: MakeStore) -> None:
    store = ssd()
    store.insert(make_rows(range(100)))
    removed = store.erase(torch.tensor([3, 3, 200, 7]))
    assert removed.tolist() == [True, False, False, True]
    store.close()
    store = ssd()
    assert len(store) == 98
    assert not bool(store.find(torch.tensor([3, 7])).found.any())
    store.insert(make_rows([3], version=2))
    assert_holds(store, [3], version=2)
    store.clear()
    assert len(store) == 0
    assert ids_in(store) == []


def test_a_reopened_store_has_everything(ssd: MakeStore) -> None:
    store = ssd()
    for version in range(5):
        store.insert(make_rows(range(0, 20000, version + 1), version=version))
    store.close()
    store = ssd()
    for id_ in range(0, 20000, 997):
        version = max(v for v in range(5) if id_ % (v + 1) == 0)
        assert_holds(store, [id_], version=version)


def test_disk_and_memory_are_bounded(ssd: MakeStore) -> None:
    store = ssd()
    rows = 30000
    for version in range(12):
        for begin in range(0, rows, 10000):
            store.insert(make_rows(range(begin, begin + 10000), version=version))
    store.flush()
    assert_holds(store, range(rows), version=11)
    stats = store.stats()
    record = store.layout.row_bytes + 24
    assert stats.details is not None
    assert stats.details["cleaned_segments"] > 0
    # Twice the live rows, and the segments that are being written and cleaned.
    assert stats.bytes_on_disk <= 2 * rows * record + 3 * 2**20
    assert stats.details["index_bytes"] <= 16 * rows + 200_000
    files = sum(entry.stat().st_blocks * 512 for entry in os.scandir(f"{store.path}/segments"))
    assert files == stats.bytes_on_disk


def test_snapshots(ssd: MakeStore) -> None:
    store = ssd()
    store.insert(make_rows(range(1000)))
    store.snapshot("first", b"\x00note\xff")
    for version in range(1, 30):  # enough to clean the segments of the snapshot away
        store.insert(make_rows(range(500, 4500), version=version))
    store.erase(torch.arange(100))
    store.snapshot("second.2026-11-16")
    store.close()
    store = ssd()
    assert store.snapshots() == ["first", "second.2026-11-16"]
    assert_holds(store, range(500, 4500), version=29)
    assert store.load_snapshot("first") == b"\x00note\xff"
    assert ids_in(store) == list(range(1000))
    assert_holds(store, range(1000))
    store.insert(make_rows(range(10), version=3))
    assert store.load_snapshot("second.2026-11-16") == b""
    assert ids_in(store) == list(range(100, 4500))
    with pytest.raises(StoreError, match="no snapshot.*third"):
        store.load_snapshot("third")
    store.drop_snapshot("first")
    with pytest.raises(StoreError):
        store.load_snapshot("first")
    assert_holds(store, range(500, 4500), version=29)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "x\0", ".hidden", "*", "é", "n" * 300, None])
def test_a_snapshot_name_cannot_leave_the_folder(ssd: MakeStore, name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="snapshot"):
        ssd().snapshot(name)


@pytest.mark.parametrize("block", [512, 4096])
def test_direct_access_in_blocks(ssd: MakeStore, block: int) -> None:
    store = ssd(direct_io=True, physical_block_size=block)
    for version in range(3):
        store.insert(make_rows(range(version, 30000, 7), version=version))
        store.flush()
    assert_holds(store, range(2, 30000, 7), version=2)
    store.close()
    store = ssd(direct_io=True)
    assert_holds(store, range(1, 30000, 7), version=1)
    assert store.stats().details is not None  # whether the file system allowed it:
    assert isinstance(store.stats().details["direct"], bool)  # type: ignore[index]


def test_one_store_has_a_folder_at_a_time(ssd: MakeStore) -> None:
    store = ssd()
    with pytest.raises(StoreError, match="another process or store") as raised:
        ssd()
    assert raised.value.errno == errno.EWOULDBLOCK
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.insert(make_rows([1]))
    ssd()


def test_rows_of_another_size_are_refused(ssd: MakeStore) -> None:
    store = ssd()
    path = store.path
    store.close()
    with pytest.raises(InvalidArgumentError, match="bytes; expected"):
        SsdStore(DynamicEmbTableOptions(dim=7, max_capacity=1), ADAM, path=path)


def test_bad_arguments(tmp_path: Path) -> None:
    for wrong in (
        {"physical_block_size": 1024},
        {"segment_mb": 0},
        {"io_threads": 0},
        {"direct_io": 1},
    ):
        with pytest.raises((InvalidArgumentError, TypeError), match=next(iter(wrong))):
            make_ssd(tmp_path / "s", **wrong)
    with pytest.raises(TypeError, match="path"):
        SsdStore(OPTIONS, ADAM, path="")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=str(tmp_path / "file")):
            make_ssd(path)


def test_a_full_disk_is_an_error_that_names_the_file_and_work_resumes(tmp_path: Path) -> None:
    files = _engine.FailingFiles(WRITE, 3, 4, errno.ENOSPC)
    store = make_ssd(tmp_path / "s", files=files)
    errors = []
    for version in range(12):
        try:
            store.insert(make_rows(range(15000), version=version))
        except StoreError as error:
            errors.append(error)
        assert_holds(store, range(15000), version=version)  # rows in memory stay usable
    assert [error.errno for error in errors] == [errno.ENOSPC] * 4
    for error in errors:
        assert str(tmp_path) in str(error)
        assert "No space left on device" in str(error)
        assert error.kept
    store.close()
    reopened = make_ssd(tmp_path / "s")
    assert_holds(reopened, range(15000), version=11)
    reopened.close()


def test_a_sync_that_fails_once_is_not_believed_the_second_time(tmp_path: Path) -> None:
    files = _engine.FailingFiles(SYNC, 2, 1, errno.EIO)  # after those of the new folder
    store = make_ssd(tmp_path / "s", files=files)
    store.insert(make_rows(range(100)))
    with pytest.raises(StoreError, match="syncing"):
        store.flush()
    store.flush()
    # The rows were written again, elsewhere.
    assert "000000000000.rows" not in os.listdir(tmp_path / "s" / "segments")
    assert_holds(store, range(100))
    store.close()


def test_damage_is_reported_with_the_place(ssd: MakeStore) -> None:
    store = ssd()
    store.insert(make_rows(range(1000)))
    store.close()
    path = Path(store.path) / "segments" / "000000000000.rows"
    data = bytearray(path.read_bytes())
    record = (24 + store.layout.row_bytes + 7) // 8 * 8
    data[4096 + 500 * record + 50] ^= 4
    path.write_bytes(data)
    store = ssd()
    assert_holds(store, range(500))
    with pytest.raises(CorruptStoreError, match=r"000000000000\.rows: the record at byte"):
        store.find(torch.tensor([500]))
    store.insert(make_rows([500], version=1))  # a new row heals it
    assert_holds(store, [500], version=1)


def test_a_snapshot_is_read_beside_the_store_that_took_it(ssd: MakeStore, tmp_path: Path) -> None:
    store = ssd(segment_mb=1)
    store.insert(make_rows(range(5000)))
    store.snapshot("then")
    for version in range(1, 4):  # goes on, and cleans what no snapshot needs
        store.insert(make_rows(range(4000), version=version))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    reading = make_ssd(tmp_path / "store", snapshot="then")
    assert_holds(reading, range(5000))
    assert ids_in(reading) == list(range(5000))
    for change in (
        lambda: reading.insert(make_rows([1])),
        lambda: reading.erase(torch.tensor([1])),
        reading.clear,
        reading.flush,
        lambda: reading.snapshot("x"),
        lambda: reading.load_snapshot("then"),
        lambda: reading.drop_snapshot("then"),
    ):
        with pytest.raises(UsageError, match="is open for reading"):
            change()
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    store.insert(make_rows(range(5000), version=9))
    store.drop_snapshot("then")  # its files are open here
    assert_holds(reading, range(5000))
    reading.close()
    with pytest.raises(UsageError, match="is closed"):
        reading.find(torch.tensor([1]))
    assert_holds(store, range(5000), version=9)
    with pytest.raises(StoreError, match="no snapshot"):
        make_ssd(tmp_path / "store", snapshot="then")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(StoreError, match="no snapshot"):
        make_ssd(tmp_path / "nowhere", snapshot="then")
    assert not (tmp_path / "nowhere").exists()
