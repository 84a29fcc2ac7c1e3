"""Two errors of the disk, one after the other, lose no row and leave a store that works."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from stores import SYNC, assert_holds, make_rows, make_ssd
from two_errors import live

from dynamicemb import _engine
from dynamicemb.errors import StoreError


def test_any_two_operations_of_a_short_life_may_fail(memory_path: Path) -> None:
    first, operations = 0, 1
    while first < operations:
        for then in range(first + 1, operations + 1):
            path = memory_path / f"{first}-{then}"
            operations = max(operations, live(path, first, then, long=False))
        first += 1
    assert operations > 20


@pytest.mark.parametrize("first", range(20, 60, 8))
def test_two_operations_of_a_life_with_compaction_may_fail(memory_path: Path, first: int) -> None:
    for then in (first + 1, first + 2, first + 5):
        assert live(memory_path / str(then), first, then, long=True) > then


@pytest.mark.parametrize("second", range(2, 9))
def test_a_flush_that_fails_after_one_that_failed_is_no_corruption(
    memory_path: Path, second: int
) -> None:
    files = _engine.FailingFiles(SYNC, 3, 1, errno.EIO, 3 + second)
    store = make_ssd(memory_path / "s", files=files)
    store.insert(make_rows(range(200)))
    failures = 0
    for _ in range(6):
        store.insert(make_rows(range(200 + 50 * failures, 250 + 50 * failures)))
        try:
            store.flush()
        except StoreError:
            failures += 1
    assert failures == 2
    store.close()
    reopened = make_ssd(memory_path / "s")
    assert_holds(reopened, range(350))
    reopened.close()
