"""Ctrl-C and SIGTERM as a wish to end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupts:
    """True after Ctrl-C or SIGTERM."""

    def __init__(self, pipe: int) -> None:
        self.times: list[float] = []
        self._pipe = pipe

    def __bool__(self) -> bool:
        return bool(self.times)

    def wait(self) -> None:
        """Return after a signal."""
        os.read(self._pipe, 1)


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Notes Ctrl-C and SIGTERM instead of ending; another one, a second later, ends at once.
    Processes of a group may get the same signal twice."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    seen = Interrupts(reading)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: object) -> None:
        seen.times.append(time.monotonic())
        if len(seen.times) == 1:
            os.write(writing, b"x")
        if seen.times[-1] - seen.times[0] > 1.0:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
