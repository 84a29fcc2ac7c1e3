"""A power cut takes what was not synced: at every moment the old state or the new one is on disk.

A kill leaves what the system was told to write; a power cut does not. Here all system calls are
made, and beside them a model is kept of what must survive: of a file its bytes at its last sync, of
a folder its entries at its last sync.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import CheckpointError, DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint.files import System, replaced_system
from dynamicemb.incremental_dump import apply_delta, dump_delta
from models import make_model

Tree = dict[str, Any]  # name -> bytes, or a folder
IDS = torch.arange(50)


class Disk(System):
    """Makes the calls, and after each of them that may change it notes what a cut would leave."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, os.stat_result]] = {}
        self._root = os.stat(folder).st_ino
        self._take_all(folder)
        self.states: list[Tree] = [self._tree(self._root)]

    def _take_all(self, folder: Path) -> None:
        """What is there at the beginning has been there for long."""
        self._folders[os.stat(folder).st_ino] = {one.name: one.stat() for one in folder.iterdir()}
        for one in folder.iterdir():
            if one.is_dir():
                self._take_all(one)
            else:
                self._files[one.stat().st_ino] = one.read_bytes()

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().run(operation, call, *args, **kwargs)
        if operation == "sync":
            self._take(args[0])
            tree = self._tree(self._root)
            if tree != self.states[-1]:
                self.states.append(tree)
        return result

    def _take(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._folders[status.st_ino] = {
                name: os.stat(name, dir_fd=descriptor) for name in os.listdir(descriptor)
            }
        else:
            self._files[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _tree(self, folder: int) -> Tree:
        """What was never synced is there by name at most: empty."""
        return {
            name: self._tree(one.st_ino)
            if stat.S_ISDIR(one.st_mode)
            else self._files.get(one.st_ino, b"")
            for name, one in self._folders.get(folder, {}).items()
        }


def write(tree: Tree, folder: Path) -> Path:
    folder.mkdir()
    for name, one in tree.items():
        if isinstance(one, dict):
            write(one, folder / name)
        else:
            (folder / name).write_bytes(one)
    return folder


def model_of(value: float) -> Any:
    model = make_model(optimizer="exact_adagrad")
    for table in model.tables:
        rows = torch.full((len(IDS), table.dim), value)
        table.insert(IDS, rows, state=rows.clone(), scores=IDS)
    return model


def value_of(model: Any) -> float:
    """The one number that all rows have."""
    numbers = set()
    for table in model.tables:
        found = table.find(IDS)
        assert bool(found.found.all())
        numbers |= set(found.embeddings.unique().tolist()) | set(found.state.unique().tolist())
    (value,) = numbers
    return float(value)


def dumped(folder: Path, value: float) -> None:
    DynamicEmbDump(folder, model_of(value), optim=True, allow_overwrite=True)


def loaded(folder: Path) -> float:
    model = make_model(optimizer="exact_adagrad")
    DynamicEmbLoad(folder, model, optim=True)
    return value_of(model)


class Chain:
    """A base and deltas, written by one model."""

    def __init__(self) -> None:
        self.model = model_of(0.0)

    def write(self, folder: Path, value: float) -> None:
        for table in self.model.tables:
            rows = torch.full((len(IDS), table.dim), value)
            table.assign(IDS, rows, state=rows.clone())
        dump_delta(folder, self.model, optim=True)

    @staticmethod
    def value(folder: Path) -> float:
        model = make_model(optimizer="exact_adagrad")
        apply_delta(folder, model)
        return value_of(model)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")


@needs_proc
@pytest.mark.parametrize("deltas", [False, True])
def test_the_old_state_or_the_new_one_is_on_disk(memory_path: Path, deltas: bool) -> None:
    chain = Chain()
    put, value = (chain.write, chain.value) if deltas else (dumped, loaded)
    folder = memory_path / "real"
    put(folder, 1.0)
    disk = Disk(folder)
    with replaced_system(disk):
        put(folder, 2.0)
    assert len(disk.states) > 4
    values = []
    for number, tree in enumerate(disk.states):
        copy = write(tree, memory_path / f"cut-{number}")
        values.append(value(copy))
        if not deltas:  # what a cut left is tidied by the next dump
            put(copy, 3.0)
            assert value(copy) == 3.0
            assert len(list(copy.iterdir())) == 2
    assert values == sorted(values)
    assert values[0] == 1.0
    assert values[-1] == 2.0  # what was said to be written survives


@needs_proc
def test_the_first_dump_is_there_or_not(memory_path: Path) -> None:
    folder = memory_path / "real"
    folder.mkdir()
    disk = Disk(folder)
    with replaced_system(disk):
        dumped(folder, 2.0)
    seen = []
    for number, tree in enumerate(disk.states):
        copy = write(tree, memory_path / f"cut-{number}")
        try:
            seen.append(loaded(copy))
        except CheckpointError:
            seen.append(0.0)
    assert seen == sorted(seen)
    assert set(seen) == {0.0, 2.0}
