"""The two levels of a cached table, and the rows that move between them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from dynamicemb.errors import InsertionError, UsageError
from dynamicemb.hashing import signed
from dynamicemb.options import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    align_to_table_size,
)
from dynamicemb.table.base import Table
from dynamicemb.table.device_table import DeviceTable
from dynamicemb.table.group import TableGroup
from dynamicemb.table.rows import Found, Lookup, Rows
from dynamicemb.tiers.base import Store
from dynamicemb.tiers.below import Below
from dynamicemb.tiers.changes import Changes
from dynamicemb.tiers.held import Held
from dynamicemb.tiers.locks import Lock
from dynamicemb.tiers.merge import first_of_each, join, last_of_each, reaches, select
from dynamicemb.tiers.room import Room
from dynamicemb.tiers.row_numbers import RowNumbers
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


@dataclass
class Fetched:
    """Rows that must come up for a batch of ``ids``. ``absent``: those that were not in the cache,
    as the batch has them; ``missing``: how many distinct ones; ``rows``: in main memory."""

    ids: torch.Tensor
    absent: torch.Tensor
    missing: int
    rows: Rows | None

    @functools.cached_property
    def new(self) -> torch.Tensor:
        """The distinct ids that have no row, in order of first occurrence."""
        new, known = self.absent, 0 if self.rows is None else len(self.rows)
        if known == self.missing:
            return new[:0]
        if self.rows is not None and known:
            new = new[~torch.isin(new, self.rows.ids.to(new.device))]
        return new[first_of_each(new)]


class Levels:
    """Rows in use in ``cache``, a table that never grows, all others in ``store``.

    A row has one truth: the cache's copy if there is one, else the store's. Every method holds
    ``lock``; a caller that does several things as one holds it around them.

    Of a NO_EVICTION table (``options``), ``numbers`` has the scores of the rows in the cache, and
    ``room`` says which new ids may have a row.
    """

    def __init__(self, cache: Table, store: Store, options: DynamicEmbTableOptions) -> None:
        self.cache = cache
        self.store = store
        self.lock = Lock()
        self.numbers: RowNumbers | None = None
        self.room: Room | None = None
        if options.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION:
            self.numbers = RowNumbers(cache)
            self.room = Room(
                store,
                _slots(options),
                cache.device,
                count_rows=self.size,
                all_ids=self._all_ids,
            )
        self.changes = Changes()
        self.below = Below(store, self.changes)
        self.evictions = 0  # grows when a row leaves the cache, or goes past it to the store
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

    def _all_ids(self) -> Iterator[torch.Tensor]:
        """Those of all rows, each once."""
        self.below.drain()
        for rows in self.store.export():
            yield rows.ids
        for rows in self.cache.export():
            ids = rows.ids.cpu()
            yield ids[~self.store.contains(ids)]

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
                bytes=stats.bytes + self.bytes_of_numbers,
            )

    @property
    def bytes_of_numbers(self) -> int:
        """Memory of the cache's device that the scores of its rows take beside it."""
        return 0 if self.numbers is None else self.numbers.bytes

    def reset_stats(self) -> None:
        with self.lock:
            self.cache.reset_stats()
            self.brought_up = self.below.written_back = self.misses = 0
            if self.room is not None:
                self.room.failures = self.room.rejections = 0

    # ---- rows of the cache ----

    def find(self, ids: torch.Tensor) -> Found:
        """The rows of ids in the cache."""
        found = self.cache.find(ids)
        if self.numbers is not None:
            found.scores = self.numbers.of(ids)
        return found

    def assign(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        state: torch.Tensor | None,
        scores: torch.Tensor | None,
    ) -> torch.Tensor:
        """Overwrite rows of the cache; bool [n], which of the ids those are."""
        if self.numbers is None or scores is None:
            return self.cache.assign(ids, embeddings, state=state, scores=scores)
        here = self.cache.assign(ids, embeddings, state=state)
        self.numbers.assign(ids[here], scores[here])
        return here

    def continue_after(self, ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Rows were given these scores; of equal ids the last one counts."""
        if self.numbers is not None:
            self.numbers.continue_after(scores[last_of_each(ids)])

    def export(
        self,
        *,
        batch_size: int = 65536,
        score_threshold: int | None = None,
        changed_since: int | None = None,
    ) -> Iterator[Rows]:
        """:meth:`Table.export` of the cache. ``changed_since`` is a mark of the cache."""
        if self.numbers is None:
            return self.cache.export(
                batch_size=batch_size, score_threshold=score_threshold, changed_since=changed_since
            )
        return self._export_numbered(self.numbers, batch_size, score_threshold, changed_since)

    def _export_numbered(
        self, numbers: RowNumbers, batch_size: int, threshold: int | None, mark: int | None
    ) -> Iterator[Rows]:
        if threshold is None:
            for rows in self.cache.export(batch_size=batch_size, changed_since=mark):
                yield numbers.numbered(rows)
            return
        none = torch.empty(0, dtype=torch.int64, device=self.cache.device)
        changed = none
        if mark is not None:
            changed = torch.cat([none, *(r.ids for r in self.cache.export(changed_since=mark))])
        for rows in self.cache.export(batch_size=batch_size):
            rows = numbers.numbered(rows)
            wanted = reaches(rows.scores, threshold) | torch.isin(rows.ids, changed)
            if bool(wanted.any()):
                yield select(rows, wanted)

    # ---- up ----

    def prepare(self) -> None:
        """Before a call that makes rows: what of it needs the store, and may fail."""
        if self.room is not None:
            self.room.prepare()

    def fetch(self, ids: torch.Tensor, held: Held | None = None) -> Fetched:
        """The rows of ``ids`` that only the store has. Whatever may fail below fails here, and the
        cache has not changed. ``held`` has the ids too: it helps where the store fails."""
        with self.lock:
            absent = ids[self.cache.find_slots(ids) < 0]
            missing = torch.unique(absent).cpu()
            if not len(missing):
                return Fetched(ids, absent, 0, None)
            try:
                return Fetched(ids, absent, len(missing), self.below.find(missing))
            except Exception:
                rows = None if held is None else held.take(missing)
                if rows is None:
                    raise
                return Fetched(ids, absent, len(missing), rows)

    def place(
        self,
        fetched: Fetched,
        protect: Sequence[Lookup] = (),
        group: TableGroup | None = None,
        t: int = 0,
    ) -> None:
        """Put rows of :meth:`fetch` into the cache, which is table ``t`` of ``group``. Neither rows
        of its ids nor of ``protect`` leave the cache for it."""
        rows, ids = fetched.rows, fetched.ids
        if rows is None or not len(rows):
            return
        with self.lock:
            if group is None:
                if self._alone is None:
                    self._alone = self.cache.make_group([self.cache])
                group = self._alone
            coming = to_device(rows, self.cache.device)
            scores = coming.scores
            if self.numbers is not None:
                now = torch.full_like(scores, signed(max(0, self.cache.step - 1)))
                coming = replace(coming, scores=now)
            written = group.bring_in(t, coming, ids, protect)
            evicted = written.evicted
            assert evicted is not None
            if self.numbers is not None:
                here = written.written
                evicted = self.numbers.moved(evicted, coming.ids[here], scores[here])
                self.numbers.continue_after(rows.scores)
            placed = int(written.written.sum())
            self.brought_up += placed
            self.write_back(evicted)
            if placed < len(rows):
                raise UsageError(
                    f"{len(rows) - placed} of {len(rows)} rows of a batch of {len(ids)} ids "
                    f"find no place in the cache of table {self.cache.name!r}, which has "
                    f"{self.cache.capacity} slots in buckets of {self.cache.bucket_capacity}: the "
                    "batch, or the batches that wait for their backward, need more. Raise the "
                    "memory budget, or make the batches smaller"
                )

    def hold(self, ids: torch.Tensor) -> Held:
        """From now on rows of ``ids`` that leave the cache can come up even if the store fails."""
        held = Held(ids)
        self.below.hold(held)
        return held

    @contextmanager
    def batch(self, fetched: Fetched) -> Iterator[list[Rows]]:
        """Around a batch on the cache whose known rows were brought up: the rows it makes are new
        to the whole, and those that leave for it, which the caller appends to the list, go down.
        The evicted rows of an InsertionError are taken from it."""
        evicted: list[Rows] = []
        before = self.cache.stats().inserts
        asks = self.room is not None and self.room.begin(fetched.new)
        self._set_limit(self.room if asks else None)
        try:
            yield evicted
        except InsertionError as error:
            if error.evicted is not None:
                evicted.append(error.evicted)
            error.evicted = None
            self._ran()
            raise
        else:
            self._ran()
        finally:
            self._set_limit(None)
            if self.below.only_cached is not None:
                self.below.only_cached += self.cache.stats().inserts - before
            gone = join([self.cache.empty_rows(0), *evicted])
            if self.numbers is not None:
                gone = self._number_new(self.numbers, fetched, gone)
            self.write_back(gone)

    def _set_limit(self, limit: Room | None) -> None:
        assert isinstance(self.cache, DeviceTable)
        self.cache.limit = limit

    def _ran(self) -> None:
        if self.room is not None:
            self.room.end()

    def _number_new(self, numbers: RowNumbers, fetched: Fetched, gone: Rows) -> Rows:
        """Number the rows that a batch made; those that left for it, with their numbers."""
        if not len(fetched.new):
            return gone
        made = fetched.new[self.cache.find_slots(fetched.new) >= 0]
        if self.room is not None:
            self.room.come(made)
        return numbers.moved(gone, made)

    @property
    def refused(self) -> torch.Tensor:
        """The distinct ids of the last batch that the store has no place for."""
        if self.room is None:
            return torch.empty(0, dtype=torch.int64, device=self.cache.device)
        return self.room.refused

    def without_place(self, fetched: Fetched) -> torch.Tensor:
        """Those of its new ids that the store has no place for."""
        if self.room is None:
            return fetched.absent[:0]
        return fetched.new[~self.room.find(fetched.new)]

    def count_failures(self, count: int) -> None:
        """So many distinct ids of a call had no place."""
        if self.room is not None:
            self.room.failures += count

    # ---- down ----

    def insert(self, rows: Rows) -> tuple[torch.Tensor, int]:
        """Write whole rows to where they are, new ones to the store: (bool [n], which have a place;
        how many distinct ids have none)."""
        with self.lock:
            self.prepare()
            self.below.drain()
            self.evictions += 1
            here = self.assign(rows.ids, rows.embeddings, rows.state, rows.scores)
            if self.room is None:
                self.below.insert(select(rows, ~here))
                return torch.ones_like(here), 0
            new = rows.ids[~here]
            new = new[first_of_each(new)]
            new = new[~self.store.contains(new.cpu()).to(new.device)]
            placed = self.room.find(new)
            written = ~torch.isin(rows.ids, new[~placed])
            with self.room.changing():
                self.below.insert(select(rows, ~here & written))
            self.room.come(new[placed])
            self.continue_after(rows.ids[written], rows.scores[written])
            failures = int((~placed).sum())
            self.count_failures(failures)
            return written, failures

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        """Remove rows; bool [n], True at the first occurrence of an id that was there."""
        with self.lock, nullcontext() if self.room is None else self.room.changing():
            removed = self.below.erase(ids.cpu()).to(ids.device)
            if self.numbers is not None:
                self.numbers.leave(ids)
            removed |= self.cache.erase(ids)
        if self.room is not None:
            self.room.go(ids[removed])
        return removed

    def write_back(self, rows: Rows) -> None:
        """Hand rows that left the cache to the store. What it does not take is kept and offered
        again by the next call that needs the store, which raises the store's error."""
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
            for rows in self.export(changed_since=self._flushed_at):
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
            if self.numbers is not None:
                self.numbers.clear()
            self.below.forget_held()
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
        if self.numbers is not None:
            self.numbers.clear()
            self.numbers.next = 0
        if self.room is not None:
            self.room.forget()
        self.below.start_again()
        self._flushed_at = None
        self.evictions += 1


def _slots(options: DynamicEmbTableOptions) -> int:
    """Of a full table in memory."""
    assert options.max_capacity is not None
    width = options.bucket_capacity
    return align_to_table_size(options.max_capacity, 16 if width == MAX_BUCKET_CAPACITY else width)
