"""Lookups and updates over several cached tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from dynamicemb.errors import UsageError
from dynamicemb.options import MAX_BUCKET_CAPACITY
from dynamicemb.table.base import Table
from dynamicemb.table.create import create_group, create_table
from dynamicemb.table.group import TableGroup
from dynamicemb.table.rows import Bounds, Kept, Lookup, Pooling, Rows, SummedGradients, Written
from dynamicemb.tiers.cached_table import CachedTable
from dynamicemb.tiers.held import Held
from dynamicemb.tiers.levels import Fetched
from dynamicemb.tiers.locks import Locks
from dynamicemb.tiers.read_ahead import ReadAhead


@dataclass
class CachedLookup(Lookup):
    """A lookup in the caches, and what it takes to find its rows again if they leave them."""

    inner: Lookup
    ids: torch.Tensor
    bounds: tuple[int, ...]
    evictions: list[int]  # of each cached table when the rows were last known to be there
    held: list[Held]  # of each cached table


class CachedTableGroup(TableGroup):
    """See :class:`TableGroup`. Some tables may be in memory as a whole. Rows that left a cache
    between a lookup and its update come up again, so no gradient is lost.

    A call asks the stores first, for all tables: if one fails, no table has counted anything. Then
    it runs in the caches, and no store can make it fail.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables: Sequence[Table] = list(tables)
        self._cached = [(t, one) for t, one in enumerate(tables) if isinstance(one, CachedTable)]
        self._in_memory = [one.cache if isinstance(one, CachedTable) else one for one in tables]
        self._inner = create_group(self._in_memory)
        self._ahead: list[list[ReadAhead]] = []
        #: Rows do not leave the caches between calls inside it.
        self.together = Locks([table.levels.lock for _, table in self._cached])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.together:
            yield

    def evaluate(
        self, ids: torch.Tensor, bounds: Bounds, pooling: Pooling, out: torch.Tensor
    ) -> None:
        with self._locked():
            limits = _numbers(bounds)
            views = list(self._in_memory)
            for t, table in self._cached:
                views[t] = _view(table, ids[limits[t] : limits[t + 1]])
            create_group(views).evaluate(ids, bounds, pooling, out)

    def read_ahead(self, ids: torch.Tensor, bounds: Bounds) -> bool:
        with self._locked():
            limits = _numbers(bounds)
            started = []
            for t, table in self._cached:
                part = ids[limits[t] : limits[t + 1]]
                ahead = ReadAhead(torch.unique(part[table.cache.find_slots(part) < 0]).cpu())
                table.levels.below.read_ahead(ahead)
                ahead.start(table.store)
                started.append(ahead)
            self._ahead.append(started)
        return True

    def end_read_ahead(self) -> None:
        with self._locked():
            for (_, table), ahead in zip(self._cached, self._ahead.pop(0), strict=True):
                table.levels.below.end_read_ahead(ahead)

    def find_or_insert(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> CachedLookup:
        limits = _numbers(bounds)
        for table in self.tables:
            table.check_can_score()  # before anything moves
        with self._locked(), ExitStack() as stack:
            inner: list[Lookup] = []
            for other in protect:
                inner.append(self._ensure(other, inner))
            parts = [ids[limits[t] : limits[t + 1]] for t, _ in self._cached]
            for _, table in self._cached:
                table.levels.prepare()
            fetched = self._bring_up(parts, inner)
            evicted = []
            for (_, table), one in zip(self._cached, fetched, strict=True):
                table.levels.misses += one.missing
                evicted.append(stack.enter_context(table.levels.batch(one)))
            kept = self._inner.find_or_insert_keeping(ids, bounds, counts=counts, protect=inner)
            failures = list(kept.failures)
            for (t, table), gone in zip(self._cached, evicted, strict=True):
                gone.append(kept.evicted[t])
                failures[t] += len(table.levels.refused)
            stack.close()
            for t, one_table in enumerate(self.tables):
                one_table.check_failures(failures[t], limits[t + 1] - limits[t])
            held = [
                table.levels.hold(part)
                for (_, table), part in zip(self._cached, parts, strict=True)
            ]
            return CachedLookup(kept.lookup, ids, limits, self._evictions(), held)

    def _evictions(self) -> list[int]:
        return [table.levels.evictions for _, table in self._cached]

    def _bring_up(
        self,
        parts: Sequence[torch.Tensor],
        protect: Sequence[Lookup] = (),
        held: Sequence[Held | None] | None = None,
    ) -> list[Fetched]:
        """Bring up rows of each cached table."""
        fetched = [
            table.levels.fetch(part, one)
            for (_, table), part, one in zip(
                self._cached, parts, held or [None] * len(parts), strict=True
            )
        ]
        for (t, table), one in zip(self._cached, fetched, strict=True):
            table.levels.place(one, protect, self._inner, t)
        return fetched

    def _ensure(self, lookup: Lookup, protect: Sequence[Lookup] = ()) -> Lookup:
        """Bring the rows of a lookup up again where some may have left."""
        assert isinstance(lookup, CachedLookup)
        parts = [
            lookup.ids[lookup.bounds[t] : lookup.bounds[t + 1]]
            if before != table.levels.evictions
            else lookup.ids[:0]
            for before, (t, table) in zip(lookup.evictions, self._cached, strict=True)
        ]
        if any(map(len, parts)):
            self._bring_up(parts, protect, lookup.held)
            lookup.evictions = self._evictions()
        return lookup.inner

    def find_or_insert_keeping(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> Kept:
        raise self._no_cache()

    def bring_in(
        self, t: int, given: Rows, needed: torch.Tensor, protect: Sequence[Lookup]
    ) -> Written:
        raise self._no_cache()

    @staticmethod
    def _no_cache() -> UsageError:
        return UsageError("a CachedTable has a store already and is no cache of another one")

    def read(self, lookup: Lookup, pooling: Pooling, out: torch.Tensor) -> None:
        with self._locked():
            self._inner.read(self._ensure(lookup), pooling, out)

    def update(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        with self._locked():
            self._inner.update(self._ensure(lookup), pooling, gradient)

    def weight_gradient(
        self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor
    ) -> torch.Tensor:
        with self._locked():
            return self._inner.weight_gradient(self._ensure(lookup), pooling, gradient)

    def reduce(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> SummedGradients:
        assert isinstance(lookup, CachedLookup)
        return self._inner.reduce(lookup.inner, pooling, gradient)  # needs no rows

    def merge(self, parts: Sequence[SummedGradients]) -> SummedGradients:
        return self._inner.merge(parts)

    def prepare_update(self, gradients: SummedGradients) -> None:
        with self._locked():
            self._bring_up([gradients[t][0] for t, _ in self._cached])

    def update_summed(self, gradients: SummedGradients) -> None:
        with self._locked():
            self.prepare_update(gradients)
            self._inner.update_summed(gradients)


def _numbers(bounds: Bounds) -> tuple[int, ...]:
    return tuple(bounds.tolist() if isinstance(bounds, torch.Tensor) else bounds)


def _view(table: CachedTable, ids: torch.Tensor) -> Table:
    """A table on the same device with the rows of ``ids``: the cache, if it has all there are."""
    table.levels.below.drain()  # rows that wait are in neither of the two
    missing = torch.unique(ids[table.cache.find_slots(ids) < 0])
    if not len(missing) or not bool(table.store.contains(missing.cpu()).any()):
        return table.cache
    distinct = torch.unique(ids)
    found = table.find(distinct)
    there = found.found
    options = replace(
        table.cache.options,
        max_capacity=int(there.sum()),
        bucket_capacity=MAX_BUCKET_CAPACITY,  # one bucket: every row fits
        admit_strategy=None,
        admission_counter=None,
    )
    view = create_table(
        options, optimizer=table.optimizer, name=table.name, seed=table.seed, device=table.device
    )
    view.insert(
        distinct[there],
        found.embeddings[there],
        state=found.state[there],
        scores=found.scores[there],
    )
    return view
