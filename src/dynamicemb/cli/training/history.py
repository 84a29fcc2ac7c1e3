"""What was measured during a run: points of the metrics and of every table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dynamicemb.cli.training.measured import COUNTS, Measured


@dataclass
class Point:
    """The state of a run after ``examples`` examples.

    seconds: since the run began, pauses left out. metrics: of the sliding window,
    ``{predictor: {"loss", "auc", "ne"}}``. tables: of each table the size now, the counts since the
    run began, and ``hit_rate`` since the last point.
    """

    step: int
    examples: int
    day: float | None
    seconds: float
    speed: float
    metrics: dict[str, dict[str, float]]
    tables: dict[str, dict[str, float]] = field(default_factory=dict)


class TableMeter:
    """Reads the statistics of tables, by the names they go under; counts go on over restarts."""

    def __init__(self, tables: Mapping[str, Measured]) -> None:
        self._tables = dict(tables)
        self._before = {name: dict.fromkeys(COUNTS, 0) for name in tables}
        self._last = dict.fromkeys(tables, (0, 0))

    def read(self) -> dict[str, dict[str, float]]:
        """The numbers of every table on this rank; see :func:`together`."""
        result: dict[str, dict[str, float]] = {}
        for name, table in self._tables.items():
            counts = self._counts(name)
            hits, misses = counts["hits"], counts["misses"]
            old_hits, old_misses = self._last[name]
            self._last[name] = (hits, misses)
            new_hits, new_misses = hits - old_hits, misses - old_misses
            result[name] = {
                **table.sizes(),
                **counts,
                "new_hits": new_hits,
                "new_lookups": new_hits + new_misses,
            }
        return result

    def _counts(self, name: str) -> dict[str, int]:
        return {
            key: self._before[name][key] + count
            for key, count in self._tables[name].counts().items()
        }

    def state(self) -> dict[str, Any]:
        return {
            name: {
                "counts": self._counts(name),
                "last": list(self._last[name]),
                "capacity": table.capacity,
            }
            for name, table in self._tables.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        for name, table in self._tables.items():
            table.reset()  # what the load counted
            self._before[name] = dict(state[name]["counts"])
            hits, misses = state[name]["last"]
            self._last[name] = (hits, misses)


def together(parts: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The numbers of tables over all ranks: sums, the mean of the loads, and ``hit_rate``, the
    share of hits since the last point (1 where nothing is ever looked for)."""
    result: dict[str, dict[str, float]] = {}
    for name, first in parts[0].items():
        sums = {key: sum(part[name][key] for part in parts) for key in first}
        sums["load"] = sum(part[name]["load"] for part in parts) / len(parts)
        hits, lookups = sums.pop("new_hits"), sums.pop("new_lookups")
        sums["hit_rate"] = hits / lookups if lookups else 1.0
        result[name] = sums
    return result


class History:
    """The points of a run, in order."""

    def __init__(self, points: Sequence[Point] = ()) -> None:
        self.points = list(points)

    def series(self, *path: str) -> list[float]:
        """A number of every point, such as ``series("metrics", "dynamic", "auc")``."""
        result = []
        for point in self.points:
            value: Any = asdict(point)
            for name in path:
                value = value[name]
            result.append(value)
        return result

    def to_json(self) -> str:
        return json.dumps([asdict(point) for point in self.points])

    @staticmethod
    def from_json(text: str) -> History:
        return History([Point(**point) for point in json.loads(text)])

    def write(self, file: Path) -> None:
        file.write_text(self.to_json())
