"""What was measured during a run: points of the metrics and of every table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dynamicemb.table import Table
from dynamicemb.tiers import CachedTable

COUNTS = ("hits", "misses", "inserts", "evictions", "failures", "rejections")


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
    """Reads the statistics of tables; counts go on over restarts."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self._before = {table.name: dict.fromkeys(COUNTS, 0) for table in tables}
        self._last = {table.name: (0, 0) for table in tables}

    def read(self) -> dict[str, dict[str, float]]:
        """The numbers of every table on this rank."""
        result = {}
        for table in self._tables:
            stats = table.stats()
            counts: dict[str, float] = self._counts(table)
            hits, misses = counts["hits"], counts["misses"]
            old_hits, old_misses = self._last[table.name]
            lookups = hits + misses - old_hits - old_misses
            self._last[table.name] = (int(hits), int(misses))
            result[table.name] = {
                "rows": stats.size,
                "capacity": stats.capacity,
                "load": stats.load_factor,
                "bytes": stats.bytes,
                "stored_bytes": table.store.stats().bytes_on_disk
                if isinstance(table, CachedTable)
                else 0,
                "hit_rate": (hits - old_hits) / lookups if lookups else 0.0,
                **counts,
            }
        return result

    def _counts(self, table: Table) -> dict[str, float]:
        stats, before = table.stats(), self._before[table.name]
        return {name: before[name] + getattr(stats, name) for name in COUNTS}

    def state(self) -> dict[str, Any]:
        return {
            table.name: {
                "counts": {name: int(one) for name, one in self._counts(table).items()},
                "last": list(self._last[table.name]),
                "capacity": table.capacity,
            }
            for table in self._tables
        }

    def restore(self, state: dict[str, Any]) -> None:
        for table in self._tables:
            table.reset_stats()  # what the load counted
            self._before[table.name] = dict(state[table.name]["counts"])
            hits, misses = state[table.name]["last"]
            self._last[table.name] = (hits, misses)


def together(parts: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The numbers of tables over all ranks: sums, and means of shares."""
    result: dict[str, dict[str, float]] = {}
    for name, first in parts[0].items():
        sums = {key: sum(part[name][key] for part in parts) for key in first}
        for key in ("load", "hit_rate"):
            sums[key] = first[key] if len(parts) == 1 else sums[key] / len(parts)
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
