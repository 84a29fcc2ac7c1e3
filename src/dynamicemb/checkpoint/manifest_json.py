"""The bytes of a manifest: JSON that carries its own checksum, read with every member checked."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from dynamicemb import _engine
from dynamicemb.checkpoint.json_object import JsonObject, parsed, shortened
from dynamicemb.checkpoint.manifest import (
    BYTES_PER_VALUE,
    DTYPE_NAMES,
    DTYPES,
    FORMAT,
    FREE_BYTES,
    MAX_BLOCK_BYTES,
    MAX_RANKS,
    MAX_ROWS,
    VERSION,
    CollectionEntry,
    FileEntry,
    Manifest,
    Shard,
    TableEntry,
)
from dynamicemb.checkpoint.names import ROLES
from dynamicemb.checkpoint.scores import stored_as, strategy_names
from dynamicemb.errors import CorruptCheckpointError, DynamicEmbError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import (
    DynamicEmbScoreStrategy,
    ScoreStrategy,
    normalize_score_strategy,
)
from dynamicemb.routing import Routing
from dynamicemb.table.base import MAX_DIM
from dynamicemb.table.rows import Progress

_HEAD = b'{"checksum": "%016x",\n"manifest": '
_TAIL = b"}\n"
#: A name inside one folder: what ``names.escape`` gives.
_STEM = r"[A-Za-z0-9_%~-][A-Za-z0-9_%~.-]{0,199}"


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH64 of ``data``."""
    view = np.frombuffer(data, dtype=np.uint8)
    return _engine.xxh64(view.ctypes.data, len(view))


# ---- to bytes ----


def encode(manifest: Manifest) -> bytes:
    """The manifest's file: JSON whose first member is the checksum of the second."""
    body = json.dumps(_manifest_json(manifest), indent=1, ensure_ascii=True).encode("ascii")
    return _HEAD % checksum(body) + body + _TAIL


def _manifest_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": manifest.id,
        "created": manifest.created,
        "library": manifest.library,
        "world_size": manifest.world_size,
        "block_bytes": manifest.block_bytes,
        "extra": dict(manifest.extra),
        "collections": [
            {
                "path": collection.path,
                "folder": collection.folder,
                "tables": [_table_json(table) for table in collection.tables.values()],
            }
            for collection in manifest.collections.values()
        ],
    }


def _table_json(table: TableEntry) -> dict[str, Any]:
    routing = table.routing
    return {
        "name": table.name,
        "stem": table.stem,
        "dim": table.dim,
        "rows": table.rows,
        "dtype": DTYPE_NAMES[table.dtype],
        "value_dtype": DTYPE_NAMES[table.value_dtype],
        "score_strategy": strategy_names(table.strategy),
        "scores": stored_as(table.strategy) if table.scores else None,
        "state_dim": table.optimizer.state_dim(table.dim) if table.state else None,
        "routing": None
        if routing is None
        else {
            "dist_type": routing.dist_type,
            "world_size": routing.world_size,
            "block": routing.block,
        },
        "optimizer": {"kind": table.optimizer.kind.name, "args": asdict(table.optimizer.args)},
        "options": dict(table.options),
        "opt_args": None if table.opt_args is None else _file_json(table.opt_args),
        "shards": [_shard_json(table, shard) for shard in table.shards],
    }


def _shard_json(table: TableEntry, shard: Shard) -> dict[str, Any]:
    return {
        "checkpoint": shard.checkpoint,
        "rank": shard.rank,
        "owner": shard.owner,
        "rows": shard.rows,
        "counter_rows": shard.counter_rows,
        "clock": shard.clock,
        "progress": asdict(shard.progress),
        "files": {role: _file_json(entry) for role, entry in shard.files.items()},
    }


def _file_json(entry: FileEntry) -> dict[str, Any]:
    assert entry.checksums is not None
    return {"bytes": entry.bytes, "xxh64": "".join(f"{one:016x}" for one in entry.checksums)}


# ---- from bytes ----


