"""``memory://name``: rows in the memory of this process, shared by all that use the name."""

from __future__ import annotations

import threading

import torch

from dynamicemb.options import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.table.cpu import CpuTable
from dynamicemb.tiers.remote.rows import RemoteRows, RowFormat
from dynamicemb.tiers.remote.url import MemoryUrl

_lock = threading.Lock()
_tables: dict[tuple[str, str], tuple[RowFormat, CpuTable]] = {}


def forget_memory(name: str) -> None:
    """Drop everything that ``memory://name`` holds."""
    with _lock:
        for key in [key for key in _tables if key[0] == name]:
            del _tables[key]


class MemoryRows(RemoteRows):
    """Rows in a table of this process; see :class:`RemoteRows`. They live as long as the process,
    or until :func:`forget_memory`."""

    def __init__(self, url: MemoryUrl, table: str, row_format: RowFormat) -> None:
        super().__init__(table, row_format)
        self._name = url.name
        with _lock:
            known, self._rows = _tables.setdefault(
                (url.name, table), (row_format, _make(row_format))
            )
        if known != row_format:
            raise self._other_rows(known.describe())

    def __repr__(self) -> str:
        return f"memory://{self._name} table {self.table!r}"

    def pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._rows.find(self._checked(ids))
        return found.found, found.embeddings.view(torch.uint8)[:, : self.format.nbytes]

    def push(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        ids = self._checked(ids, rows)
        padded = torch.zeros(len(ids), 4 * self._rows.dim, dtype=torch.uint8, device="cpu")
        padded[:, : self.format.nbytes] = rows
        self._rows.insert(ids, padded.view(torch.float32))

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        return self._rows.contains(self._checked(ids))

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        return self._rows.erase(self._checked(ids))

    def ids(self) -> torch.Tensor:
        return torch.cat(
            [
                torch.empty(0, dtype=torch.int64, device="cpu"),
                *(rows.ids for rows in self._rows.export()),
            ]
        )

    def count(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()


def _make(row_format: RowFormat) -> CpuTable:
    """A table whose float32 columns are the bytes of the rows."""
    options = DynamicEmbTableOptions(
        dim=max(1, -(-row_format.nbytes // 4)),
        max_capacity=2**31 - 2**20,
        init_capacity=1024,
        score_strategy=DynamicEmbScoreStrategy.NO_EVICTION,
    )
    return CpuTable(options, optimizer=None, name="memory", seed=0, clock=None)
