"""kill -9 at chosen file operations of a process that trains over an SSD store, and open it again.

The last snapshot that was reported is there, bit by bit, and training goes on from it.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import REMOVE, RENAME, SYNC, WRITE

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbTableOptions,
    EmbOptimType,
    _engine,
)
from dynamicemb.tiers import HostStore, SsdStore, Stack
from tables import STRATEGY

TIMEOUT_S = 600
STEPS, EVERY = 40, 4  # a snapshot every four steps
BATCH, IDS = 512, 3000
KILL = -1


def make(path: Path | str | None, *, stack: bool = False, files: Any = None) -> Any:
    options = DynamicEmbTableOptions(
        dim=64, max_capacity=2**14, score_strategy=STRATEGY["STEP"], bucket_capacity=128
    )
    if path is not None:
        store = SsdStore.at(path, segment_mb=1, files=files)
        options.external_storage = Stack.of(HostStore.within(2**19), store) if stack else store
        options.local_hbm_for_values = 1024 * 800
    return BatchedDynamicEmbeddingTables([options], optimizer=EmbOptimType.ADAM, seed=4)


def train(module: Any, first: int, last: int) -> None:
    offsets = torch.arange(0, BATCH + 1, 4)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        out = module(torch.randint(0, IDS, (BATCH,), generator=generator), offsets)
        (out * out).sum().backward()


def content(module: Any) -> dict[str, torch.Tensor]:
    state = module.tables[0].state_dict()
    order = torch.argsort(state["ids"])
    return {name: state[name][order] for name in ("ids", "embeddings", "state", "scores")}


@functools.cache
def expected(step: int) -> dict[str, torch.Tensor]:
    """What a table in memory holds after so many steps."""
    module = make(None)
    train(module, 0, step)
    return content(module)


def assert_equal(module: Any, step: int) -> None:
    for name, tensor in content(module).items():
        assert torch.equal(tensor, expected(step)[name]), (name, step)


def _train_until_killed(path: str, stack: bool, kinds: int, first: int, report: Connection) -> None:
    torch.set_num_threads(1)
    files = _engine.FailingFiles(kinds, first, 1, KILL)
    module = make(path, stack=stack, files=files)
    table = module.tables[0]
    for step in range(0, STEPS, EVERY):
        train(module, step, step + EVERY)
        table.snapshot(f"step-{step + EVERY}")
        for old in table.store.snapshots():
            if int(old.split("-")[1]) < step:  # two stay; segments of the others may be cleaned
                table.store.drop_snapshot(old)
        report.send((step + EVERY, _cleaned(table.store)))
    report.send(("end", files.seen))


def _cleaned(store: Any) -> int:
    details = store.stats().details
    return int(
        details["lower"].details["cleaned_segments"]
        if "lower" in details
        else details["cleaned_segments"]
    )


#: (operations, which of them is the last one, whether segments were cleaned before).
POINTS = [
    (WRITE, 9, False),
    (WRITE, 60, True),
    (SYNC, 11, False),
    (SYNC, 60, True),
    (RENAME, 6, False),
    (REMOVE, 2, True),
    (REMOVE, 14, True),
]


@pytest.mark.parametrize(("kinds", "first", "cleaned"), POINTS)
def test_killed_in_training(tmp_path: Path, kinds: int, first: int, cleaned: bool) -> None:
    assert check(tmp_path, kinds, first, stack=False) == cleaned


def test_killed_in_training_over_a_stack(tmp_path: Path) -> None:
    assert check(tmp_path, WRITE, 60, stack=True)


def check(tmp_path: Path, kinds: int, first: int, *, stack: bool) -> bool:
    """Kill, open again, compare; whether segments were cleaned before."""
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    path = str(tmp_path / "store")
    process = context.Process(target=_train_until_killed, args=(path, stack, kinds, first, sending))
    process.start()
    sending.close()
    done: list[Any] = []
    try:
        while receiving.poll(TIMEOUT_S):
            done.append(receiving.recv())
    except EOFError:
        pass
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL, done
    last = done[-1][0] if done else 0
    module = make(path, stack=stack)
    table = module.tables[0]
    names = table.store.snapshots()
    # What was reported is there; one that was finished and not reported may be.
    assert f"step-{last}" in names or last == 0
    for name in names:
        step = int(name.split("-")[1])
        assert last - 2 * EVERY <= step <= last + EVERY
        table.load_snapshot(name)
        assert_equal(module, step)
    if last:
        table.load_snapshot(f"step-{last}")
        train(module, last, last + 5)
        assert_equal(module, last + 5)
    table.store.close()
    return bool(done and done[-1][1])
