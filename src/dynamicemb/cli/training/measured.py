"""Tables of every kind as the screen, the metrics and the report see them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from dynamicemb.cli.training.zch import CountingModule
from dynamicemb.table import Table
from dynamicemb.tiers import CachedTable

COUNTS = ("hits", "misses", "inserts", "evictions", "failures", "rejections")


class Measured(ABC):
    """A table of a model; on several ranks, this rank's part of it."""

    name: str
    capacity: int

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """What happened since the process began or :meth:`reset`: ``COUNTS``."""

    @abstractmethod
    def sizes(self) -> dict[str, float]:
        """``rows``, ``capacity``, ``load``, ``bytes`` (in memory) and ``stored_bytes``."""

    @abstractmethod
    def reset(self) -> None:
        """Count from 0."""

    def scores(self) -> np.ndarray:
        """What decides which row makes room, row by row; empty where nothing does."""
        return np.empty(0)


class MeasuredDynamic(Measured):
    def __init__(self, table: Table) -> None:
        self.table, self.name = table, table.name

    @property
    def capacity(self) -> int:  # type: ignore[override]
        return self.table.capacity

    def counts(self) -> dict[str, int]:
        stats = self.table.stats()
        return {name: getattr(stats, name) for name in COUNTS}

    def sizes(self) -> dict[str, float]:
        stats = self.table.stats()
        table = self.table
        stored = table.store.stats().bytes_on_disk if isinstance(table, CachedTable) else 0
        return {
            "rows": stats.size,
            "capacity": stats.capacity,
            "load": stats.load_factor,
            "bytes": stats.bytes,
            "stored_bytes": stored,
        }

    def reset(self) -> None:
        self.table.reset_stats()

    def scores(self) -> np.ndarray:
        """Of a pair of scores the second, which decides."""
        some = [rows.scores.cpu().reshape(len(rows), -1)[:, -1] for rows in self.table.export()]
        return torch.cat(some).numpy().astype(np.float64) if some else np.empty(0)


class MeasuredZch(Measured):
    """Slots of a managed collision module and the static table behind them."""

    def __init__(self, name: str, module: CountingModule, row_bytes: int) -> None:
        self.name, self._module, self._row_bytes = name, module, row_bytes
        self.capacity = module.output_size()

    def counts(self) -> dict[str, int]:
        return dict(self._module.counts)

    def sizes(self) -> dict[str, float]:
        rows = len(self._module.slot_map)
        return {
            "rows": rows,
            "capacity": self.capacity,
            "load": rows / self.capacity,
            "bytes": self._module.bytes + self.capacity * self._row_bytes,
            "stored_bytes": 0,
        }

    def reset(self) -> None:
        self._module.counts.update(dict.fromkeys(COUNTS, 0))

    def scores(self) -> np.ndarray:
        state = self._module.slot_map.state()
        counted = "_mch_counts" in dict(self._module.named_buffers())
        return (state.counts if counted else state.last).numpy().astype(np.float64)


class MeasuredHashed(Measured):
    """A static table: every id has a row, which others may have too."""

    def __init__(self, name: str, rows: int, row_bytes: int) -> None:
        self.name, self.capacity, self._row_bytes = name, rows, row_bytes

    def counts(self) -> dict[str, int]:
        return dict.fromkeys(COUNTS, 0)

    def reset(self) -> None:
        pass

    def sizes(self) -> dict[str, float]:
        return {
            "rows": self.capacity,
            "capacity": self.capacity,
            "load": 1.0,
            "bytes": self.capacity * self._row_bytes,
            "stored_bytes": 0,
        }
