"""The bound on the memory of requests and answers in flight.

A small request (its body has at most SMALL bytes) and its answer take at most PER_CONNECTION
bytes, which belong to the connection. A larger request reserves what it may need when the first
byte of its body arrives, and nothing later: no request waits for memory while it holds memory.
Large bodies are parsed and blocks of JSON are formatted one at a time, so the memory for Python's
objects is needed once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from dynamicemb.cli.http import Lease, Refused
from dynamicemb.cli.serving.pool import Pool
from dynamicemb.errors import UsageError

#: Bytes of JSON that an id may take, with its comma and some room, and of what is around the ids.
BYTES_PER_ID, BYTES_AROUND = 32, 4096
#: Bytes of a body that needs no reservation, and what its connection takes at most.
SMALL, PER_CONNECTION = 2**14, 3 * 2**18
#: Bytes of rows that are looked up together for a small request, and for one that reserved.
SMALL_BLOCK, BLOCK = 2**18, 2**20
#: A body of JSON becomes objects of at most so many times the bytes of the largest body.
PARSED = 16
#: A request waits so long for memory, and is asked to wait so long when it is refused.
WAIT_SECONDS, RETRY_SECONDS = 2.0, 1
DEFAULT_BYTES = 2**28
ParsedT = TypeVar("ParsedT")


class Memory:
    """``size`` bytes for requests of up to ``max_ids`` ids, and for their answers."""

    def __init__(self, size: int, max_ids: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self.size, self._max_ids, self._wait_seconds = size, max_ids, wait_seconds
        self.max_body = BYTES_AROUND + BYTES_PER_ID * max_ids
        self._parsed = PARSED * self.max_body
        least = self._parsed + self._need(self.max_body)
        if size < least:
            raise UsageError(
                f"--memory-mb is {size >> 20}; allowed: at least {-(-least >> 20)} for "
                f"--max-ids {max_ids}"
            )
        self._pool, self._turns = Pool(size - self._parsed), Pool(1)
        self._copies = Pool(len(os.sched_getaffinity(0)))

    @property
    def reserved(self) -> int:
        """Bytes for what is in flight, and for the objects of one body."""
        return self._parsed + self._pool.taken

    def admit(self, size: int) -> Lease:
        """Memory for a request with a body of ``size`` bytes and for its answer, or a refusal."""
        if size <= SMALL:
            return Lease()
        need = self._need(size)
        if not self._pool.take(need, self._wait_seconds):
            raise Refused(
                429,
                f"a body of {size} bytes needs {need} bytes of memory, and {self._pool.taken} of "
                f"{self._pool.size} are taken; allowed: the same again later, or fewer ids",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        return _Reserved(self._pool, need)

    def _need(self, size: int) -> int:
        """A body, in a buffer that grew, and its answer."""
        return size * 9 // 8 + _answer(min(size // 2, self._max_ids))

    def turn(self) -> AbstractContextManager[None]:
        """Held while a large body is parsed or a block of a large answer is formatted. Its holder
        waits for nothing else."""
        return self._turns.turn()

    def copying(self) -> AbstractContextManager[None]:
        """Held while a block of rows is copied, which needs no Python: by as many threads as there
        are processors, so that other threads get one soon."""
        return self._copies.turn()

    def read(self, body: bytearray, parse: Callable[[bytearray], ParsedT]) -> ParsedT:
        """``parse(body)``, for JSON, whose objects may be many times as large. A large body is
        emptied afterwards."""
        if len(body) <= SMALL:
            return parse(body)
        with self.turn():
            need = parsed_bytes(body)
            if need > self._parsed:
                raise Refused(
                    413, f"the body takes {need} bytes as objects; allowed: at most {self._parsed}"
                )
            parsed = parse(body)
            body.clear()
        return parsed

    def keep(self, lease: Lease, ids: int) -> None:
        """Of what was reserved, keep what an answer for so many ids needs."""
        lease.keep(_answer(ids))


def _answer(ids: int) -> int:
    """The ids (those that came as bytes are in the buffer of the body), whether they were found,
    and a block of the answer."""
    return 10 * ids + BLOCK


def parsed_bytes(body: bytes | bytearray) -> int:
    """What the objects of a JSON text, and the ids made of them, take at most."""
    narrow = body.isascii() and b"\\u" not in body  # else a character may take four bytes
    text = (2 if narrow else 10) * len(body)
    objects = 128 * body.count(b"[") + 512 * body.count(b"{")
    return text + objects + 160 * body.count(b",") + 64 * body.count(b":") + 4096


def return_freed_memory() -> None:
    """Make glibc return large blocks to the system when they are freed; nothing with other C
    libraries. By default it keeps some in each of its arenas, and the bound would not hold."""
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_threshold, 2 * SMALL_BLOCK)
    mallopt(trim_threshold, 8 * SMALL_BLOCK)
    mallopt(arena_max, 4)


class _Reserved(Lease):
    """Bytes of a pool."""

    def __init__(self, pool: Pool, size: int) -> None:
        self._pool, self._size = pool, size

    def keep(self, size: int) -> None:
        if size < self._size:
            self._pool.give(self._size - size)
            self._size = size
