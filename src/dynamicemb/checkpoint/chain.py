"""A chain of deltas: one folder with a base checkpoint and what changed since, in order.

``base`` is a checkpoint like any other. ``delta_00000001``, ... are checkpoints of the rows that
changed and the ids that were removed. Each delta says which base it belongs to, its number, and the
id of the one before, so that a missing, doubled or moved one is seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dynamicemb.checkpoint.files import Directory, ReadFile
from dynamicemb.checkpoint.manifest import MANIFEST_NAME, Manifest
from dynamicemb.checkpoint.reader import NoCheckpointError
from dynamicemb.checkpoint.replaced import MissingFileError, pauses, was_replaced
from dynamicemb.checkpoint.target import (
    decode_manifest,
    naming,
    open_folder,
    open_manifest,
    read_manifest,
)
from dynamicemb.errors import CheckpointError, CorruptCheckpointError

BASE = "base"
#: Kinds of folders.
CHECKPOINT, CHAIN = "checkpoint", "chain"
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
    """Whether ``path`` is the folder of a chain, whose base may not be committed yet."""
    try:
        with Directory.open(path) as folder:
            return not folder.exists(MANIFEST_NAME) and folder.is_directory(BASE)
    except OSError:
        return False


def kind_of(path: str) -> str:
    """:data:`CHECKPOINT` or :data:`CHAIN` if one is committed in ``path``, else ""."""
    try:
        with Directory.open(path) as folder:
            if folder.exists(MANIFEST_NAME):
                return CHECKPOINT
            with folder.directory(BASE) as base:
                return CHAIN if base.exists(MANIFEST_NAME) else ""
    except OSError:
        return ""


def read_chain(path: str) -> list[ChainLink]:
    """The base and its deltas in order, from their manifests alone.

    Raises ``NoCheckpointError`` if there is no base, and ``CorruptCheckpointError`` if a delta is
    missing, doubled, moved or of another chain. A delta that was never committed, at the end of the
    chain, does not count.
    """
    links, problem = read_sound_chain(path, patient=True)
    if problem is not None:
        raise CorruptCheckpointError(str(problem)) from problem
    return links


def read_sound_chain(
    path: str, *, patient: bool = False
) -> tuple[list[ChainLink], CorruptCheckpointError | None]:
    """The base and the deltas up to the first that does not belong there, and what is wrong with
    that one. Raises ``NoCheckpointError`` if there is no base. ``patient``: wait before reporting a
    missing delta, since a chain that is being removed looks the same."""
    with naming("reading the chain in", path), open_folder(path) as folder, ExitStack() as stack:
        marker = None
        try:
            inside, marker = _open_base(folder, stack)
            base = decode_manifest(inside, marker)
            links, problem = _links(folder, base)
            if patient and isinstance(problem, MissingFileError):
                for _ in pauses():
                    if not _is_there(folder, marker):
                        break
                links, problem = _links(folder, base)
            if problem is None or _is_there(folder, marker):
                return links, problem
            raise problem
        except (CheckpointError, OSError) as error:
            if _is_there(folder, marker) and folder.is_at(path):
                raise
            raise was_replaced(path) from error


def _open_base(folder: Directory, stack: ExitStack) -> tuple[Directory, ReadFile]:
    """The base's folder and the file of its manifest; ``stack`` closes them."""
    try:
        inside = stack.enter_context(_folder_of(folder, BASE))
        marker = open_manifest(inside)
    except FileNotFoundError:
        marker = None
    if marker is None:
        raise NoCheckpointError(
            f"{folder.name!r} has no base; allowed: a folder that dump_delta wrote"
        )
    return inside, stack.enter_context(marker)


def _is_there(folder: Directory, marker: ReadFile | None) -> bool:
    """Whether the chain in ``folder`` still has the base of ``marker``; ``None``: still none."""
    try:
        with folder.directory(BASE) as inside:
            if marker is not None:
                return inside.holds(MANIFEST_NAME, marker)
            return read_manifest(inside) is None
    except (FileNotFoundError, NotADirectoryError):
        return marker is None


def _links(
    folder: Directory, base: Manifest
) -> tuple[list[ChainLink], CorruptCheckpointError | None]:
    links = [ChainLink(0, base.id, os.path.join(folder.name, BASE), base)]
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
        raise MissingFileError(
            f"{folder.name!r} has {name} and no {delta_name(expected)} before it"
        )
    where = os.path.join(folder.name, name)
    _check_place(where, manifest, links[0].id, links[-1])
    return ChainLink(expected, manifest.id, where, manifest)


def _manifest(folder: Directory, name: str) -> Manifest | None:
    """The manifest of one checkpoint of the chain; ``None`` if there is none in force."""
    try:
        with _folder_of(folder, name) as inside:
            return read_manifest(inside)
    except FileNotFoundError:
        return None


def _folder_of(folder: Directory, name: str) -> Directory:
    """The folder of one checkpoint of the chain; a link is a ``CorruptCheckpointError``."""
    try:
        return folder.directory(name)
    except NotADirectoryError as error:
        raise CorruptCheckpointError(
            f"{os.path.join(folder.name, name)} is no folder (a link is not followed)"
        ) from error


def _check_place(where: str, manifest: Manifest, base: str, before: ChainLink) -> None:
    place = manifest.extra.get("delta")
    expected = delta_extra(base, before.sequence + 1, before.id)["delta"]
    if not isinstance(place, Mapping) or dict(place) != expected:
        raise CorruptCheckpointError(
            f"{where} is not the delta that belongs there: it says {str(place)[:200]}; allowed: "
            f"{expected}"
        )
