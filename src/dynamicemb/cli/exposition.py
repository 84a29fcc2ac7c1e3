"""Numbers in Prometheus' text format."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: The type of the text, for an HTTP header.
TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Bounds of the histogram of a request's time, in seconds.
SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5)
Labels = tuple[tuple[str, str], ...]


def labels(**values: str) -> Labels:
    return tuple(values.items())


@dataclass
class Family:
    """One metric: its numbers by labels. ``kind``: counter, gauge or histogram (whose names have
    their endings already)."""

    name: str
    kind: str
    values: Mapping[Labels, float]
    help: str = ""


def exposition(families: Iterable[Family]) -> str:
    """The text; numbers that are not there (NaN) are left out."""
    lines: list[str] = []
    for family in families:
        name = f"dynamicemb_{family.name}"
        if family.help:
            lines.append(f"# HELP {name} {family.help}")
        lines.append(f"# TYPE {name} {family.kind}")
        for found, value in family.values.items():
            if math.isnan(value):
                continue
            ending, shown = "", found
            if family.kind == "histogram":  # the first label says which of its series
                ending, shown = found[0][1], found[1:]
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in shown)
            lines.append(f"{name}{ending}{f'{{{pairs}}}' if pairs else ''} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclass
class Counter:
    """Numbers that only grow, by labels; for any number of threads."""

    name: str
    help: str
    _values: dict[Labels, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, amount: float, found: Labels = ()) -> None:
        with self._lock:
            self._values[found] = self._values.get(found, 0.0) + amount

    def family(self) -> Family:
        with self._lock:
            return Family(self.name, "counter", dict(self._values), self.help)


@dataclass
class Histogram:
    """How often a number was up to each of some bounds, by labels; for any number of threads."""

    name: str
    help: str
    bounds: Sequence[float] = SECONDS
    _counts: dict[Labels, list[float]] = field(default_factory=dict)
    _sums: dict[Labels, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: float, found: Labels = ()) -> None:
        place = bisect.bisect_left(self.bounds, number)
        with self._lock:
            counts = self._counts.setdefault(found, [0.0] * (len(self.bounds) + 1))
            counts[place] += 1
            self._sums[found] = self._sums.get(found, 0.0) + number

    def family(self) -> Family:
        values: dict[Labels, float] = {}
        with self._lock:
            for found, counts in self._counts.items():
                total = 0.0
                for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
                    total += count
                    shown = "+Inf" if bound == math.inf else repr(bound)
                    values[("", "_bucket"), *found, ("le", shown)] = total
                values[("", "_sum"), *found] = self._sums[found]
                values[("", "_count"), *found] = total
        return Family(self.name, "histogram", values, self.help)