def decode(data: bytes | bytearray, name: str) -> Manifest:
    """The manifest in ``data``, the content of the file ``name``. Anything that a dump would not
    have written is a ``CorruptCheckpointError``."""
    view, head = memoryview(data), len(_HEAD % 0)  # a long manifest is not copied
    body = view[head : len(data) - len(_TAIL)]
    has_ends = len(data) >= head + len(_TAIL) and view[len(data) - len(_TAIL) :] == _TAIL
    if not has_ends or view[:head] != _HEAD % checksum(body):
        raise CorruptCheckpointError(f"{name} is corrupt: its checksum is not that of its content")
    check_density(data, name)
    text = str(body, "ascii", "replace")
    del data, view, body  # a long manifest is not in memory twice while it is parsed
    try:
        content = parsed(text, len(text))
    except ValueError as error:
        raise CorruptCheckpointError(f"{name} is no JSON: {error}") from error
    try:
        return _read_manifest(JsonObject(content, "manifest"))
    except DynamicEmbError as error:  # of this module, or a value that our own classes refuse
        raise CorruptCheckpointError(f"{name}: {error}") from error


def check_density(data: bytes | bytearray, name: str) -> None:
    """Refuse a long manifest that has more values for its length than a dump writes: each of them
    takes up to a hundred bytes of memory."""
    if len(data) <= FREE_BYTES:
        return
    values = sum(data.count(sign) for sign in (b",", b"[", b"{"))
    if values > len(data) // BYTES_PER_VALUE:
        raise CorruptCheckpointError(
            f"{name} has {values} values in {len(data)} bytes; allowed: one for each "
            f"{BYTES_PER_VALUE} bytes"
        )


def _read_manifest(top: JsonObject) -> Manifest:
    top.choice("format", [FORMAT])
    version = top.integer("version", 1, 2**31)
    if version > VERSION:
        raise CorruptCheckpointError(
            f"the manifest has version {version}; this library reads up to {VERSION}"
        )
    identity = top.text("id", "[0-9a-f]{32}")
    world_size = top.integer("world_size", 1, MAX_RANKS)
    block_bytes = top.integer("block_bytes", 4096, MAX_BLOCK_BYTES)
    collections: dict[str, CollectionEntry] = {}
    folders: set[str] = set()
    for one in top.objects("collections"):
        path, folder = one.text("path"), one.text("folder", _STEM)
        if path in collections or folder in folders:
            raise CorruptCheckpointError(f"two collections have the path or folder of {path!r}")
        folders.add(folder)
        tables: dict[str, TableEntry] = {}
        stems: set[str] = set()
        for member in one.objects("tables"):
            table = _read_table(member, identity, world_size, block_bytes)
            if table.name in tables or table.stem in stems:
                raise CorruptCheckpointError(f"two tables have the name or stem of {table.name!r}")
            tables[table.name] = table
            stems.add(table.stem)
        collections[path] = CollectionEntry(path, folder, tables)
    return Manifest(
        id=identity,
        created=top.text("created"),
        library=top.text("library"),
        world_size=world_size,
        block_bytes=block_bytes,
        collections=collections,
        extra=top.member("extra").plain(),
    )


def _read_table(one: JsonObject, identity: str, world_size: int, block_bytes: int) -> TableEntry:
    strategy = _read_strategy(one)
    if one.optional("scores") and one.items("scores") != stored_as(strategy):
        raise CorruptCheckpointError(
            f"scores of {strategy!r} are stored as {shortened(one.value('scores'))}; allowed: "
            f"{stored_as(strategy)}"
        )
    dim = one.integer("dim", 1, MAX_DIM)
    optimizer = _read_optimizer(one.member("optimizer"))
    if one.optional("state_dim"):
        width = optimizer.state_dim(dim)
        one.integer("state_dim", width, width)
    table = TableEntry(
        name=one.text("name"),
        stem=one.text("stem", _STEM),
        dim=dim,
        dtype=DTYPES[one.choice("dtype", list(DTYPES))],
        value_dtype=DTYPES[one.choice("value_dtype", list(DTYPES))],
        strategy=strategy,
        scores=one.optional("scores"),
        state=one.optional("state_dim"),
        routing=_read_routing(one.member("routing")) if one.optional("routing") else None,
        optimizer=optimizer,
        options=one.member("options").plain(),
        opt_args=_read_file(one.member("opt_args"), block_bytes),
        shards=tuple(_read_shard(part, identity, block_bytes) for part in one.objects("shards")),
    )
    if [shard.rank for shard in table.shards] != list(range(world_size)):
        raise CorruptCheckpointError(
            f"table {table.name!r} has shards of ranks "
            f"{shortened([shard.rank for shard in table.shards])}; allowed: 0 to {world_size - 1}"
        )
    one.integer("rows", table.rows, table.rows)
    for shard in table.shards:
        _check_files(table, shard)
    return table


