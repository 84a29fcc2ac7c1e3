"""Answers to lookups, as bytes or JSON, in blocks: one of any size takes the memory of a block."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dynamicemb.checkpoint.http_table import pack_rows
from dynamicemb.checkpoint.serving import ServingTable
from dynamicemb.cli.http import BYTES, JSON, Chunk, Response
from dynamicemb.cli.serving.memory import BLOCK, SMALL_BLOCK, Memory

#: Of a block of JSON: numbers, which take about a millisecond in which no other thread runs Python,
#: and the bytes of text that are sent together.
NUMBERS, TEXT = 8192, 2**16


@dataclass(frozen=True)
class Lookup:
    """Ids of a request in one table. The table never changes, so all blocks are of one state.

    count: called with numbers of ids, and how many of them have no row; each id counts once.
    """

    table: ServingTable
    ids: torch.Tensor
    count: Callable[[int, int], None]

    @property
    def numbers(self) -> int:
        return len(self.ids) * self.table.dim

    def parts(self, numbers: int) -> Iterator[slice]:
        """The ids in parts of at most so many numbers, or of one row."""
        rows = max(1, numbers // self.table.dim)
        return (slice(at, at + rows) for at in range(0, len(self.ids), rows))

    def space(self, numbers: int) -> torch.Tensor:
        """For the rows of one of these parts."""
        shape = (max(1, numbers // self.table.dim), self.table.dim)
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    def find(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All at once."""
        found, rows = self.table.find(self.ids)
        self._count(found)
        return found, rows

    def find_into(self, part: slice, found: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
        """The rows of a part, in ``space``; ``found`` is of all ids."""
        present = found[part]
        rows = space[: len(present)]
        self.table.find_into(self.ids[part], present, rows)
        self._count(present)
        return rows

    def _count(self, found: torch.Tensor) -> None:
        self.count(len(found), len(found) - int(found.sum()))


def bytes_response(
    lookup: Lookup, headers: Mapping[str, str], memory: Memory, *, large: bool
) -> Response:
    """The layout of ``pack_rows``. ``large``: the request has memory for large blocks."""
    numbers = (BLOCK if large else SMALL_BLOCK) // 4
    if lookup.numbers <= numbers:
        return Response(pack_rows(*lookup.find()), BYTES, headers=headers)
    blocks = _packed(lookup, numbers, memory)
    size = 4 * lookup.numbers + (len(lookup.ids) + 7) // 8
    return Response((), BYTES, headers=headers, rest=_begun(blocks), size=size)


def _packed(lookup: Lookup, numbers: int, memory: Memory) -> Iterator[Chunk]:
    found = torch.empty(len(lookup.ids), dtype=torch.bool, device="cpu")
    space = lookup.space(numbers)
    for part in lookup.parts(numbers):
        with memory.copying():
            rows = lookup.find_into(part, found, space)
        yield pack_rows(found[part], rows)[0]
    yield np.packbits(found.numpy(), bitorder="little").data


def json_response(place: Mapping[str, Any], lookup: Lookup, memory: Memory) -> Response:
    """``place`` with the members ``found`` and ``embeddings``."""
    head = json.dumps(place)[:-1].encode()

    def pieces() -> Iterator[bytes]:
        yield head + b", "
        yield from _members(lookup)
        yield b"}\n"

    return _response(pieces(), lookup.numbers, memory)


def json_response_of_tables(
    place: Mapping[str, Any], lookups: Mapping[str, Lookup], memory: Memory
) -> Response:
    """``place`` with the member ``tables``: found and embeddings by name."""
    head = json.dumps(place)[:-1].encode()

    def pieces() -> Iterator[bytes]:
        yield head + b', "tables": {'
        comma = b""
        for name, lookup in lookups.items():
            yield comma + json.dumps(name).encode() + b": {"
            yield from _members(lookup)
            yield b"}"
            comma = b", "
        yield b"}}\n"

    return _response(pieces(), sum(lookup.numbers for lookup in lookups.values()), memory)


def _response(pieces: Iterator[bytes], numbers: int, memory: Memory) -> Response:
    if numbers <= NUMBERS:
        return Response((b"".join(pieces),), JSON)
    return Response((), JSON, rest=_begun(_in_turns(pieces, memory)))


def _begun(blocks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The same, with the first block computed: what fails by then has a status of its own."""
    first = [next(blocks)]

    def every() -> Iterator[Chunk]:
        yield first.pop()
        yield from blocks

    return every()


def _in_turns(pieces: Iterator[bytes], memory: Memory) -> Iterator[Chunk]:
    """Blocks of TEXT bytes or more. Each takes a turn, so that large answers advance together."""
    while True:
        with memory.turn():
            block = [b"".join(_next_pieces(pieces))]
        if not block[0]:
            return
        yield block.pop()  # no reference to it is held here while it is sent


def _next_pieces(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """As many as have TEXT bytes together."""
    size = 0
    while size < TEXT and (piece := next(pieces, b"")):
        size += len(piece)
        yield piece


def _members(lookup: Lookup) -> Iterator[bytes]:
    """``found`` comes first, so that rows of several blocks are looked up twice. That takes a
    fiftieth of the time that their text takes, and less memory than to keep them."""
    if lookup.numbers <= NUMBERS:
        found, rows = lookup.find()
        text = f'"found": [{_booleans(found)}], "embeddings": [{_numbers(rows)}]'
        yield text.encode()
        return
    found = torch.empty(len(lookup.ids), dtype=torch.bool, device="cpu")
    space = lookup.space(SMALL_BLOCK // 4)
    for part in lookup.parts(SMALL_BLOCK // 4):
        lookup.find_into(part, found, space)
    del space
    before = '"found": ['
    for at in range(0, len(found), NUMBERS):
        yield (before + _booleans(found[at : at + NUMBERS])).encode()
        before = ", "
    before = '], "embeddings": ['
    for part in lookup.parts(NUMBERS):
        yield (before + _numbers(lookup.table.find(lookup.ids[part])[1])).encode()
        before = ", "
    yield b"]"


def _booleans(found: torch.Tensor) -> str:
    return json.dumps(found.tolist())[1:-1]


def _numbers(rows: torch.Tensor) -> str:
    """Rows, separated by commas. Nine digits give back the same float32, and take a third of the
    time of those that ``json`` writes. Infinity and NaN, which JSON does not have, are null."""
    n, dim = rows.shape
    row = "[" + ", ".join(["%.9g"] * dim) + "]"
    text = ", ".join([row] * n) % tuple(rows.float().flatten().tolist())
    if not bool(torch.isfinite(rows).all()):
        text = re.sub(r"-?(?:inf|nan)", "null", text)
    return text
