"""Where the row of an id is in a shard, ready to be mapped into memory: the first rows of buckets,
which cost next to nothing, or an index, which is faster.

Each is a header of 64 bytes, then 8-byte words: see docs/checkpoint_format.md and csrc/serving.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from dynamicemb import _engine
from dynamicemb.checkpoint.writer import TableSource
from dynamicemb.errors import CorruptCheckpointError
from dynamicemb.table.rows import Rows

#: Roles of a shard's files beside those of ``names.ROLES``.
INDEX = "index"
BUCKETS = "buckets"
REMOVED = "removed_keys"

HEADER_BYTES = 64
_HEADER = struct.Struct("<8sQQQ32s")
_MAGIC = {INDEX: b"dembidx1", BUCKETS: b"dembbkt1"}

#: Buckets with more rows than this take too long to look through.
_MOST_IN_A_BUCKET = 1024


@dataclass(frozen=True)
class IndexHeader:
    """role: INDEX or BUCKETS. rows, removed: ids it covers. slots: its words. checkpoint: whose it
    is, "" where the manifest says so."""

    role: str
    rows: int
    removed: int
    slots: int
    checkpoint: str

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + 8 * self.slots

    def encode(self) -> torch.Tensor:
        data = _HEADER.pack(
            _MAGIC[self.role], self.rows, self.removed, self.slots, self.checkpoint.encode("ascii")
        )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_header(data: bytes, role: str, name: str) -> IndexHeader:
    """The header of the file ``name``, which is to be of that role."""
    if len(data) < HEADER_BYTES:
        raise CorruptCheckpointError(f"{name} has {len(data)} bytes; needed: {HEADER_BYTES}")
    magic, rows, removed, slots, checkpoint = _HEADER.unpack(data[:HEADER_BYTES])
    if magic != _MAGIC[role]:
        raise CorruptCheckpointError(f"{name} is no {role} file: it begins with {magic!r}")
    whose = checkpoint.rstrip(b"\0").decode("ascii", "replace")
    return IndexHeader(role, rows, removed, slots, whose)


def build_index(ids: torch.Tensor, removed: torch.Tensor, name: str) -> torch.Tensor:
    """int64 [slots]: the words of an index over ``ids`` and then ``removed``, int64 on the CPU. An
    id that comes twice is a ``CorruptCheckpointError`` about ``name``."""
    words = torch.zeros(
        _engine.index_slots(len(ids) + len(removed)), dtype=torch.int64, device="cpu"
    )
    shard = _engine.MappedShard(
        index=0,
        slots=len(words),
        ids=ids.data_ptr(),
        rows=len(ids),
        removed_ids=removed.data_ptr(),
        removed=len(removed),
        values=0,
    )
    if not shard.build_index(words.data_ptr()):
        raise CorruptCheckpointError(f"{name} holds an id twice; allowed: once in each shard")
    return words


def with_index(source: TableSource, removed: torch.Tensor | None = None) -> TableSource:
    """``source`` that also writes an index and, if given, the ids that were removed (those that it
    has rows of are left out). Needs about 20 bytes per row of main memory until it is written."""
    seen: list[torch.Tensor] = []

    def batches() -> Iterator[Rows]:
        seen.clear()
        for rows in source.batches():
            seen.append(rows.ids)
            yield rows

    def ids() -> torch.Tensor:
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *seen])

    def gone() -> torch.Tensor:
        if removed is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return removed[~torch.isin(removed, ids())]

    def index() -> Iterator[torch.Tensor]:
        rows, left = ids(), gone()
        words = build_index(rows, left, f"table {source.name!r}")
        yield IndexHeader(INDEX, len(rows), len(left), len(words), "").encode()
        yield words

    extra = dict(source.extra) | {INDEX: index}
    if removed is not None:
        extra[REMOVED] = lambda: iter([gone()])
    return replace(source, batches=batches, extra=extra)


def with_buckets(source: TableSource, buckets: int) -> TableSource:
    """``source`` that also writes where the rows of each of ``buckets`` buckets begin, if its ids
    do come in the order of buckets, and no bucket has too many."""
    counts = torch.zeros(buckets, dtype=torch.int64, device="cpu")
    in_order = True

    def batches() -> Iterator[Rows]:
        nonlocal in_order
        counts.zero_()
        in_order, last = True, 0
        for rows in source.batches():
            if in_order:
                ids = rows.ids
                in_order, last = _engine.count_by_bucket(
                    ids.data_ptr(), len(ids), buckets, last, counts.data_ptr()
                )
            yield rows

    def first_rows() -> Iterable[torch.Tensor] | None:
        if not in_order or int(counts.max()) > _MOST_IN_A_BUCKET:
            return None
        words = torch.zeros(buckets + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=words[1:])
        return iter([IndexHeader(BUCKETS, int(words[-1]), 0, len(words), "").encode(), words])

    return replace(source, batches=batches, extra=dict(source.extra) | {BUCKETS: first_rows})
