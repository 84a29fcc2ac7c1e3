"""The keys of rows in Redis, and commands over many of them as one block of bytes.

Packed layout, one value per row::

    {PREFIX:TABLE:SS}IIIIIIIIIIIIIIII      value: 4 bytes of the format's tag, then the row

PREFIX and TABLE are percent-encoded (letters, digits and ``_.-@#=+`` stand for themselves). I: the
id as an unsigned 64-bit number, 16 hexadecimal digits. S: the exclusive or of the id's 8 bytes, 2
digits; in a cluster, rows with the same braces are on one server, so one command can ask for all of
them.

Upstream layout (torchrec_dynamic_embedding's), one value per row and part k::

    PREFIX_table_TABLE_gid_ID_cid_0_osid_K     value: the part

ID is the id as a signed decimal number, all 64 bits of it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

_HEX = np.array([list(b"%02x" % byte) for byte in range(256)], dtype=np.uint8)
_GLOB = re.compile(r"([*?\[\]\\^-])")


def _constant(text: bytes) -> Bytes:
    return np.frombuffer(text, dtype=np.uint8)


class Keys(ABC):
    """The keys of a table's rows."""

    #: Matches every key of the table (and others, which :meth:`parse` leaves out).
    pattern: bytes
    #: Keys of one row.
    parts: int = 1

    @abstractmethod
    def of(self, ids: Ids) -> list[bytes]:
        """Keys: parts of the first row, parts of the second, ..."""

    @abstractmethod
    def parse(self, keys: Sequence[bytes]) -> Ids:
        """The ids of keys; those that are not a row's (or not its first part's) left out."""


class PackedKeys(Keys):
    """Of the packed layout. All have the same length, so blocks of them are matrices of bytes."""

    def __init__(self, prefix: str, table: str) -> None:
        self._begin = b"{%s:%s:" % (_escape(prefix), _escape(table))
        self.pattern = self._begin + b"*"
        self.length = len(self._begin) + 2 + 1 + 16
        self._shape = re.compile(re.escape(self._begin) + rb"[0-9a-f]{2}\}([0-9a-f]{16})")

    def shards(self, ids: Ids) -> Bytes:
        """uint8 [n]: rows with equal numbers are in the same place of a cluster."""
        shards: Bytes = np.bitwise_xor.reduce(_big_endian(ids), axis=1)
        return shards

    def matrix(self, ids: Ids) -> Bytes:
        """uint8 [n, length]."""
        raw = _big_endian(ids)
        out = np.empty((len(ids), self.length), np.uint8)
        at = len(self._begin)
        out[:, :at] = _constant(self._begin)
        out[:, at : at + 2] = _HEX[np.bitwise_xor.reduce(raw, axis=1)]
        out[:, at + 2] = ord("}")
        out[:, at + 3 :] = _HEX[raw].reshape(len(ids), 16)
        return out

    def of(self, ids: Ids) -> list[bytes]:
        return [row.tobytes() for row in self.matrix(ids)]

    def parse(self, keys: Sequence[bytes]) -> Ids:
        matches = (self._shape.fullmatch(key) for key in keys)
        numbers = [int(match[1], 16) for match in matches if match]
        return np.array(numbers, dtype=np.uint64).view(np.int64)


class UpstreamKeys(Keys):
    """Of the upstream layout, with ``parts`` values per row."""

    def __init__(self, prefix: str, table: str, parts: int) -> None:
        self._begin = f"{prefix}_table_{table}_gid_".encode()
        self.parts = parts
        self._ends = [b"_cid_0_osid_%d" % part for part in range(parts)]
        escaped = _GLOB.sub(r"\\\1", f"{prefix}_table_{table}_gid_")
        self.pattern = escaped.encode() + b"*" + self._ends[0]
        self._shape = re.compile(re.escape(self._begin) + rb"(-?\d{1,19})" + self._ends[0])

    def of(self, ids: Ids) -> list[bytes]:
        return [self._begin + b"%d" % id_ + end for id_ in ids.tolist() for end in self._ends]

    def parse(self, keys: Sequence[bytes]) -> Ids:
        matches = (self._shape.fullmatch(key) for key in keys)
        return np.array([int(match[1]) for match in matches if match], dtype=np.int64)


def _escape(name: str) -> bytes:
    return quote(name, safe="_.-@#=+").encode()


def _big_endian(ids: Ids) -> Bytes:
    return ids.astype(">i8").view(np.uint8).reshape(len(ids), 8)


def command(*arguments: bytes) -> bytes:
    """One command as the protocol wants it."""
    return b"*%d\r\n" % len(arguments) + b"".join(
        b"$%d\r\n%s\r\n" % (len(argument), argument) for argument in arguments
    )


def one_command(name: bytes, *columns: Bytes | tuple[bytes, Bytes]) -> list[bytes | memoryview]:
    """``NAME a1 b1 a2 b2 ...``: the arguments row by row, a column of the same length each."""
    block = _arguments(columns)
    header = b"*%d\r\n$%d\r\n%s\r\n" % (1 + len(block) * len(columns), len(name), name)
    return [header, block.data.cast("B")]


def many_commands(
    name: bytes, *columns: Bytes | tuple[bytes, Bytes], then: Sequence[bytes] = ()
) -> list[bytes | memoryview]:
    """``NAME a1 b1 THEN``, ``NAME a2 b2 THEN``, ...: a command per row."""
    header = b"*%d\r\n$%d\r\n%s\r\n" % (1 + len(columns) + len(then), len(name), name)
    end = b"".join(b"$%d\r\n%s\r\n" % (len(argument), argument) for argument in then)
    return [_arguments(columns, header, end).data.cast("B")]


def _arguments(
    columns: Sequence[Bytes | tuple[bytes, Bytes]], before: bytes = b"", after: bytes = b""
) -> Bytes:
    """Arguments as the protocol wants them, one row per line: uint8 [n, ...]. A column may be a
    pair: constant bytes that each of its values begins with."""
    pieces: list[bytes | Bytes] = [before]
    for column in columns:
        begin, values = column if isinstance(column, tuple) else (b"", column)
        pieces += [b"$%d\r\n%s" % (len(begin) + values.shape[1], begin), values, b"\r\n"]
    pieces.append(after)
    rows = next(len(piece) for piece in pieces if not isinstance(piece, bytes))
    widths = [len(p) if isinstance(p, bytes) else p.shape[1] for p in pieces]
    out = np.empty((rows, sum(widths)), np.uint8)
    at = 0
    for piece, width in zip(pieces, widths, strict=True):
        out[:, at : at + width] = _constant(piece) if isinstance(piece, bytes) else piece
        at += width
    return out
