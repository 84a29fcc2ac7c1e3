"""A chain of deltas: one folder with a base checkpoint and what changed since, in order.

``base`` is a checkpoint like any other. ``delta_00000001``, ... are checkpoints of the rows that
changed and the ids that were removed. Each delta says which base it belongs to, its number, and the
id of the one before, so that a missing, doubled or moved one is seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamicemb.checkpoint.files import Directory
from dynamicemb.checkpoint.manifest import Manifest
from dynamicemb.checkpoint.target import naming, read_manifest
from dynamicemb.errors import CheckpointError, CorruptCheckpointError

BASE = "base"
_DELTA = re.compile(r"delta_(\d{8})")
#: Deltas of a chain; a chain this long wants a new base long before.
MAX_DELTAS = 10**8 - 1


@dataclass(frozen=True)
class ChainLink:
    """One checkpoint of a chain; number 0 is the base."""

    sequence: int
    id: str
    path: str
    manifest: Manifest


def delta_name(sequence: int) -> str:
    """The folder of a delta."""
    return f"delta_{sequence:08d}"


def delta_extra(base: str, sequence: int, previous: str) -> dict[str, Any]:
    """What a delta's manifest says about its place."""
    return {"delta": {"base": base, "sequence": sequence, "previous": previous}}


def is_chain(path: str) -> bool:
    """Whether ``path`` is the folder of a chain."""
    try:
        with Directory.open(path) as folder:
            return read_manifest(folder) is None and folder.is_directory(BASE)
    except OSError:
        return False


def read_chain(path: str) -> list[ChainLink]:
    """The base and its deltas in order, from their manifests alone.

    Raises ``CheckpointError`` if there is no base, and ``CorruptCheckpointError`` if a delta is
    missing, doubled, moved or of another chain. A delta that was never committed, at the end of the
    chain, does not count.
    """
    links, problem = read_sound_chain(path)
    if problem is not None:
        raise problem
    return links


def read_sound_chain(path: str) -> tuple[list[ChainLink], CorruptCheckpointError | None]:
    """The base and the deltas up to the first that does not belong there, and what is wrong with
    that one. Raises ``CheckpointError`` if there is no base."""
    with naming("reading the chain in", path), Directory.open(path) as folder:
        base = _manifest(folder, BASE)
        if base is None:
            raise CheckpointError(f"{path!r} has no base; allowed: a folder that dump_delta wrote")
        links = [ChainLink(0, base.id, os.path.join(path, BASE), base)]
        if "delta" in base.extra:
            raise CorruptCheckpointError(f"{links[0].path} is a delta; allowed: a checkpoint")
        for name in folder.list():
            try:
                link = _next_link(folder, name, links)
            except CorruptCheckpointError as problem:
                return links, problem
            if link is not None:
                links.append(link)
    return links, None


def _next_link(folder: Directory, name: str, links: Sequence[ChainLink]) -> ChainLink | None:
    """The entry ``name`` of a chain's folder as the next of ``links``; ``None`` if it is no delta,
    or one that is being written or was given up."""
    matched = _DELTA.fullmatch(name)
    manifest = None if matched is None else _manifest(folder, name)
    if matched is None or manifest is None:
        return None
    expected = links[-1].sequence + 1
    if int(matched[1]) != expected:
        raise CorruptCheckpointError(
            f"{folder.name!r} has {name} and no {delta_name(expected)} before it"
        )
    where = os.path.join(folder.name, name)
    _check_place(where, manifest, links[0].id, links[-1])
    return ChainLink(expected, manifest.id, where, manifest)


def _manifest(folder: Directory, name: str) -> Manifest | None:
    """The manifest of one checkpoint of the chain; ``None`` if there is none in force."""
    if not folder.exists(name):
        return None
    if not folder.is_directory(name):
        raise CorruptCheckpointError(
            f"{os.path.join(folder.name, name)} is no folder (a link is not followed)"
        )
    with folder.directory(name) as inside:
        return read_manifest(inside)


def _check_place(where: str, manifest: Manifest, base: str, before: ChainLink) -> None:
    place = manifest.extra.get("delta")
    expected = delta_extra(base, before.sequence + 1, before.id)["delta"]
    if not isinstance(place, Mapping) or dict(place) != expected:
        raise CorruptCheckpointError(
            f"{where} is not the delta that belongs there: it says {str(place)[:200]}; allowed: "
            f"{expected}"
        )
