"""Replies of Redis, read strictly as they arrive: kinds are checked, sizes are bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import redis
from redis._parsers.base import BaseParser
from redis.exceptions import (
    AskError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    ResponseError,
    TryAgainError,
)

from dynamicemb.table.engine import _engine
from dynamicemb.tiers.remote.redis_exchange import TimedSocket, current

#: Bytes of a buffer: at first (a cluster may have 1,000 connections), and at most.
_SMALL_BUFFER, _BUFFER = 1 << 14, 1 << 18
_LONGEST_LINE = 1 << 16
#: Arrays in arrays; a cluster's list of commands has 8.
_DEEPEST = 16
#: Bytes of memory that an element of a reply takes beside its text.
ELEMENT_BYTES = 64
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


class Reader(BaseParser):  # type: ignore[misc]
    """The replies that come in over a connection of redis-py, which takes it for its parser.

    RESP2 alone, which the client asks for. Raises InvalidResponse for anything else, and for a
    reply that is larger than the exchange allows or deeper than any of Redis; redis.TimeoutError
    when the time of the exchange is over.
    """

    EXCEPTION_CLASSES = {  # noqa: RUF012  as redis-py has it; older ones know the last of a cluster
        **BaseParser.EXCEPTION_CLASSES,
        "ASK": AskError,
        "MOVED": MovedError,
        "TRYAGAIN": TryAgainError,
        "CLUSTERDOWN": ClusterDownError,
        "MASTERDOWN": MasterDownError,
    }

    def __init__(self, socket_read_size: int = 0) -> None:
        self._socket: TimedSocket | None = None
        self._begin = self._end = 0
        self._view = memoryview(b"")
        self._make_room(0)

    def _make_room(self, size: int) -> None:
        """A buffer of ``size`` bytes, which begins with what has not been read."""
        unread = bytes(self._view[self._begin : self._end])
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._view[: len(unread)] = unread
        self._address: int = np.frombuffer(self._buffer, np.uint8).ctypes.data if size else 0
        self._begin, self._end = 0, len(unread)

    # ---- as redis-py calls its parsers ----

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock
        self._begin = self._end = 0
        self._make_room(_SMALL_BUFFER)

    def on_disconnect(self) -> None:
        self._socket = None
        self._begin = self._end = 0
        self._make_room(0)

    def can_read(self, timeout: float = 0) -> bool:
        """Whether the server has sent something that nobody asked for."""
        if self._begin < self._end:
            return True
        got = self._connected.arrived_into(self._view)
        if got == 0:
            raise redis.ConnectionError("Connection closed by server.")
        return got is not None

    def check_empty(self) -> None:
        """Raises InvalidResponse if more has come than was read."""
        if self._begin < self._end:
            raise InvalidResponse("Protocol Error: it answers more than it was asked")

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        reply = self.read()
        if isinstance(reply, redis.ConnectionError):
            raise reply
        return reply

    # ---- what comes in ----

    @property
    def _connected(self) -> TimedSocket:
        if self._socket is None:
            raise redis.ConnectionError("Connection closed.")
        return self._socket

    def _receive(self, into: memoryview) -> int:
        try:
            got = self._connected.recv_into(into)
        except TimeoutError:
            raise redis.TimeoutError("Timeout reading from socket") from None
        except OSError as error:
            raise redis.ConnectionError(f"Error while reading from socket: {error}") from None
        if got == 0:
            raise redis.ConnectionError("Connection closed by server.")
        return got

    def _more(self) -> None:
        """At least one byte more, after those that have not been read."""
        if self._end == len(self._buffer) < _BUFFER:  # much has come
            self._make_room(_BUFFER)
        elif self._begin:
            left = self._end - self._begin
            self._view[:left] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, left
        self._end += self._receive(self._view[self._end :])

    def _line(self) -> bytes:
        while True:
            at = self._buffer.find(b"\r\n", self._begin, self._end)
            if at >= 0:
                line = self._view[self._begin : at].tobytes()
                self._begin = at + 2
                return line
            if self._end - self._begin > _LONGEST_LINE:
                raise InvalidResponse("Protocol Error: a line without an end")
            self._more()

    def _bulk(self, size: int) -> bytes:
        """The next ``size`` bytes, and the end of the line after them."""
        nbytes = size + 2
        if nbytes <= len(self._buffer):
            while self._end - self._begin < nbytes:
                self._more()
            text = self._view[self._begin : self._begin + nbytes].tobytes()
            self._begin += nbytes
        else:
            gathered = bytearray(nbytes)
            filled = self._end - self._begin
            gathered[:filled] = self._view[self._begin : self._end]
            self._begin = self._end = 0
            with memoryview(gathered) as view:
                while filled < nbytes:
                    filled += self._receive(view[filled:])
            text = bytes(gathered)
        if not text.endswith(b"\r\n"):
            raise InvalidResponse("Protocol Error: a value without an end")
        return text[:-2]

    # ---- replies ----

    def read_many(self, count: int, depth: int = 0) -> list[Any]:
        """The next ``count`` replies, each as :meth:`read` gives it."""
        replies: list[Any] = []
        while len(replies) < count:
            used, pieces = _engine.read_redis_pieces(
                self._address + self._begin, self._end - self._begin, count - len(replies)
            )
            self._begin += used
            current().charge(ELEMENT_BYTES * len(pieces) + used)
            replies += pieces
            if len(replies) < count:
                replies.append(self.read(depth))
        return replies

    def read(self, depth: int = 0) -> Any:
        """The next reply: bytes, int, None, a list of replies, or a ResponseError."""
        line = self._line()
        kind, text = line[:1], line[1:]
        current().charge(ELEMENT_BYTES + len(text))
        if kind == b"$":
            size = _integer(line)
            if size == -1:
                return None
            if size < 0:
                raise _refused(line)
            current().charge(2 * size)
            return self._bulk(size)
        if kind == b":":
            return _integer(line)
        if kind == b"+":
            return text
        if kind == b"*":
            size = _integer(line)
            if size < 0 or depth == _DEEPEST:  # -1, no array: no command here is answered so
                raise _refused(line)
            current().charge(ELEMENT_BYTES * size)  # for all of them, before the first comes
            return self.read_many(size, depth + 1)
        if kind == b"-":
            return self._error(text.decode(errors="replace"))
        raise _refused(line)

    def _error(self, text: str) -> ResponseError:
        """redis-py's error for what a server answered, with the first word as ``code``."""
        try:
            error: ResponseError = self.parse_error(text)
        except (ValueError, LookupError):  # MOVED to a place that is none
            error = ResponseError(text)
        error.code = text.partition(" ")[0]
        return error

    def values(
        self, shape: ValueShape, rows: npt.NDArray[np.uint8], found: npt.NDArray[np.bool_]
    ) -> None:
        """The reply to an MGET of ``len(rows)`` keys: uint8 [n, row_bytes] and bool [n], both
        contiguous. Raises what the server answers instead, and WrongValueError."""
        line = self._line()
        if line.startswith(b"-"):
            raise self._error(line[1:].decode(errors="replace"))
        if line != b"*%d" % len(rows):
            raise _refused(line)
        head, done = shape.head, 0
        if len(self._buffer) < 2 * (len(head) + shape.row_bytes + 2):
            self._make_room(2 * (len(head) + shape.row_bytes + 2) + self._end - self._begin)
        while True:
            used, read, problem, size = _engine.read_redis_values(
                self._address + self._begin,
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


def _integer(line: bytes) -> int:
    """The number after the first byte of a line, of 64 bits."""
    digits = line[2:] if line[1:2] == b"-" else line[1:]
    if not digits.isdigit() or len(digits) > 19:
        raise _refused(line)
    return int(line[1:])


def _refused(line: bytes) -> InvalidResponse:
    return InvalidResponse(f"Protocol Error: {line[:40]!r}")
