"""Locks that a forked child does not wait for."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager


class Lock(AbstractContextManager[None]):
    """A reentrant lock. In a forked child it is free: no thread of the parent, which may have held
    it, is there to release it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def acquire(self) -> None:
        if os.getpid() != self._process:
            self._lock, self._process = threading.RLock(), os.getpid()
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Locks(AbstractContextManager[None]):
    """Several locks, taken in one order, so that no two threads wait for each other."""

    def __init__(self, locks: Sequence[Lock]) -> None:
        self._locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *_: object) -> None:
        for lock in reversed(self._locks):
            lock.release()
