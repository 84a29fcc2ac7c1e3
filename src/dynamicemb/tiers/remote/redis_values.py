"""The values that MGET answers with, read into arrays as they arrive."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import redis
from redis.exceptions import InvalidResponse, ResponseError

from dynamicemb.table.engine import _engine

_BUFFER = 1 << 18
_LONGEST_LINE = 1 << 16
_local = threading.local()
_KINDS = {1: "size", 2: "tag", 3: "unknown"}


class WrongValueError(Exception):
    """Value ``index`` is not a row; ``kind``: "size" (it has ``size`` bytes), "tag", "unknown"."""

    def __init__(self, index: int, kind: str, size: int) -> None:
        super().__init__(index, kind, size)
        self.index, self.kind, self.size = index, kind, size


@dataclass(frozen=True)
class ValueShape:
    """Of values: a tag that all begin with, then ``row_bytes`` bytes."""

    tag: bytes
    row_bytes: int

    @property
    def head(self) -> bytes:
        """What such a value begins with in a reply."""
        return b"$%d\r\n%s" % (len(self.tag) + self.row_bytes, self.tag)


class Replies:
    """What comes in over a connection of redis-py whose earlier replies were all read; a thread
    has one at a time."""

    def __init__(self, connection: Any, longest: int) -> None:
        self._connection = connection
        self._buffer = _buffer(max(_BUFFER, 2 * longest))
        self._view = self._buffer.data
        self._begin = self._end = 0

    def _more(self) -> None:
        """At least one byte more, after those that have not been read."""
        if self._begin:
            left = self._end - self._begin
            self._view[:left] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, left
        try:
            got = self._connection._sock.recv_into(self._view[self._end :])
        except TimeoutError:
            raise redis.TimeoutError("Timeout reading from socket") from None
        except OSError as error:
            raise redis.ConnectionError(f"Error while reading from socket: {error}") from None
        if got == 0:
            raise redis.ConnectionError("Connection closed by server.")
        self._end += got

    def _line(self) -> bytes:
        while True:
            text = bytes(self._view[self._begin : min(self._end, self._begin + _LONGEST_LINE)])
            line, end, _ = text.partition(b"\r\n")
            if end:
                self._begin += len(line) + 2
                return line
            if len(text) == _LONGEST_LINE:
                raise InvalidResponse("Protocol Error: a line without an end")
            self._more()

    def values(
        self, shape: ValueShape, rows: npt.NDArray[np.uint8], found: npt.NDArray[np.bool_]
    ) -> None:
        """The reply to an MGET of ``len(rows)`` keys: uint8 [n, row_bytes] and bool [n], both
        contiguous. Raises what the server answers instead, and WrongValueError."""
        line = self._line()
        if line.startswith(b"-"):
            raise _error(line[1:].decode(errors="replace"))
        if line != b"*%d" % len(rows):
            raise InvalidResponse(f"Protocol Error: {line[:40]!r}")
        head, done = shape.head, 0
        while True:
            used, read, problem, size = _engine.read_redis_values(
                self._buffer.ctypes.data + self._begin,
                self._end - self._begin,
                len(rows) - done,
                head,
                len(shape.tag),
                shape.row_bytes,
                rows.ctypes.data + done * shape.row_bytes,
                found.ctypes.data + done,
            )
            self._begin += used
            done += read
            if problem:
                raise WrongValueError(done, _KINDS[problem], size)
            if done == len(rows):
                return
            self._more()


def _buffer(size: int) -> npt.NDArray[np.uint8]:
    """This thread's, kept for its next replies: fresh pages cost more than reading into them."""
    kept: npt.NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if kept is None or len(kept) != size:
        kept = _local.buffer = np.empty(size, np.uint8)
    return kept


def _error(text: str) -> ResponseError:
    """redis-py's error for what a server answered."""
    from redis._parsers.base import BaseParser

    error: ResponseError = BaseParser.parse_error(text)
    return error
