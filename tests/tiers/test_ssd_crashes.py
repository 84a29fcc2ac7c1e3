"""kill -9 while rows are written and while segments are cleaned; the folder is opened again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from stores import assert_holds, ids_in, make_rows, make_ssd

from dynamicemb.tiers import Store

TIMEOUT_S = 600
_IDS = 6000


def _write_for_ever(path: str, progress: Connection) -> None:
    store = make_ssd(path)
    for version in range(1_000_000):
        store.insert(make_rows(range(_IDS), version=version))
        if version % 3 == 0:
            store.snapshot("last")
            progress.send((version, store.stats().details["cleaned_segments"]))  # type: ignore[index]


@pytest.mark.parametrize("snapshots", [1, 2, 5, 9, 14])
def test_killed_while_writing(tmp_path: Path, snapshots: int) -> None:
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    path = str(tmp_path / "store")
    process = context.Process(target=_write_for_ever, args=(path, sending))
    process.start()
    cleaned = 0
    for _ in range(snapshots):
        assert receiving.poll(TIMEOUT_S)
        version, cleaned = receiving.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT_S)
    while receiving.poll():  # what it still said before it died
        version, cleaned = receiving.recv()
    assert cleaned > 0 or snapshots < 9  # the later kills come while segments are cleaned
    store = make_ssd(path)
    assert ids_in(store) == list(range(_IDS))
    # Every row is whole, and at least as new as the last flush that was reported.
    later = range(version, version + 20)
    assert bool(torch.stack([_equal(store, v) for v in later]).any(0).all())
    store.load_snapshot("last")
    assert any(bool(_equal(store, v).all()) for v in (version, version + 3))
    store.insert(make_rows(range(_IDS), version=7))
    assert_holds(store, range(_IDS), version=7)
    store.close()


def _equal(store: Store, version: int) -> torch.Tensor:
    """bool [ids]: which rows are those of ``version``."""
    expected = make_rows(range(_IDS), version)
    found = store.find(expected.ids)
    same = (found.embeddings == expected.embeddings).all(1) & (found.state == expected.state).all(1)
    return found.found & same & (found.scores == expected.scores)
