"""The two levels of a cached table, and the rows that move between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dynamicemb.errors import UsageError
from dynamicemb.table.base import Table
from dynamicemb.table.group import TableGroup
from dynamicemb.table.rows import Lookup, Rows
from dynamicemb.tiers.base import Store
from dynamicemb.tiers.below import Below
from dynamicemb.tiers.changes import Changes
from dynamicemb.tiers.staging import to_device


@dataclass(frozen=True)
class CacheStats:
    """Counts since the table was made.

    hits, misses: distinct ids of training batches that were or were not in the cache.
    brought_up: rows copied from the store into the cache. written_back: rows written to the store.
    size, capacity, bytes: of the cache.
    """

    hits: int
    misses: int
    brought_up: int
    written_back: int
    size: int
    capacity: int
    bytes: int


class Levels:
    """Rows in use in ``cache``, a table that never grows, all others in ``store``.

    A row has one truth: the cache's copy if there is one, else the store's. Every method holds
    ``lock``; a caller that does several things as one holds it around them.
    """

    def __init__(self, cache: Table, store: Store) -> None:
        self.cache = cache
        self.store = store
        self.lock = threading.RLock()
        self.changes = Changes()
        self.below = Below(store, self.changes)
        self.evictions = 0  # grows when a row leaves the cache
        self.brought_up = self.misses = 0  # see CacheStats
        self._flushed_at: int | None = None  # a mark of the cache
        self._alone: TableGroup | None = None

    def size(self) -> int:
        """Rows of the whole."""
        with self.lock:
            self.below.drain()
            if self.below.only_cached is None:
                self.below.only_cached = sum(
                    int((~self.store.contains(rows.ids.cpu())).sum())
                    for rows in self.cache.export()
                )
            return self.store.size() + self.below.only_cached

    def cache_stats(self) -> CacheStats:
        with self.lock:
            stats = self.cache.stats()
            looked_up = stats.hits + stats.misses
            return CacheStats(
                hits=looked_up - self.misses,
                misses=self.misses,
                brought_up=self.brought_up,
                written_back=self.below.written_back,
                size=stats.size,
                capacity=stats.capacity,
                bytes=stats.bytes,
            )

    def reset_stats(self) -> None:
        with self.lock:
            self.cache.reset_stats()
            self.brought_up = self.below.written_back = self.misses = 0

    # ---- up ----

    def bring_up(
        self,
        ids: torch.Tensor,
        protect: Sequence[Lookup] = (),
        group: TableGroup | None = None,
        t: int = 0,
    ) -> int:
        """Copy rows of ``ids`` that only the store has into the cache, which is table ``t`` of
        ``group``. Neither rows of ``ids`` nor of ``protect`` leave the cache for it. Returns how
        many distinct ids were not in the cache."""
        with self.lock:
            missing = torch.unique(ids[self.cache.find_slots(ids) < 0]).cpu()
            if not len(missing):
                return 0
            rows = self.below.find(missing)
            if not len(rows):
                return len(missing)
            if group is None:
                if self._alone is None:
                    self._alone = self.cache.make_group([self.cache])
                group = self._alone
            written = group.bring_in(t, to_device(rows, self.cache.device), ids, protect)
            assert written.evicted is not None
            placed = int(written.written.sum())
            self.brought_up += placed
            self.write_back(written.evicted)
            if placed < len(rows):
                raise UsageError(
                    f"{len(rows) - placed} of {len(rows)} rows of a batch of {len(ids)} ids "
                    f"find no place in the cache of table {self.cache.name!r}, which has "
                    f"{self.cache.capacity} slots in buckets of {self.cache.bucket_capacity}: the "
                    "batch, or the batches that wait for their backward, need more. Raise the "
                    "memory budget, or make the batches smaller"
                )
            return len(missing)

    @contextmanager
    def counting_new(self) -> Iterator[None]:
        """Around a batch on the cache whose known rows were brought up: the rows it makes are new
        to the whole."""
        before = self.cache.stats().inserts
        yield
        if self.below.only_cached is not None:
            self.below.only_cached += self.cache.stats().inserts - before

    # ---- down ----

    def write_back(self, rows: Rows) -> None:
        """Hand rows that left the cache to the store. What it does not take is kept and offered
        again by the next call that needs the store."""
        if not len(rows):
            return
        with self.lock:
            self.evictions += 1
            self.below.take(rows)

    def flush(self) -> None:
        """Write the rows of the cache that changed since the last flush to the store, and flush the
        store: then it holds everything."""
        with self.lock:
            self.below.drain()
            self.below.only_cached = None
            mark = self.cache.mark_changes()
            for rows in self.cache.export(changed_since=self._flushed_at):
                self.below.copy(rows)
            self._flushed_at = mark
            self.below.flushed()

    def drop_cache(self) -> None:
        """Flush, then empty the cache."""
        with self.lock:
            self.flush()
            if self.changes.tracked:
                for rows in self.cache.export():
                    self.changes.written(rows.ids.cpu())
            self.cache.clear()
            self.evictions += 1

    # ---- other rows ----

    def return_to(self, name: str) -> bytes:
        """Return to the rows of a snapshot of the store; its note."""
        with self.lock:
            note = self.store.load_snapshot(name)
            self._start_again()
            self.changes.forget()
            return note

    def clear(self) -> None:
        """No rows."""
        with self.lock:
            self.store.clear()
            self._start_again()

    def _start_again(self) -> None:
        """The store has other rows: none of the cache, or that waits, counts any more."""
        self.cache.clear()
        self.below.start_again()
        self._flushed_at = None
        self.evictions += 1
