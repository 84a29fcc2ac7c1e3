"""A store in main memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dynamicemb.errors import StoreError
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.base import Found, Rows
from dynamicemb.table.cpu import CpuTable
from dynamicemb.tiers.base import Store, StoreStats


class HostStore(Store):
    """Rows in main memory, at most ``max_capacity`` of the options.

    When it is full, the row with the smallest score of a bucket goes, as in a table in main memory;
    with NO_EVICTION, :meth:`insert` raises a StoreError. ``stats().details["evictions"]`` counts.
    """

    def __init__(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        super().__init__(options, optimizer)
        self._table = self._make_table(options, optimizer)

    @staticmethod
    def _make_table(options: DynamicEmbTableOptions, optimizer: Optimizer) -> CpuTable:
        plain = replace(
            options,
            init_capacity=min(options.init_capacity or 1024, options.max_capacity or 1024),
            caching=False,
            external_storage=None,
            admit_strategy=None,
            admission_counter=None,
            training=True,  # the layout is the given optimizer's in any case
        )
        return CpuTable(plain, optimizer=optimizer, name="host store", seed=0)

    def find(self, ids: torch.Tensor) -> Found:
        return self._table.find(ids)

    def insert(self, rows: Rows) -> None:
        rows = self.layout.check(rows)
        written = self._table.insert(
            rows.ids, rows.embeddings, state=rows.state, scores=rows.scores
        ).written
        if not bool(written.all()):
            raise StoreError(
                None,
                f"{int((~written).sum())} rows found no room in a host store of "
                f"{self._table.capacity} slots that evicts nothing; raise max_capacity",
            )

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        return self._table.contains(ids)

    def insert_counting(self, rows: Rows) -> int:
        before = self._table.stats().inserts
        self.insert(rows)
        return self._table.stats().inserts - before

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        return self._table.erase(ids)

    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        return self._table.export(batch_size=batch_size)

    def clear(self) -> None:
        self._table.clear()

    def size(self) -> int:
        return self._table.size()

    def set_layout(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        super().set_layout(options, optimizer)
        self._table = self._make_table(options, optimizer)

    def stats(self) -> StoreStats:
        stats = self._table.stats()
        return StoreStats(
            rows=stats.size, bytes_in_memory=stats.bytes, details={"evictions": stats.evictions}
        )
