"""How a call is timed: contenders take turns, and a disturbed sample is thrown away.

All contenders of a row run in the same loop in a shuffled order, so that a slow minute of the
machine hits all of them. Consecutive calls work on different batches: on the same batch the
second contender would find its rows in the cache. A sample whose threads waited more than 4 %
of its time for a processor that another process held is dropped; the median of the rest counts.
The C allocator keeps what is freed: otherwise some contenders, by the luck of the heap, take fresh
pages for their output in every call, which costs more than the lookup itself.
"""

from __future__ import annotations

import ctypes
import glob
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

MAX_LOST = 0.04

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One timed call: wall time, and how much of it other processes took away (both ms)."""

    ms: float
    lost_ms: float

    @property
    def clean(self) -> bool:
        return self.lost_ms <= MAX_LOST * self.ms


@dataclass(frozen=True)
class Result:
    """Median of the clean samples in ms; ``clean`` of ``taken`` samples were undisturbed.

    With fewer than three clean samples the fastest quarter of all of them (at least three) is used.
    """

    ms: float
    clean: int
    taken: int


# A contender runs the i-th batch. It returns None, and is timed here, or the Sample it took itself
# (a contender that lives in another process).
Contender = Callable[[int], Sample | None]


def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks of up to 32 MiB (its limit); nothing with other C libraries."""
    trim_threshold, mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, -1)


def waited_ms() -> float:
    """Time all threads of this process have spent runnable but not running (0.0 off Linux)."""
    total = 0
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return 0.0
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            continue  # the thread has ended, or the kernel keeps no statistics
    return total / 1e6


def others_ms() -> float:
    """Processor time that all other processes have used, divided by the number of processors.

    Stands in for ``waited_ms`` in a process whose own threads wait for each other.
    """
    total = 0
    for path in glob.iglob("/proc/[0-9]*/task/*/schedstat"):
        if path.startswith(f"/proc/{os.getpid()}/"):
            continue
        try:
            with open(path) as file:
                total += int(file.read().split()[0])
        except (OSError, IndexError, ValueError):
            continue
    return total / 1e6 / (os.cpu_count() or 1)


def sample(
    call: Callable[[T], Sample | None], batch: T, *, lost_ms: Callable[[], float] = waited_ms
) -> Sample:
    """Time one call; ``lost_ms`` counts the time taken away by other processes."""
    before = lost_ms()
    start = time.perf_counter()
    own = call(batch)
    ms = (time.perf_counter() - start) * 1e3
    return own if own is not None else Sample(ms, lost_ms() - before)


def interleave(
    contenders: Mapping[str, Contender],
    *,
    batches: int,
    repeats: int = 15,
    warmup: int = 2,
    seconds: float = 60.0,
) -> dict[str, Result]:
    """Time every contender ``repeats`` times on batches ``0 .. batches - 1``.

    Disturbed samples are taken again, up to three times as many rounds in all, and no longer than
    ``seconds`` once every contender has three samples.
    """
    taken: dict[str, list[Sample]] = {name: [] for name in contenders}
    started = time.perf_counter()
    for turn in range(warmup + 3 * repeats):
        late = time.perf_counter() - started > seconds and turn >= warmup + 3
        todo = [
            (place, name)
            for place, name in enumerate(contenders)
            if turn < warmup or sum(s.clean for s in taken[name]) < repeats
        ]
        if late or not todo:
            break
        random.Random(turn).shuffle(todo)
        for place, name in todo:
            result = sample(contenders[name], (turn * 7 + place * 5) % batches)
            if turn >= warmup:
                taken[name].append(result)
    return {name: _summary(samples) for name, samples in taken.items()}


def _summary(samples: list[Sample]) -> Result:
    clean = [s.ms for s in samples if s.clean]
    used = clean if len(clean) >= 3 else sorted(s.ms for s in samples)[: max(3, len(samples) // 4)]
    return Result(statistics.median(used), len(clean), len(samples))
