"""A store in main memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dynamicemb.errors import StoreError
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import (
    DynamicEmbEvictStrategy,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.table.cpu import CpuTable
from dynamicemb.table.rows import Found, Rows
from dynamicemb.tiers.base import BoundedStore, StoreStats
from dynamicemb.tiers.locks import Lock
from dynamicemb.tiers.merge import first_of_each, join, places, select
from dynamicemb.tiers.sizing import rows_within


class HostStore(BoundedStore):
    """Rows in main memory: as many as fit ``budget`` bytes, ids and scores included, or at most
    ``max_capacity`` of the options.

    When it is full, the row with the smallest score of a bucket goes: down, in a
    :class:`~dynamicemb.tiers.Stack` (with NO_EVICTION the row inserted longest ago); else it is
    dropped as in a table in main memory, which ``stats().details["evictions"]`` counts, or, with
    NO_EVICTION, :meth:`insert` raises a StoreError.
    """

    def __init__(
        self,
        options: DynamicEmbTableOptions,
        optimizer: Optimizer,
        *,
        budget: int | None = None,
    ) -> None:
        super().__init__(options, optimizer)
        self._budget = budget
        self._hands_down = False
        self._lock = Lock()  # a row is in the table or is leaving, for every reader
        self._leaving: list[Rows] = []
        self._dropped: list[torch.Tensor] | None = None  # ids; None: nobody asks
        self._drops = 0
        self._flushed_at: int | None = None  # a mark of the table
        self._made_of = options, optimizer
        self._inserts = 0  # calls
        self._table = self._make_table()

    @classmethod
    def within(cls, budget: int) -> Callable[[DynamicEmbTableOptions, Optimizer], HostStore]:
        """For ``external_storage`` and ``Stack.of``: a store of ``budget`` bytes."""
        return functools.partial(cls, budget=budget)

    def _make_table(self) -> CpuTable:
        options, optimizer = self._made_of
        if self._orders:
            strategy = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
            options = replace(
                options, score_strategy=strategy, evict_strategy=DynamicEmbEvictStrategy.LRU
            )
        capacity, start = options.max_capacity or 1024, min(options.init_capacity or 1024, 1024)
        if self._budget is not None:
            # From the start: growing would take the memory twice for a while.
            capacity = rows_within(self._budget, options, optimizer, name="budget")
            start = capacity
        plain = replace(
            options,
            init_capacity=min(start, capacity),
            max_capacity=capacity,
            max_load_factor=options.max_load_factor or 0.5,
            caching=False,
            external_storage=None,
            admit_strategy=None,
            admission_counter=None,
            training=True,  # the layout is the given optimizer's in any case
        )
        return CpuTable(plain, optimizer=optimizer, name="host store", seed=0)

    # ---- the order that rows go down in ----

    @property
    def _orders(self) -> bool:
        """Whether the table has a second score, by which rows go down: the number of the call that
        inserted them. Running numbers say who was first made, and those are mostly in use."""
        numbered = self._made_of[0].score_strategy is DynamicEmbScoreStrategy.NO_EVICTION
        return self._hands_down and numbered

    def _scores_of(self, scores: torch.Tensor) -> torch.Tensor:
        """The rows' own scores, of the table's."""
        return scores[:, 0].contiguous() if self._orders else scores

    def _rows_of(self, rows: Rows) -> Rows:
        """Rows of the table, with their own scores."""
        return replace(rows, scores=self._scores_of(rows.scores)) if self._orders else rows

    # ---- rows ----

    def find(self, ids: torch.Tensor) -> Found:
        with self._lock:
            found = self._table.find(ids)
            found.scores = self._scores_of(found.scores)
            for rows in self._leaving:  # an id is in one of them at most
                at, there = places(rows, ids)
                found.found |= there
                for name in ("embeddings", "state", "scores"):
                    getattr(found, name)[there] = getattr(rows, name)[at[there]]
            return found

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        with self._lock:
            found = self._table.contains(ids)
            for rows in self._leaving:
                found |= places(rows, ids)[1]
            return found

    def insert(self, rows: Rows) -> None:
        rows = self.layout.check(rows)
        with self._lock:
            self._inserts += 1
            self._forget_leaving(rows.ids)
            evicted, refused = self._insert(rows)
            while (len(evicted) or len(refused)) and self._grow():
                evicted, refused = self._insert(join([evicted, refused]))
            if self._hands_down:
                self._leaving += [_last_of_each(part) for part in (evicted, refused) if len(part)]
                return
            if len(refused):  # the call had more rows of a bucket than it has slots
                more, refused = self._insert(refused)
                evicted = join([evicted, more])
            self._drops += len(evicted)
            if self._dropped is not None:
                self._dropped.append(evicted.ids)
        if len(refused):
            raise StoreError(
                None,
                f"{len(refused)} rows found no room in a host store of {self._table.capacity} "
                "slots that evicts nothing; raise max_capacity",
            )

    def _insert(self, rows: Rows) -> tuple[Rows, Rows]:
        """Write to the table; the rows that left it, and those of the call that found no place."""
        scores = rows.scores
        if self._orders:
            scores = torch.stack([scores, torch.full_like(scores, self._inserts)], 1)
        done = self._table.insert(
            rows.ids, rows.embeddings, state=rows.state, scores=scores, return_evicted=True
        )
        assert done.evicted is not None
        return self._rows_of(done.evicted), select(rows, ~done.written)

    def _grow(self) -> bool:
        """Grow, if that is possible: one bucket is full before the table is."""
        table = self._table
        before = table.capacity
        if before < table.max_slots:
            allowed = int(before * table.options.max_load_factor)
            table.reserve(max(0, allowed - table.size()) + 1)
        return table.capacity > before

    def insert_counting(self, rows: Rows) -> int | None:
        before = self._table.stats()
        self.insert(rows)
        after = self._table.stats()
        if self._hands_down or after.evictions != before.evictions:
            return None  # some of the rows that came in were here before
        return after.inserts - before.inserts

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        with self._lock:
            removed = self._table.erase(ids)
            if self._leaving:
                first = first_of_each(ids)
                for rows in self._leaving:
                    removed |= first & places(rows, ids)[1]
            self._forget_leaving(ids)
            return removed

    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        yield from map(self._rows_of, self._table.export(batch_size=batch_size))
        for rows in list(self._leaving):
            for begin in range(0, len(rows), batch_size):
                yield select(rows, slice(begin, begin + batch_size))

    def clear(self) -> None:
        with self._lock:
            self._table.clear()
            self._leaving.clear()
            self._flushed_at = None

    def size(self) -> int:
        return self._table.size() + sum(len(rows) for rows in self._leaving)

    def buckets(self) -> tuple[int, int] | None:
        options = self._table.options
        if options.score_strategy is not DynamicEmbScoreStrategy.NO_EVICTION:
            return None
        width, _, most = CpuTable.bucket_layout_of(options)
        return most, width

    # ---- above another store ----

    def hand_down(self) -> None:
        self._hands_down = True
        if self._orders:
            self._table = self._make_table()

    def surplus(self) -> Rows:
        return join([self.layout.empty(0), *self._leaving])

    def release(self, ids: torch.Tensor) -> None:
        with self._lock:
            self._forget_leaving(ids)

    def unflushed(self) -> Iterator[Rows]:
        return map(self._rows_of, self._table.export(changed_since=self._flushed_at))

    def flush(self) -> None:
        """For a store below: what is here now is there. Nothing here lasts longer than the
        process."""
        if self._hands_down:
            self._flushed_at = self._table.mark_changes()

    def _forget_leaving(self, ids: torch.Tensor) -> None:
        kept = [select(rows, ~torch.isin(rows.ids, ids)) for rows in self._leaving]
        self._leaving = [rows for rows in kept if len(rows)]

    # ---- the rest ----

    def log_drops(self) -> None:
        self._dropped = self._dropped or []

    def take_dropped(self) -> torch.Tensor:
        dropped, self._dropped = self._dropped or [], []
        return torch.cat([super().take_dropped(), *dropped])

    def set_layout(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        super().set_layout(options, optimizer)
        self._made_of = options, optimizer
        self._flushed_at = None
        self._table = self._make_table()

    def stats(self) -> StoreStats:
        stats = self._table.stats()
        leaving = sum(len(rows) for rows in self._leaving)
        return StoreStats(
            rows=self.size(),
            bytes_in_memory=stats.bytes + leaving * (8 + self.layout.row_bytes),
            details={
                "capacity": stats.capacity,
                "evictions": self._drops,
            },
        )


def _last_of_each(rows: Rows) -> Rows:
    """The rows in ascending order of their ids, of equal ids the last."""
    order = torch.argsort(rows.ids, stable=True)
    ids = rows.ids[order]
    last = torch.ones(len(ids), dtype=torch.bool, device="cpu")
    last[:-1] = ids[1:] != ids[:-1]
    return select(rows, order[last])
