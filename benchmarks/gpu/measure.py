"""Timing on a GPU: events, medians, a cold second-level cache."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import triton


class Clock:
    """Times calls with events. ``cold`` calls find nothing of theirs in the second-level cache."""

    def __init__(self) -> None:
        # Written before a call: that empties the cache.
        self._flush = torch.empty(256 << 20, dtype=torch.float32, device="cuda")

    def time(
        self,
        call: Callable[[int], Any],
        *,
        repeats: int = 20,
        warm_up: int = 3,
        cold: bool = True,
        before: Callable[[], None] | None = None,
    ) -> float:
        """Median microseconds of ``call(i)``, i counting up; ``before`` is called before each."""
        for i in range(warm_up):
            call(i)
        times = []
        for i in range(repeats):
            if before is not None:
                before()
            if cold:
                # A millisecond and more, so that the host has queued the call when it begins.
                torch.cuda._sleep(2_000_000)
                self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(warm_up + i)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def copy_bandwidth(self) -> float:
        """Bytes per second of a large device-to-device copy, read and written."""
        source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        micros = self.time(lambda _: target.copy_(source), repeats=10, cold=False)
        return 2 * source.nbytes / micros * 1e6


def machine(commit: str | None = None) -> dict[str, str]:
    """What was measured, and where. ``commit``: default what git says."""
    if commit is None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def power_law(count: int, rows: int, exponent: float, generator: torch.Generator) -> torch.Tensor:
    """int64 ids in [0, rows) whose frequencies fall with the rank to the power of -exponent, drawn
    by the inverse of the continuous distribution."""
    u = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
    top = (rows + 1.0) ** (1.0 - exponent)
    x = (1.0 + u * (top - 1.0)) ** (1.0 / (1.0 - exponent))
    return x.floor().to(torch.int64).clamp_(1, rows) - 1
