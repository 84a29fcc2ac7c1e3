"""A line that shows how far a long dump or load is, if somebody looks at a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class ProgressBar:
    """Rewrites one line of ``stream`` (standard error) at most ten times a second.

    ``shown`` ``None``: only on a terminal. Use as a context manager; the line ends with it.
    """

    def __init__(
        self, label: str, total: int, *, shown: bool | None = None, stream: TextIO | None = None
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._is_terminal() if shown is None else shown
        self._label = label
        self._total = max(total, 1)
        self._done = 0
        self._start = time.monotonic()
        self._last = 0.0

    def add(self, amount: int) -> None:
        """``amount`` more of the total is done."""
        self._done += amount
        now = time.monotonic()
        if self._shown and now - self._last >= 0.1:
            self._last = now
            self._draw(now)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._draw(time.monotonic())
            self._stream.write("\n")
            self._stream.flush()

    def _is_terminal(self) -> bool:
        try:
            return self._stream.isatty()
        except (AttributeError, ValueError):  # replaced or closed
            return False

    def _draw(self, now: float) -> None:
        part = min(self._done / self._total, 1.0)
        filled = int(30 * part)
        speed = self._done / max(now - self._start, 1e-9) / 1e6
        bar = "#" * filled + "." * (30 - filled)
        self._stream.write(f"\r{self._label} [{bar}] {100 * part:3.0f} %  {speed:.0f} MB/s ")
        self._stream.flush()
