"""A life of an SSD store in which two operations of the disk fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stores import OPEN, REMOVE, RENAME, SYNC, WRITE, assert_holds, ids_in, make_rows, make_ssd

from dynamicemb import _engine
from dynamicemb.errors import StoreError

_KINDS = OPEN | WRITE | SYNC | RENAME | REMOVE
_CLEANED = 8000  # rows that are written often enough for segments to be cleaned
ResultT = TypeVar("ResultT")


def live(path: Path, first: int, then: int, *, long: bool) -> int:
    """Operation number ``first`` and number ``then`` fail. Every failure is a StoreError, every row
    is found all the time, and a call that is repeated succeeds once the disk works. Returns the
    number of operations."""
    files = _engine.FailingFiles(_KINDS, first, 1, errno.EIO, then)
    store = _insist(lambda: make_ssd(path, files=files))
    _try(lambda: store.insert(make_rows(range(200))))
    _try(store.flush)
    _try(lambda: store.insert(make_rows(range(200, 300))))
    assert_holds(store, range(300))
    _try(store.flush)
    if long:
        for version in range(1, 9):  # writes before a flush, and compaction
            rows = make_rows(range(1000, 1000 + _CLEANED), version=version)
            _try(lambda rows=rows: store.insert(rows))  # type: ignore[misc]
            assert_holds(store, range(1000, 1000 + _CLEANED), version=version)
        _insist(lambda: store.snapshot("kept"))
        _try(store.flush)
    _insist(store.flush)
    _insist(store.close)
    reopened = make_ssd(path)
    assert_holds(reopened, range(300))
    expected = list(range(300))
    if long:
        expected += range(1000, 1000 + _CLEANED)
        assert_holds(reopened, range(1000, 1000 + _CLEANED), version=8)
    assert ids_in(reopened) == expected
    reopened.close()
    return files.seen


def _try(call: Callable[[], object]) -> None:
    try:
        call()
    except StoreError as error:
        _check(error)


def _insist(call: Callable[[], ResultT]) -> ResultT:
    """Until it succeeds: there are two failures, so at the third time."""
    for _ in range(2):
        try:
            return call()
        except StoreError as error:
            _check(error)
    return call()


def _check(error: StoreError) -> None:
    assert error.errno == errno.EIO
    assert error.filename is not None
    assert error.filename in str(error)