def _check_files(table: TableEntry, shard: Shard) -> None:
    """Every file a shard must have is there, and as long as its rows need."""
    needed = {"keys": shard.rows, "values": shard.rows}
    if table.scores:
        needed["scores"] = shard.rows
    if table.state:
        needed["opt_values"] = shard.rows
    if shard.counter_rows is not None:
        needed["counter_keys"] = needed["counter_frequencies"] = shard.counter_rows
    present = set(shard.files) & set(ROLES)
    if present != set(needed):
        raise CorruptCheckpointError(
            f"rank {shard.rank} of table {table.name!r} has files {sorted(present)}; allowed: "
            f"{sorted(needed)}"
        )
    for role, rows in needed.items():
        expected = rows * table.row_bytes(role)
        if shard.files[role].bytes != expected:
            raise CorruptCheckpointError(
                f"{table.file(shard, role)} is to have {shard.files[role].bytes} bytes; allowed: "
                f"{expected}, for {rows} rows"
            )


def _read_strategy(one: JsonObject) -> ScoreStrategy:
    known = DynamicEmbScoreStrategy.__members__
    names = one.items("score_strategy")
    if not names or not all(isinstance(name, str) and name in known for name in names):
        raise CorruptCheckpointError(
            f"score_strategy is {shortened(names)}; allowed: {list(known)}"
        )
    return normalize_score_strategy(tuple(known[name] for name in names))


def _read_routing(one: JsonObject) -> Routing:
    return Routing(
        one.text("dist_type"),
        one.integer("world_size", 1, MAX_RANKS),
        0,
        one.integer("block", 1, 2**63 - 1) if one.optional("block") else None,
    )


def _read_optimizer(one: JsonObject) -> Optimizer:
    kind = OptimizerKind[one.choice("kind", list(OptimizerKind.__members__))]
    args = one.member("args").plain()
    known = {item.name for item in fields(OptimizerArgs)}
    unknown = sorted(set(args) - known)
    if unknown:
        raise CorruptCheckpointError(f"unknown optimizer arguments {shortened(unknown)}")
    return Optimizer(kind, OptimizerArgs(**args))


def _read_shard(one: JsonObject, identity: str, block_bytes: int) -> Shard:
    progress = one.member("progress")
    number = {
        item.name: progress.integer(item.name, 0, 2**64 - 1)
        for item in fields(Progress)
        if item.name != "custom_score"
    }
    custom = (
        progress.integer("custom_score", 0, 2**64 - 1)
        if progress.optional("custom_score")
        else None
    )
    files = one.member("files")
    for role in files.plain():
        if re.fullmatch("[a-z][a-z0-9_]{0,39}", role) is None:
            raise CorruptCheckpointError(
                f"a shard has a file {shortened(role)}; allowed: a-z, 0-9, _"
            )
    return Shard(
        checkpoint=one.text("checkpoint", re.escape(identity)),
        rank=one.integer("rank", 0, MAX_RANKS - 1),
        owner=one.integer("owner", 0, MAX_RANKS - 1) if one.optional("owner") else None,
        rows=one.integer("rows", 0, MAX_ROWS),
        counter_rows=(
            one.integer("counter_rows", 0, MAX_ROWS) if one.optional("counter_rows") else None
        ),
        clock=one.integer("clock", 0, 2**64 - 1) if one.optional("clock") else None,
        progress=Progress(custom_score=custom, **number),
        files={role: _read_file(files.member(role), block_bytes) for role in files.plain()},
    )


def _read_file(one: JsonObject, block_bytes: int) -> FileEntry:
    size = one.integer("bytes", 0, 2**62)
    text = one.text("xxh64", "[0-9a-f]*")
    blocks = -(-size // block_bytes)
    if len(text) != 16 * blocks:
        raise CorruptCheckpointError(
            f"a file of {size} bytes has {len(text) / 16} checksums; allowed: {blocks}"
        )
    sums = tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16))
    return FileEntry(size, sums)
