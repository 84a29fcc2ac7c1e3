"""The files of a checkpoint's table in memory, and their index."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from dynamicemb import _engine
from dynamicemb.checkpoint.files import ReadFile
from dynamicemb.checkpoint.index import (
    BUCKETS,
    HEADER_BYTES,
    INDEX,
    REMOVED,
    IndexHeader,
    build_index,
    decode_header,
)
from dynamicemb.checkpoint.manifest import Shard, TableEntry
from dynamicemb.checkpoint.reader import OPT_ARGS, CheckpointReader
from dynamicemb.checkpoint.target import naming
from dynamicemb.errors import CorruptCheckpointError, wrong_value
from dynamicemb.options import SUPPORTED_DIST_TYPES

logger = logging.getLogger(__name__)

_NOT_MAPPED = ("scores", "opt_values", "counter_keys", "counter_frequencies", OPT_ARGS)
#: In the engine's order.
_DISTRIBUTIONS = {"roundrobin": 0, "hash_roundrobin": 1, "continuous": 2}
assert set(_DISTRIBUTIONS) == set(SUPPORTED_DIST_TYPES)


def write_index(reader: CheckpointReader, collection: str, table: TableEntry, shard: Shard) -> None:
    """Add an index beside the files of a shard."""
    ids, removed = _ids(reader, collection, table, shard)
    words = build_index(ids, removed, table.file(shard, "keys"))
    header = IndexHeader(INDEX, len(ids), len(removed), len(words), reader.manifest.id)
    name = table.file(shard, INDEX)
    with reader.folder_of(collection, create=True) as inside:
        temporary = f"{name}.{os.getpid()}.tmp"
        try:
            with inside.create(temporary) as file:
                file.write(memoryview(header.encode().numpy()))  # type: ignore[arg-type]
                file.write(memoryview(words.numpy()))  # type: ignore[arg-type]
                file.sync()
            with reader.locked():  # a dump may have put an index of the same name in its place
                inside.rename(temporary, inside, name)
        except BaseException:
            inside.remove(temporary, missing_ok=True)
            raise
        inside.sync()


def _ids(
    reader: CheckpointReader, collection: str, table: TableEntry, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for rows in reader.rows(collection, table, shard, values=False, scores=False):
        parts.append(rows.ids)
    removed = torch.empty(0, dtype=torch.int64, device="cpu")
    if REMOVED in shard.files:
        with reader.open_file(collection, table, shard, REMOVED) as file:
            removed = torch.empty(file.size // 8, dtype=torch.int64, device="cpu")
            if len(removed):
                file.read_at(0, memoryview(removed.numpy()))  # type: ignore[arg-type]
    return torch.cat(parts), removed


def find_index(
    reader: CheckpointReader, collection: str, table: TableEntry, shard: Shard
) -> ReadFile | None:
    """The index of a shard, one that the manifest lists or one that was added; ``None`` if there is
    none for this checkpoint."""
    if INDEX in shard.files:
        return _listed_index(reader, reader.open_file(collection, table, shard, INDEX))
    try:
        with reader.folder_of(collection) as inside:
            file = inside.read(table.file(shard, INDEX))
    except OSError:
        return None
    try:
        if _header(file, INDEX).checkpoint == reader.manifest.id:
            return file
    except CorruptCheckpointError:
        logger.warning("%s is corrupt and not used", file.name)
    file.close()
    return None


def _listed_index(reader: CheckpointReader, file: ReadFile) -> ReadFile:
    """``file``, an index that the manifest lists; one of another checkpoint is corrupt."""
    try:
        with reader.sound():
            written_for = _header(file, INDEX).checkpoint
            if written_for not in ("", reader.manifest.id):
                raise CorruptCheckpointError(
                    f"{file.name} is an index of checkpoint {written_for!r}; allowed: "
                    f"{reader.manifest.id!r}"
                )
    except BaseException:
        file.close()
        raise
    return file


def _header(file: ReadFile, role: str) -> IndexHeader:
    data = bytearray(min(file.size, HEADER_BYTES))
    file.read_at(0, data)
    header = decode_header(bytes(data), role, file.name)
    if header.bytes != file.size:
        raise CorruptCheckpointError(
            f"{file.name} has {file.size} bytes; allowed: {header.bytes} for its {header.slots} "
            "words"
        )
    return header


class _Mapped:
    """A file in memory; its address stays as long as this object."""

    def __init__(self, file: ReadFile, *, preload: bool) -> None:
        self.size = file.size
        self.address = 0
        if file.size == 0:
            return
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_WILLNEED if preload else mmap.MADV_RANDOM)
        self.address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data


def not_read(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The roles of files that a table with these settings has no use for."""
    return () if settings["verify"] else _NOT_MAPPED


