"""What is served: all tables of a checkpoint at one delta, and how the next state is found.

A state is never changed. A new one is opened, checked and counted beside it, and takes its place at
once, so that every answer is consistent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamicemb.checkpoint.chain import BASE, ChainLink, read_sound_chain
from dynamicemb.checkpoint.manifest import MANIFEST_NAME
from dynamicemb.checkpoint.reader import CheckpointReader, NoCheckpointError
from dynamicemb.checkpoint.replaced import tried_again, was_replaced
from dynamicemb.checkpoint.serving import ServingTable, open_tables
from dynamicemb.errors import CheckpointError, DynamicEmbError, ReplacedCheckpointError

#: How deep below the folder that was given checkpoints may lie: RUN/checkpoints/step-N/tables.
DEPTH = 3
#: Ending of a folder that a training run has not finished.
UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class State:
    """All tables of a checkpoint after ``sequence`` deltas.

    tables: by ``COLLECTION.TABLE``. names: those, and the short ones that name one table.
    """

    folder: str
    links: tuple[ChainLink, ...]
    tables: dict[str, ServingTable]
    names: dict[str, str]
    rows: dict[str, int]
    since: float = field(default_factory=time.time)

    @property
    def base(self) -> str:
        """The id of the full checkpoint below."""
        return self.links[0].id

    @property
    def checkpoint(self) -> str:
        """The id of the last delta, or of the checkpoint itself."""
        return self.links[-1].id

    @property
    def sequence(self) -> int:
        return self.links[-1].sequence

    @property
    def created(self) -> str:
        """When the last delta, or the checkpoint, was written."""
        return self.links[-1].manifest.created

    def __str__(self) -> str:
        return f"{self.folder}, checkpoint {self.base}, delta {self.sequence}"


@dataclass(frozen=True)
class Found:
    """A checkpoint (a chain of one) or a chain on the disk, up to its first delta that is not in
    its place, and what is wrong with that one."""

    folder: str
    links: tuple[ChainLink, ...]
    problem: CheckpointError | None

    @classmethod
    def read(cls, folder: Path) -> Found:
        """What is in ``folder``, where a checkpoint or a chain was seen a moment ago."""
        try:
            return cls._read(folder)
        except NoCheckpointError as error:  # a folder may be emptied and filled again
            raise was_replaced(str(folder)) from error

    @classmethod
    def _read(cls, folder: Path) -> Found:
        if (folder / MANIFEST_NAME).exists():
            with CheckpointReader.open(folder) as reader:
                manifest = reader.manifest
            if manifest.extra.get("delta") is not None:
                raise CheckpointError(
                    f"{str(folder)!r} is a delta; allowed: a checkpoint, or the folder of the chain"
                )
            return cls(str(folder), (ChainLink(0, manifest.id, str(folder), manifest),), None)
        links, problem = read_sound_chain(str(folder))
        return cls(str(folder), tuple(links), problem)

    @property
    def newest_first(self) -> tuple[str, int]:
        """Grows with the age of the last link; times in manifests are whole seconds."""
        last = self.links[-1]
        try:
            written = os.stat(os.path.join(last.path, MANIFEST_NAME)).st_mtime_ns
        except OSError:
            written = 0
        return last.manifest.created, written


def fingerprint(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Changes whenever a checkpoint or a delta is committed at ``path``; from names and times."""
    marks = []
    for folder in checkpoint_folders(path):
        manifests = [folder / MANIFEST_NAME]
        if not manifests[0].exists():
            manifests = sorted(folder.glob(f"*/{MANIFEST_NAME}"))
        for one in manifests:
            try:
                about = one.stat()
            except OSError:
                continue
            marks.append((str(one), about.st_ino, about.st_mtime_ns, about.st_size))
    return tuple(marks)


def checkpoint_folders(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """``path`` if it is a checkpoint or a chain, else those in it."""
    if (path / MANIFEST_NAME).exists() or (path / BASE / MANIFEST_NAME).exists():
        yield path
        return
    if depth == 0:
        return
    try:
        inside = sorted(one for one in path.iterdir() if one.is_dir())
    except OSError:
        return
    for one in inside:
        if not one.name.startswith(".") and not one.name.endswith(UNFINISHED):
            yield from checkpoint_folders(one, depth - 1)


def newest_state(
    path: Path, state: State | None, settings: dict[str, Any]
) -> tuple[State, str | None]:
    """The newest state that is intact, and what is wrong with a newer one.

    ``state`` itself is returned if nothing newer is there. Raises ``CheckpointError`` if there is
    nothing at all that could be opened.
    """
    problems: list[str] = []
    found = []
    for folder in checkpoint_folders(path):
        try:
            found.append(tried_again(lambda folder=folder: Found.read(folder)))  # type: ignore[misc]
        except CheckpointError as error:
            if any(checkpoint_folders(folder, 0)):  # else it was removed meanwhile
                problems.append(str(error))
    for newest in sorted(found, key=lambda candidate: candidate.newest_first, reverse=True):
        try:
            fresh, problem = _opened_as_it_is(newest, state, settings)
        except DynamicEmbError as error:
            if any(checkpoint_folders(Path(newest.folder), 0)):
                problems.append(str(error))
            continue
        if problem is not None:
            problems.append(problem)
        return fresh, "; ".join(problems) or None
    if not problems:
        problems.append(
            f"there is no checkpoint in {str(path)!r} (dynamicemb convert makes them of others)"
        )
    if state is None:
        raise CheckpointError("; ".join(problems))
    return state, "; ".join(problems)


def _opened_as_it_is(
    found: Found, state: State | None, settings: dict[str, Any]
) -> tuple[State, str | None]:
    """:func:`_opened` of ``found``, or of what has taken its place meanwhile."""
    at_first = iter([found])
    return tried_again(
        lambda: _opened(next(at_first, None) or Found.read(Path(found.folder)), state, settings)
    )


def _opened(
    found: Found, state: State | None, settings: dict[str, Any]
) -> tuple[State, str | None]:
    """The state at the last intact delta of ``found``, and what is wrong with the next."""
    problem = None if found.problem is None else str(found.problem)
    if state is not None and found.links[0].id == state.base:
        common = min(len(found.links), len(state.links))
        same = [one.id for one in found.links[:common]] == [o.id for o in state.links[:common]]
        if same and len(found.links) < len(state.links):
            return state, problem or f"{found.folder} has lost delta {common}, which is served"
        if not same:
            state = None
    else:
        state = None
    if state is None:
        state = _at_base(found, settings)
    while len(state.links) < len(found.links):
        links = found.links[: len(state.links) + 1]
        try:
            tables = {name: table.advanced(links) for name, table in state.tables.items()}
        except ReplacedCheckpointError:
            raise
        except CheckpointError as error:
            return state, str(error)
        state = _made(found.folder, links, tables)
    return state, problem


def _at_base(found: Found, settings: dict[str, Any]) -> State:
    base = found.links[0]
    tables = open_tables(base.path, base.id, settings)
    return _made(found.folder, found.links[:1], tables)


def _made(folder: str, links: Sequence[ChainLink], tables: dict[str, ServingTable]) -> State:
    short: dict[str, list[str]] = {}
    for name, table in tables.items():
        short.setdefault(table.name, []).append(name)
    names = {name: full[0] for name, full in short.items() if len(full) == 1}
    names |= {name: name for name in tables}
    rows = {name: len(table) for name, table in tables.items()}
    return State(folder, tuple(links), tables, names, rows)
