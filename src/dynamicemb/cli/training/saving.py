"""Checkpoints of a run: complete or not there, and the last good one is found again.

A checkpoint is a folder ``step-<N>``: ``tables/`` (dynamic tables, a checkpoint of
``DynamicEmbDump``), ``rank-<R>.pt`` (what only that rank has of other tables), ``run.pt`` (dense
layers, optimizers, metrics, the place in the stream, and checksums of the others) and
``run.sha256``. It is written under another name and renamed when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynamicemb.checkpoint import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint.files import Directory
from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.errors import CheckpointError, CorruptCheckpointError, UsageError

logger = logging.getLogger(__name__)

VERSION = 2
#: Ending of a folder that is not there yet, or not any more.
UNFINISHED = ".unfinished"
_NAME = re.compile(r"step-\d+")


@contextmanager
def run_folder(path: Path) -> Iterator[None]:
    """Make the folder of a run if it is not there, and keep other runs out of it."""
    try:
        folder = Directory.open(path, create=True)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be used: {error.strerror}") from error
    with folder:
        if not os.access(path, os.W_OK):
            raise UsageError(f"--out {path} cannot be used: it may not be written to")
        if not folder.lock():
            raise UsageError(f"another dynamicemb train is running in --out {path}")
        yield


def remove_folder(path: Path) -> None:
    """Remove a folder of checkpoints. It first gets another name, so that nobody finds a part of
    it, and whoever reads it sees that it is gone; what a kill leaves is removed by the next one."""
    hidden = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    path.rename(hidden)
    shutil.rmtree(hidden)


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self._keep, self._ranks = folder, keep, ranks

    def found(self) -> list[Path]:
        """All that were completed, the newest first."""
        whole = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted(whole, reverse=True)  # names have leading zeros

    def write(
        self,
        step: int,
        model: nn.Module | None,
        state: dict[str, Any],
        own: dict[str, Any],
        *,
        counter: bool,
    ) -> Path:
        """Write a checkpoint and remove those that are too many.

        ``model``: with dynamic tables, if there are any; ``state``: of the run, written by the
        first rank; ``own``: of this rank. What cannot be written is a ``CheckpointError``.
        """
        target = self.folder / f"step-{step:010d}"
        draft = self.folder / (target.name + UNFINISHED)
        try:
            if self._ranks.first:
                self.folder.mkdir(parents=True, exist_ok=True)
                for old in self.folder.glob(f"*{UNFINISHED}"):
                    shutil.rmtree(old)
                draft.mkdir()
            self._ranks.wait()
            if model is not None:
                DynamicEmbDump(draft / "tables", model, optim=True, counter=counter, progress=False)
            file = self._own_file(draft)
            _save(own, file)
            digests = self._ranks.gather(_digest(file))
            if self._ranks.first:
                self._commit(draft, target, {**state, "ranks": digests})
            self._ranks.wait()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {target.name} could not be written: {error.filename or draft}: "
                f"{error.strerror}; those before it are as they were"
            ) from error
        return target

    def _commit(self, draft: Path, target: Path, state: dict[str, Any]) -> None:
        _save({"version": VERSION, **state}, draft / "run.pt")
        (draft / "run.sha256").write_text(_digest(draft / "run.pt"))
        for file in (draft / "run.sha256", draft):
            _sync(file)
        if target.exists():
            remove_folder(target)
        draft.rename(target)
        _sync(self.folder)
        for old in self.found()[self._keep :]:
            remove_folder(old)

    def _own_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"rank-{self._ranks.rank}.pt"

    def own_state(self, checkpoint: Path, state: dict[str, Any]) -> dict[str, Any]:
        """What this rank wrote of its own into the checkpoint with that ``state``. If a rank cannot
        read it, all of them raise ``CheckpointError``."""
        own: dict[str, Any] = {}
        failure = ""
        try:
            own = _read(self._own_file(checkpoint), state["ranks"][self._ranks.rank])
        except CheckpointError as error:
            failure = str(error)
        failures = [one for one in self._ranks.share(failure) if one]
        if failures:
            raise CheckpointError(failures[0])
        return own

    def states(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Those whose state is whole, the newest first, without their tables."""
        for path in self.found():
            try:
                yield path, read_state(path)
            except CheckpointError as error:
                logger.warning("%s is left out: %s", path, error)

    def clear(self) -> None:
        """Remove all checkpoints of this folder."""
        self._ranks.wait()  # nobody looks for them any more
        if self._ranks.first:
            for path in [*self.found(), *self.folder.glob(f"*{UNFINISHED}")]:
                remove_folder(path)
        self._ranks.wait()


def load_tables(path: Path, model: nn.Module, *, counter: bool) -> None:
    """Give the tables of a model the rows of the checkpoint at ``path``, and no others: a store may
    have rows that came after it."""
    DynamicEmbLoad(path / "tables", model, optim=True, counter=counter, clear=True, progress=False)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint keeps beside its tables, if it is what was written."""
    file = path / "run.pt"
    try:
        expected = (path / "run.sha256").read_text()
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    state = _read(file, expected)
    if state.get("version") != VERSION:
        raise CheckpointError(f"{file} has version {state.get('version')}; allowed: {VERSION}")
    return state


def check_files(path: Path) -> None:
    """Raise ``CheckpointError`` unless all that a checkpoint keeps beside its tables is what was
    written."""
    for rank, digest in enumerate(read_state(path)["ranks"]):
        _read(path / f"rank-{rank}.pt", digest)


def _read(file: Path, digest: str) -> dict[str, Any]:
    try:
        if _digest(file) != digest:
            raise CorruptCheckpointError(f"{file} is not what was written")
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        raise CorruptCheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{file} holds {type(state).__name__}; allowed: a dictionary")
    return state


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _save(state: dict[str, Any], file: Path) -> None:
    """``torch.save``, durable, whose failures are those of the operating system."""
    try:
        with file.open("wb") as stream:
            torch.save(state, stream)
    except (OSError, RuntimeError) as error:
        # After a write that failed, torch goes on to end its archive, and that fails otherwise.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(file)) from None
    _sync(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