class Layer:
    """One checkpoint or delta of a table, mapped."""

    def __init__(
        self, reader: CheckpointReader, collection: str, name: str, settings: dict[str, Any]
    ) -> None:
        self.checkpoint = reader.manifest.id
        self.entry = reader.table(collection, name)
        reader.hold([(collection, name)], skip=not_read(settings))
        if settings["verify"]:
            reader.verify([(collection, name)])
        self._kept: list[Any] = []  # what must live as long as the addresses
        #: Address and number of the ids that have rows, and of those that were removed, by shard.
        self.ids: list[tuple[int, int]] = []
        self.removed: list[tuple[int, int]] = []
        self._preload = settings["preload"]
        routing = self.entry.routing
        with naming("opening", reader.path):
            shards = [
                self._shard(reader, collection, shard)
                for shard in _shards(self.entry, settings["rank"])
            ]
        self.mapped = (
            0 if routing is None else _DISTRIBUTIONS[routing.dist_type],
            0 if routing is None else routing.block or 0,
            shards,
        )

    def _shard(self, reader: CheckpointReader, collection: str, shard: Shard) -> Any:
        entry = self.entry
        roles = {}
        for role in ("keys", "values", REMOVED):
            if role in shard.files:
                with reader.open_file(collection, entry, shard, role) as file:
                    roles[role] = _Mapped(file, preload=self._preload)
        removed = roles[REMOVED].size // 8 if REMOVED in roles else 0
        self._kept.extend(roles.values())
        self.ids.append((roles["keys"].address, shard.rows))
        if removed:
            self.removed.append((roles[REMOVED].address, removed))
        return _engine.MappedShard(
            ids=roles["keys"].address,
            rows=shard.rows,
            removed_ids=roles[REMOVED].address if removed else 0,
            removed=removed,
            values=roles["values"].address,
            **self._where(reader, collection, shard, removed),
        )

    def _where(
        self, reader: CheckpointReader, collection: str, shard: Shard, removed: int
    ) -> dict[str, int]:
        """The part of a ``MappedShard`` that says where the row of an id is."""
        with ExitStack() as stack:
            file = find_index(reader, collection, self.entry, shard)
            if file is not None:
                stack.enter_context(file)
                address, words = self._words(file, INDEX, shard.rows, removed)
                return {"index": address, "slots": words}
            if BUCKETS in shard.files and not removed:
                file = reader.open_file(collection, self.entry, shard, BUCKETS)
                stack.enter_context(file)
                address, words = self._words(file, BUCKETS, shard.rows, 0)
                return {"first_rows": address, "buckets": words - 1}
        logger.warning(
            "%s has no index: one is made in memory. DynamicEmbDump(serving_index=True) or "
            "build_serving_index write one",
            reader.path,
        )
        words_in_memory = build_index(
            *_ids(reader, collection, self.entry, shard), self.entry.file(shard, "keys")
        )
        self._kept.append(words_in_memory)
        return {"index": words_in_memory.data_ptr(), "slots": len(words_in_memory)}

    def _words(self, file: ReadFile, role: str, rows: int, removed: int) -> tuple[int, int]:
        """Address and number of the words of a mapped file, which is to cover so many ids."""
        header = _header(file, role)
        if (header.rows, header.removed) != (rows, removed) or (
            role == BUCKETS and not header.slots
        ):
            raise CorruptCheckpointError(
                f"{file.name} is an index of {header.rows} rows and {header.removed} removed ids; "
                f"allowed: {rows} and {removed}, as its shard has"
            )
        mapped = _Mapped(file, preload=self._preload)
        self._kept.append(mapped)
        return mapped.address + HEADER_BYTES, header.slots


def _shards(entry: TableEntry, rank: int | None) -> list[Shard]:
    """One shard for every rank of the routing, in its order."""
    if entry.routing is None:
        if len(entry.shards) > 1 and rank is None:
            raise wrong_value(
                "rank",
                None,
                f"0 to {len(entry.shards) - 1}, since every rank had a table {entry.name!r} of its "
                "own",
            )
        at = rank or 0
        if not 0 <= at < len(entry.shards):
            raise wrong_value("rank", rank, f"0 to {len(entry.shards) - 1}")
        return [entry.shards[at]]
    by_owner = {shard.owner: shard for shard in entry.shards}
    ranks = range(entry.routing.world_size)
    missing = [owner for owner in ranks if owner not in by_owner]
    if missing:
        raise CorruptCheckpointError(
            f"table {entry.name!r} has no shard of the ranks {missing[:10]} of its routing"
        )
    return [by_owner[owner] for owner in ranks]
