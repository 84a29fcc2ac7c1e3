"""The folder of each rank, and what snapshots are in it.

    <persistent_path>/<rank>-<ranks>/rows/    a dynamicemb.tiers.SsdStore
    .../rows/snapshots/<name>.<stamp>         one for every snapshot of this rank

``stamp`` is one number of 20 digits for all ranks of a snapshot, larger for later ones. A snapshot
counts if every rank of its set has it with the same stamp, so a crash between two ranks leaves the
one before.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamicemb.errors import wrong_value
from dynamicemb.one_embedding import oneflow_layout

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,149}")
_SAVED = re.compile(r"(.+)\.(\d{20})")
_RANK = re.compile(r"(\d+)-(\d+)")

#: ``{name: {stamp, ...}}``
Saved = dict[str, set[int]]


def check_name(name: object) -> str:
    """``name`` if a snapshot can be called so."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong_value(
            "the name of a snapshot", name, "1 to 150 of letters, digits, '_', '.' and '-'"
        )
    return name


def stored_name(name: str, stamp: int) -> str:
    return f"{name}.{stamp:020d}"


def rank_folder(path: str | Sequence[str], rank: int, ranks: int) -> str:
    """The folder of one rank."""
    if isinstance(path, str):
        return os.path.join(path, f"{rank:0{len(str(ranks))}d}-{ranks}")
    if len(path) != ranks:
        raise wrong_value("len(persistent_path)", len(path), f"{ranks}, one folder per rank")
    return path[rank]


def rows_folder(folder: str) -> str:
    """Where the store of a rank's folder is."""
    return os.path.join(folder, "rows")


def saved_in(folder: str) -> Saved:
    """The snapshots in a rank's folder."""
    saved: Saved = defaultdict(set)
    try:
        names = os.listdir(os.path.join(rows_folder(folder), "snapshots"))
    except FileNotFoundError:
        return saved
    for stored in names:
        found = _SAVED.fullmatch(stored)
        if found:
            saved[found[1]].add(int(found[2]))
    return saved


def complete(saved: Sequence[Mapping[str, set[int]]]) -> dict[str, int]:
    """``{name: stamp}`` of the newest snapshot of each name that every rank has."""
    names = set.intersection(*(set(one) for one in saved)) if saved else set()
    newest = {}
    for name in names:
        stamps = set.intersection(*(one[name] for one in saved))
        if stamps:
            newest[name] = max(stamps)
    return newest


@dataclass(frozen=True)
class Source:
    """A snapshot as the folders of the ranks that took it have it; ``stamp`` ``None``: in
    OneFlow's layout."""

    folders: tuple[str, ...]
    name: str
    stamp: int | None


def sets_of_folders(path: str | Sequence[str]) -> list[tuple[str, ...]]:
    """The folders of every number of ranks that ``path`` has complete."""
    if not isinstance(path, str):
        return [tuple(path)]
    counts: dict[int, set[int]] = defaultdict(set)
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    for name in names:
        found = _RANK.fullmatch(name)
        if found and rank_folder(path, int(found[1]), int(found[2])).endswith(os.sep + name):
            counts[int(found[2])].add(int(found[1]))
    return [
        tuple(rank_folder(path, rank, ranks) for rank in range(ranks))
        for ranks, present in sorted(counts.items())
        if present == set(range(ranks))
    ]


def newest_source(path: str | Sequence[str]) -> Source | None:
    """The newest snapshot below ``path``, of any number of ranks; one of ours before one in
    OneFlow's layout."""
    sets = sets_of_folders(path)
    ours = [
        Source(folders, name, stamp)
        for folders in sets
        for name, stamp in complete([saved_in(folder) for folder in folders]).items()
    ]
    if ours:
        return max(ours, key=lambda one: one.stamp or 0)
    for folders in sets:
        for name in reversed(oneflow_layout.snapshots(folders[0])):
            if all(oneflow_layout.has_snapshot(folder, name) for folder in folders):
                return Source(folders, name, None)
    return None


def find_source(
    path: str | Sequence[str], name: str, skip: Sequence[str] | None = None
) -> Source | None:
    """The newest snapshot called ``name`` below ``path``, of any number of ranks; one of ours
    before one in OneFlow's layout. ``skip``: a set of folders in which ours are not looked for."""
    best: Source | None = None
    sets = sets_of_folders(path)
    for folders in sets:
        if folders == skip:
            continue
        stamp = complete([saved_in(folder) for folder in folders]).get(name)
        if stamp is not None and (best is None or best.stamp is None or stamp > best.stamp):
            best = Source(folders, name, stamp)
    if best is not None:
        return best
    for folders in sets:
        if all(oneflow_layout.has_snapshot(folder, name) for folder in folders):
            return Source(folders, name, None)
    return None
