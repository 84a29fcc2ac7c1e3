"""The limits of an exchange with a Redis: one clock for all of its waiting, and the memory for its
replies.

redis-py bounds each ``recv`` and reads replies of any size. Its connections are kept here for TLS,
authentication, Sentinel and Cluster; this puts a clock into their sockets and another reader
behind them, so every command is bounded, those that redis-py sends by itself too.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.exceptions import InvalidResponse

#: Memory for replies beside rows: pages of a listing, the slots of a cluster.
SLACK_BYTES = 16 * 2**20

_local = threading.local()


class Exchange:
    """The time and the memory that are left of one exchange: a request and all its replies,
    connecting included."""

    def __init__(self, seconds: float, reply_bytes: int) -> None:
        self._reply_bytes = SLACK_BYTES + reply_bytes
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """Begin the next one, of the same size."""
        self._end, self._left = time.monotonic() + seconds, self._reply_bytes

    @property
    def seconds_left(self) -> float:
        """Raises redis.TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise redis.TimeoutError("Timeout: it did not answer all in time")
        return left

    def charge(self, nbytes: int) -> None:
        """Memory is about to be used. Raises InvalidResponse if that is more than is allowed."""
        if nbytes > self._left:
            raise InvalidResponse(f"Protocol Error: it answers more than {self._reply_bytes} bytes")
        self._left -= nbytes


@contextmanager
def exchange(seconds: float, reply_bytes: int) -> Iterator[Exchange]:
    """What this thread sends and reads in the block is one exchange."""
    before = getattr(_local, "exchange", None)
    _local.exchange = now = Exchange(seconds, reply_bytes)
    try:
        yield now
    finally:
        _local.exchange = before


def current() -> Exchange:
    """The exchange of this thread."""
    exchange_: Exchange | None = getattr(_local, "exchange", None)
    assert exchange_ is not None, "a command outside of an exchange"
    return exchange_


class TimedSocket:
    """A socket whose calls all end with the exchange of the thread."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_into(self, buffer: memoryview) -> int:
        self._socket.settimeout(current().seconds_left)
        got: int = self._socket.recv_into(buffer)
        return got

    def arrived_into(self, buffer: memoryview) -> int | None:
        """What has arrived; None: nothing; 0: the other side closed."""
        self._socket.settimeout(0)
        try:
            got: int = self._socket.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        return got

    def sendall(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            self._socket.settimeout(current().seconds_left)
            rest = rest[self._socket.send(rest) :]
