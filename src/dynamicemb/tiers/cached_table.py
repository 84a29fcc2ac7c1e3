"""A table that is a cache over a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynamicemb.errors import (
    UsageError,
    check_integer,
    wrong_type,
)
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import (
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.table.base import Table
from dynamicemb.table.create import create_table
from dynamicemb.table.group import TableGroup
from dynamicemb.table.rows import Found, Inserted, Progress, Rows, TableStats, Written
from dynamicemb.tiers.base import Store
from dynamicemb.tiers.host import HostStore
from dynamicemb.tiers.levels import CacheStats, Levels
from dynamicemb.tiers.merge import changed_below, contains_below, export_below, fill_from
from dynamicemb.tiers.staging import to_device


def _of_cache(name: str) -> Any:
    """An attribute that the cache has."""

    def read(self: CachedTable) -> Any:
        return getattr(self.cache, name)

    def write(self: CachedTable, value: Any) -> None:
        setattr(self.cache, name, value)

    return property(read, write)


class CachedTable(Table):
    """Rows in a store, those in use in a table (``cache``) on any device that never grows.

    A row is one unit and has one truth: the cache's copy if there is one, else the store's. Rows of
    a training batch are brought up before the batch runs, with their state and scores, so the batch
    finds them as if they had always been there: nothing is initialised, admitted or scored anew.
    Rows that the cache evicts are written to the store. So what the table holds, and every result,
    is that of one table in memory; what differs is where rows are.

    The rows of one batch, and of the lookups it must protect, have to fit the cache: a row that
    must come up and finds no place is a UsageError. :meth:`find`, :meth:`export` and evaluation
    read through and move nothing. ``stats()`` is about the whole, :meth:`cache_stats` about the
    cache.
    """

    iteration = _of_cache("iteration")
    seed = _of_cache("seed")
    _step = _of_cache("_step")
    _custom_score = _of_cache("_custom_score")
    _clock_function = _of_cache("_clock_function")
    _optimizer = _of_cache("_optimizer")

    has_store = True
    #: Any number of rows is taken from a ``state_dict``, but with NO_EVICTION.
    max_slots = 2**62

    def __init__(
        self,
        options: DynamicEmbTableOptions,
        *,
        cache_rows: int,
        make_store: Callable[[DynamicEmbTableOptions, Optimizer], Any] = HostStore,
        optimizer: Optimizer | None = None,
        name: str = "table",
        seed: int | None = None,
        clock: Callable[[], int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        in_memory = replace(
            options,
            max_capacity=cache_rows,
            init_capacity=None,
            max_load_factor=0.0,
            caching=False,
            external_storage=None,
        )
        if options.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION:
            # The cache evicts all the same, by last use: see RowNumbers.
            in_memory = replace(
                in_memory,
                score_strategy=DynamicEmbScoreStrategy.STEP,
                evict_strategy=DynamicEmbEvictStrategy.LRU,
            )
        self.cache = create_table(
            in_memory, optimizer=optimizer, name=name, seed=seed, clock=clock, device=device
        )
        self.name = name
        self.options = replace(options, initializer_args=self.cache.options.initializer_args)
        self._make_store = make_store
        store = make_store(self.options, self.cache.optimizer)
        if not isinstance(store, Store):
            raise wrong_type("the result of external_storage", store, "a dynamicemb.tiers.Store")
        self.store: Store = store
        self.levels = Levels(self.cache, store, self.options)
        self._changes, self._below = self.levels.changes, self.levels.below
        if self.levels.room is not None:
            self.max_slots = self.levels.room.places

    # ---- what it is ----

    @property
    def optimizer(self) -> Optimizer:
        return self.cache.optimizer

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def capacity(self) -> int:
        """Slots of the cache, or rows where there are more."""
        return max(self.cache.capacity, self.size())

    @property
    def bucket_capacity(self) -> int:
        return self.cache.bucket_capacity

    def bucket_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.cache.bucket_of(ids)

    def size(self) -> int:
        return self.levels.size()

    def stats(self) -> TableStats:
        """Of the table as a whole, the store included."""
        with self.levels.lock:
            of_cache = self.cache.stats()
            below = self.store.stats()
            lost = (below.details or {}).get("evictions", 0)
            size = self.size()
            room = self.levels.room
            return replace(
                of_cache,
                inserts=of_cache.inserts - self.levels.brought_up,
                evictions=int(lost) if isinstance(lost, int) else 0,
                failures=of_cache.failures + (0 if room is None else room.failures),
                rejections=of_cache.rejections - (0 if room is None else room.rejections),
                size=size,
                capacity=self.capacity,
                load_factor=size / self.capacity,
                bytes=of_cache.bytes + self.levels.bytes_of_numbers + below.bytes_in_memory,
            )

    def cache_stats(self) -> CacheStats:
        """Of the cache alone: what was in memory when a batch asked for it."""
        return self.levels.cache_stats()

    def reset_stats(self) -> None:
        self.levels.reset_stats()

    # ---- snapshots ----

    def flush(self) -> None:
        """Write the rows of the cache that changed since the last flush to the store, and flush the
        store: then it holds everything."""
        self.levels.flush()

    def drop_cache(self) -> None:
        """Flush, then empty the cache."""
        self.levels.drop_cache()

    def snapshot(self, name: str) -> None:
        """Keep the whole table of now under a name, in the store, if it has snapshots."""
        with self.levels.lock:
            self.flush()
            self.store.snapshot(name, self.progress().to_bytes())

    def load_snapshot(self, name: str) -> None:
        """Return to a snapshot: rows, scores, and the numbers that go on counting."""
        with self.levels.lock:
            note = self.return_to(name)
            if note:
                self.restore_progress(Progress.from_bytes(note))

    def return_to(self, name: str) -> bytes:
        """Return to the rows of a snapshot of the store; its note."""
        return self.levels.return_to(name)

    # ---- reading ----

    def find(self, ids: torch.Tensor) -> Found:
        ids = self.check_ids("ids", ids)
        with self.levels.lock:
            found = self.levels.find(ids)
            self._below.drain()
            fill_from(self.store, ids, found)
            return found

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """The slot in the cache, -1 where a row is not there; see :meth:`contains`."""
        return self.cache.find_slots(ids)

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        with self.levels.lock:
            found = self.cache.contains(ids)
            self._below.drain()
            contains_below(self.store, ids, found)
            return found

    def initial_rows(
        self, ids: torch.Tensor, args: DynamicEmbInitializerArgs | None = None
    ) -> torch.Tensor:
        return self.cache.initial_rows(ids, args)

    def export(
        self,
        *,
        batch_size: int = 65536,
        score_threshold: int | None = None,
        changed_since: int | None = None,
    ) -> Iterator[Rows]:
        """The rows of the cache in slot order, then the others in the store's order. With
        ``changed_since`` also rows that only left the cache after the mark."""
        batch_size = check_integer("batch_size", batch_size, minimum=1)
        of_cache = None
        if changed_since is not None:
            changed_since = check_integer("changed_since", changed_since, minimum=1)
            of_cache = self._changes.of_cache(changed_since)
            if of_cache is None:  # too old to know: all rows
                score_threshold = None
        if score_threshold is not None:
            score_threshold = check_integer(
                "score_threshold", score_threshold, minimum=0, maximum=2**64 - 1
            )
        cached = self.levels.export(
            batch_size=batch_size, score_threshold=score_threshold, changed_since=of_cache
        )
        return self._export(cached, batch_size, score_threshold, changed_since)

    def _export(
        self, cached: Iterator[Rows], batch_size: int, threshold: int | None, mark: int | None
    ) -> Iterator[Rows]:
        with self.levels.lock:
            self._below.drain()
        yield from cached

        def above(ids: torch.Tensor) -> torch.Tensor:
            return self.cache.contains(ids.to(self.device)).cpu()

        if mark is None:
            below = export_below(self.store, above, batch_size, threshold)
        elif (changed := self._changes.written_after(mark)) is None:
            below = export_below(self.store, above, batch_size)  # which of them is not known
        else:
            changed = changed[~above(changed)]
            below = changed_below(self.store, changed, above, batch_size, threshold)
        for rows in below:
            yield to_device(rows, self.device)

    # ---- changes ----

    def mark_changes(self) -> int:
        with self.levels.lock:
            return self._changes.mark(self.cache.mark_changes())

    def log_removals(self, limit: int | None = None) -> None:
        with self.levels.lock:
            limit = 2**20 if limit is None else check_integer("limit", limit, minimum=1)
            self.mark_changes()
            self._changes.log_removals(limit)
            self.store.log_drops()

    @property
    def logs_removals(self) -> bool:
        return self._changes.logs_removals

    def logged_removals(self, mark: int) -> tuple[int, torch.Tensor]:
        with self.levels.lock:
            known_since, ids = self._changes.removed_after(mark)
            return known_since, ids.to(self.device)

    # ---- writing ----

    def find_or_insert(
        self,
        ids: torch.Tensor,
        *,
        counts: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Inserted:
        """As :meth:`Table.find_or_insert`; nothing leaves the whole, so ``evicted`` is empty. Slots
        are those of the cache."""
        ids = self.check_ids("ids", ids)
        if counts is not None:
            counts = self.check_counts(counts, len(ids))
        with self.levels.lock:
            self.levels.prepare()
            fetched = self.levels.fetch(ids)
            self.levels.place(fetched)
            self.levels.misses += fetched.missing
            with self.levels.batch(fetched) as evicted:
                inserted = self.cache.find_or_insert(ids, counts=counts, return_evicted=True)
                assert inserted.evicted is not None
                evicted.append(inserted.evicted)
            refused = self.levels.refused
        slots = inserted.slots
        if len(refused):
            slots = slots.masked_fill(torch.isin(ids, refused), -1)
        self.check_failures(len(refused), len(ids))
        none = self.empty_rows(0) if return_evicted else None
        return replace(inserted, slots=slots, evicted=none)

    def insert(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Written:
        """As :meth:`Table.insert`. Whole rows (with state and scores) that are not in the cache go
        to the store directly. Nothing is counted if the store fails."""
        ids, embeddings, state, scores = self.check_whole_rows(ids, embeddings, state, scores)
        with self.levels.lock:
            if scores is None:
                written, failures = self._insert_scored(ids, embeddings, state)
            else:
                written, failures = self._insert_whole(ids, embeddings, state, scores)
        self.check_failures(failures, len(ids))
        return Written(written, self.empty_rows(0) if return_evicted else None)

    def _insert_whole(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        state: torch.Tensor | None,
        scores: torch.Tensor,
    ) -> tuple[torch.Tensor, int]:
        """(bool [n], which were written; how many distinct ids the store has no place for)."""
        if state is None:
            state = self._known_state(ids)
        return self.levels.insert(Rows(ids, embeddings, state, scores))

    def _insert_scored(
        self, ids: torch.Tensor, embeddings: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """As :meth:`_insert_whole`, with scores of the table's strategy: through the cache, a part
        at a time."""
        self.levels.prepare()
        held = self.levels.hold(ids)
        known = self.levels.fetch(ids)
        if known.rows is not None:
            held.keep(known.rows)  # what a part needs: the store may fail between them
        without = self.levels.without_place(known)
        written = ~torch.isin(ids, without)
        step = max(1, self.cache.capacity // 8)
        for part in written.nonzero().squeeze(1).split(step):
            fetched = self.levels.fetch(ids[part], held)
            self.levels.place(fetched)
            with self.levels.batch(fetched) as evicted:
                done = self.cache.insert(
                    ids[part],
                    embeddings[part],
                    state=None if state is None else state[part],
                    return_evicted=True,
                )
                assert done.evicted is not None
                evicted.append(done.evicted)
            written[part] = done.written
        self.levels.count_failures(len(without))
        return written, len(without)

    def _known_state(self, ids: torch.Tensor) -> torch.Tensor:
        """The state of rows that exist, the optimizer's initial state for the others."""
        found = self.find(ids)
        initial = self.optimizer.initial_state(self.dim).to(found.state)
        return torch.where(found.found[:, None], found.state, initial)

    def assign(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ids, embeddings, state, scores = self.check_whole_rows(ids, embeddings, state, scores)
        with self.levels.lock:
            here = self.levels.assign(ids, embeddings, state, scores)
            rest = (~here).nonzero().squeeze(1)
            if len(rest):
                found = self.find(ids[rest])
                there = found.found
                at = rest[there]
                self._below.insert(
                    Rows(
                        ids[at],
                        embeddings[at],
                        found.state[there] if state is None else state[at],
                        found.scores[there] if scores is None else scores[at],
                    )
                )
                here[at] = True
            if scores is not None:
                self.levels.continue_after(ids[here], scores[here])
            return here

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        with self.levels.lock:
            removed = self.levels.erase(ids)
            if self._changes.logs_removals:
                self._changes.removed(ids[removed].cpu())
            return removed

    def clear(self) -> None:
        with self.levels.lock:
            if self._changes.logs_removals:
                for rows in self.export():
                    self._changes.removed(rows.ids.cpu())
            self.levels.clear()

    def reserve(self, rows: int) -> None:
        """Nothing to do: the cache does not grow, and the store grows as rows come."""
        check_integer("rows", rows, minimum=0, maximum=2**63 - 1)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """As :meth:`Table.set_optimizer`; another size of state only while the store has no
        rows."""
        with self.levels.lock:
            checked = self.cache._checked_optimizer(optimizer)
            if checked.kind is not self.cache.optimizer.kind:
                if checked.state_dim(self.dim) == self.state_dim:
                    self._below.restart_state(checked.initial_state(self.dim))
                elif not self._below.empty:
                    raise UsageError(
                        f"the store of table {self.name!r} has rows with the state of "
                        f"{self.cache.optimizer.kind.name}; another kind of optimizer "
                        f"({checked.kind.name}) needs an empty store. Name the optimizer when the "
                        "module is made"
                    )
                else:
                    self.store.set_layout(self.options, checked)
                    if self.levels.room is not None:
                        self.levels.room.forget()
            self.cache.set_optimizer(optimizer)

    def make_group(self, tables: Sequence[Table]) -> TableGroup:
        from dynamicemb.tiers.cached_group import CachedTableGroup  # it imports this module

        return CachedTableGroup(tables)

    # ---- saving ----

    def write_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, state: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Insert saved rows; those that do not fit are counted, not reported."""
        ids, embeddings, known_state, known = self.check_whole_rows(ids, embeddings, state, scores)
        assert known is not None
        with self.levels.lock:
            self._insert_whole(ids, embeddings, known_state, known)

    def progress(self) -> Progress:
        progress, numbers = self.cache.progress(), self.levels.numbers
        return progress if numbers is None else replace(progress, next_row_number=numbers.next)

    def restore_progress(self, progress: Progress) -> None:
        self.cache.restore_progress(progress)
        if self.levels.numbers is not None:
            self.levels.numbers.next = progress.next_row_number

    def export_counter(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.cache.export_counter()

    def restore_counter(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        self.cache.restore_counter(ids, counts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling and copying carry the rows along, where they are in main memory."""
        if type(self.store) is not HostStore:
            raise UsageError(
                f"table {self.name!r} has a {type(self.store).__name__} below it and cannot be "
                "copied or pickled: two tables would share the store. Use state_dict, a checkpoint "
                "or a snapshot"
            )
        settings = {
            "cache_rows": self.cache.capacity,
            "make_store": self._make_store,
            "optimizer": self.optimizer,
            "name": self.name,
            "seed": self.seed,
            "clock": self._clock_function,
            "device": self.device,
        }
        return _restore_table, (self.options, settings, self.state_dict())


def _restore_table(
    options: DynamicEmbTableOptions,
    settings: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
) -> CachedTable:
    table = CachedTable(options, **settings)
    table.load_state_dict(state)
    table.reset_stats()
    return table
