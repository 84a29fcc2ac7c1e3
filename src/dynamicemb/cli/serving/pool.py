"""Units that threads share: bytes of memory, or turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Waiter:
    amount: int
    granted: threading.Lock = field(default_factory=threading.Lock)


class Pool:
    """``size`` units that are taken and given back; first come, first served."""

    def __init__(self, size: int) -> None:
        self.size, self.taken = size, 0
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    def take(self, amount: int, seconds: float = -1.0) -> bool:
        """Take units, when they are free and nobody waited before; False if that takes longer than
        ``seconds`` (negative: there is no limit)."""
        with self._lock:
            if not self._waiting and self.taken + amount <= self.size:
                self.taken += amount
                return True
            waiter = _Waiter(amount)
            waiter.granted.acquire()
            self._waiting.append(waiter)
        if waiter.granted.acquire(timeout=seconds):
            return True
        with self._lock:
            if waiter not in self._waiting:  # granted just then
                return True
            self._waiting.remove(waiter)
            self._grant()  # those behind it may need less
        return False

    def give(self, amount: int) -> None:
        """Give units back."""
        with self._lock:
            self.taken -= amount
            self._grant()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One unit, for the time of the block."""
        self.take(1)
        try:
            yield
        finally:
            self.give(1)

    def _grant(self) -> None:
        while self._waiting and self.taken + self._waiting[0].amount <= self.size:
            waiter = self._waiting.popleft()
            self.taken += waiter.amount
            waiter.granted.release()
