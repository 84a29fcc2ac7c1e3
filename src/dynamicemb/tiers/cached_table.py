"""A table that is a cache over a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynamicemb import _engine
from dynamicemb.errors import (
    InsertionError,
    InvalidArgumentError,
    StoreError,
    UsageError,
    check_integer,
    wrong_type,
)
from dynamicemb.optimizers import Optimizer, OptimizerKind
from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbTableOptions
from dynamicemb.table import content
from dynamicemb.table.base import (
    Found,
    Inserted,
    Progress,
    Rows,
    Table,
    TableGroup,
    TableStats,
    Written,
)
from dynamicemb.table.cpu import CpuTable
from dynamicemb.table.engine import INSERT, LOCATE, address, threads
from dynamicemb.tiers.base import Store
from dynamicemb.tiers.host import HostStore
from dynamicemb.tiers.merge import contains_below, export_below, fill_from, join


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


def _of_cache(name: str) -> Any:
    """An attribute that the cache has."""

    def read(self: CachedTable) -> Any:
        return getattr(self.cache, name)

    def write(self: CachedTable, value: Any) -> None:
        setattr(self.cache, name, value)

    return property(read, write)


class CachedTable(Table):
    """Rows in a store, those in use in a table in memory (``cache``) that never grows.

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
    #: ``state_dict`` of any size is taken.
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
    ) -> None:
        in_memory = replace(
            options,
            max_capacity=cache_rows,
            init_capacity=None,
            max_load_factor=0.0,
            caching=False,
            external_storage=None,
        )
        self.cache = CpuTable(in_memory, optimizer=optimizer, name=name, seed=seed, clock=clock)
        self.name = name
        self.options = replace(options, initializer_args=self.cache.options.initializer_args)
        self._make_store = make_store
        store = make_store(self.options, self.cache.optimizer)
        if not isinstance(store, Store):
            raise wrong_type("the result of external_storage", store, "a dynamicemb.tiers.Store")
        self.store: Store = store
        self.lock = threading.RLock()
        self.evictions = 0  # grows when a row leaves the cache
        self._only_cached: int | None = 0  # rows that the store does not have; None: not known
        self._unwritten: list[Rows] = []  # left the cache, and the store did not take them yet
        self._flushed_at: int | None = None  # a mark of the cache
        self._brought_up = self._written_back = self._cache_misses = 0
        self._ahead: list[ReadAhead] = []

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
        with self.lock:
            if self._only_cached is None or self._unwritten:
                self._drain()
                self._only_cached = sum(
                    int((~self.store.contains(rows.ids)).sum()) for rows in self.cache.export()
                )
            return self.store.size() + self._only_cached

    def stats(self) -> TableStats:
        with self.lock:
            of_cache = self.cache.stats()
            below = self.store.stats()
            lost = (below.details or {}).get("evictions", 0)
            size = self.size()
            return replace(
                of_cache,
                inserts=of_cache.inserts - self._brought_up,
                evictions=int(lost) if isinstance(lost, int) else 0,
                size=size,
                capacity=self.capacity,
                load_factor=size / self.capacity,
                bytes=of_cache.bytes + below.bytes_in_memory,
            )

    def cache_stats(self) -> CacheStats:
        with self.lock:
            stats = self.cache.stats()
            looked_up = stats.hits + stats.misses
            return CacheStats(
                hits=looked_up - self._cache_misses,
                misses=self._cache_misses,
                brought_up=self._brought_up,
                written_back=self._written_back,
                size=stats.size,
                capacity=stats.capacity,
                bytes=stats.bytes,
            )

    def reset_stats(self) -> None:
        with self.lock:
            self.cache.reset_stats()
            self._brought_up = self._written_back = self._cache_misses = 0

    # ---- between the cache and the store ----

    def bring_up(self, ids: torch.Tensor, protect: Sequence[Any] = ()) -> int:
        """Copy rows of ``ids`` that only the store has into the cache. Neither rows of ``ids`` nor
        of ``protect`` (engine batches) leave the cache for it. Returns how many distinct ids were
        not in the cache."""
        with self.lock:
            missing = torch.unique(ids[self.cache.find_slots(ids) < 0])
            if not len(missing):
                return 0
            self._drain()
            rows = self._from_store(missing)
            if not len(rows):
                return len(missing)
            written, evicted = self._insert(rows, ids, protect)
            self._brought_up += int(written.sum())
            self.write_back(evicted)
            if not bool(written.all()):
                raise UsageError(
                    f"{int((~written).sum())} of {len(rows)} rows of a batch of {len(ids)} ids "
                    f"find no place in the cache of table {self.name!r}, which has "
                    f"{self.cache.capacity} slots in buckets of {self.bucket_capacity}: the batch, "
                    "or the batches that wait for their backward, need more. Raise the memory "
                    "budget, or make the batches smaller"
                )
            return len(missing)

    def _from_store(self, ids: torch.Tensor) -> Rows:
        """The rows of distinct ids that the store has."""
        parts = []
        for ahead in self._ahead:
            rows, ids = ahead.take(ids)
            parts.append(rows)
        found = self.store.find(ids)
        there = found.found
        parts.append(
            Rows(ids[there], found.embeddings[there], found.state[there], found.scores[there])
        )
        return join(parts)

    def _insert(
        self, rows: Rows, needed: torch.Tensor, protect: Sequence[Any]
    ) -> tuple[torch.Tensor, Rows]:
        """Put rows into the cache; which found a place, and what had to leave for them."""
        engine = self.cache.engine
        batch = _engine.Batch(engine, INSERT, rows.ids.data_ptr(), len(rows), 0)
        batch.give(address(rows.embeddings), address(rows.state), address(rows.scores))
        batch.keep_evicted()
        located = _engine.Batch(engine, LOCATE, needed.data_ptr(), len(needed), 0)
        _engine.run_batches([located], [(0, 0)], threads())
        for other in (located, *protect):
            batch.protect(other)
        _engine.run_batches([batch], [(0, 0)], threads())
        written = torch.empty(len(rows), dtype=torch.bool)
        batch.written(written.data_ptr())
        return written, self.cache.evicted_of(batch)

    def write_back(self, rows: Rows) -> None:
        """Hand rows that left the cache to the store. What it does not take is kept and offered
        again by the next call that needs the store."""
        if not len(rows):
            return
        with self.lock:
            self.evictions += 1
            self._forget(rows.ids)
            self._unwritten.append(rows)
            self._drain()

    def _forget(self, ids: torch.Tensor) -> None:
        """The store's rows of these ids change: what was read ahead of them is not the truth."""
        for ahead in self._ahead:
            ahead.forget(ids)

    def _drain(self) -> None:
        while self._unwritten:
            rows = self._unwritten[0]
            only_cached, self._only_cached = self._only_cached, None
            try:
                new = self.store.insert_counting(rows)
            except StoreError as error:
                if error.kept:
                    del self._unwritten[0]
                raise
            if only_cached is not None and new is not None:
                self._only_cached = only_cached - new
            self._written_back += len(rows)
            del self._unwritten[0]

    def flush(self) -> None:
        """Write the rows of the cache that changed since the last flush to the store, and flush the
        store: then it holds everything."""
        with self.lock:
            self._drain()
            self._only_cached = None
            mark = self.cache.mark_changes()
            for rows in self.cache.export(changed_since=self._flushed_at):
                self._forget(rows.ids)
                self.store.insert(rows)
                self._written_back += len(rows)
            self._flushed_at = mark
            self._only_cached = 0
            self.store.flush()

    def drop_cache(self) -> None:
        """Flush, then empty the cache."""
        with self.lock:
            self.flush()
            self.cache.clear()
            self.evictions += 1

    # ---- snapshots ----

    def snapshot(self, name: str) -> None:
        """Keep the whole table of now under a name, in the store, if it has snapshots."""
        with self.lock:
            self.flush()
            self.store.snapshot(name, repr(self.progress()).encode())

    def load_snapshot(self, name: str) -> None:
        """Return to a snapshot: rows, scores, and the numbers that go on counting."""
        with self.lock:
            note = self.return_to(name)
            if note:
                self.restore_progress(_parse_progress(note))

    def return_to(self, name: str) -> bytes:
        """Return to the rows of a snapshot of the store; its note."""
        with self.lock:
            note = self.store.load_snapshot(name)
            self.cache.clear()
            self._unwritten.clear()
            self._only_cached = 0
            self._flushed_at = None
            self.evictions += 1
            for ahead in self._ahead:
                ahead.forget_all()
            return note

    # ---- reading ----

    def find(self, ids: torch.Tensor) -> Found:
        ids = self.check_ids("ids", ids)
        with self.lock:
            found = self.cache.find(ids)
            self._drain()
            fill_from(self.store, ids, found)
            return found

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """The slot in the cache, -1 where a row is not there; see :meth:`contains`."""
        return self.cache.find_slots(ids)

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        with self.lock:
            found = self.cache.contains(ids)
            self._drain()
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
        """The rows of the cache in slot order, then the others in the store's order."""
        if changed_since is not None:
            raise self._no_changes()
        batches = self.cache.export(batch_size=batch_size, score_threshold=score_threshold)
        return self._export(batches, batch_size, score_threshold)

    def _export(
        self, cached: Iterator[Rows], batch_size: int, threshold: int | None
    ) -> Iterator[Rows]:
        with self.lock:
            self._drain()
        yield from cached
        yield from export_below(self.store, self.cache.contains, batch_size, threshold)

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
        with self.lock:
            self._cache_misses += self.bring_up(ids)
            with self.counting_new():
                try:
                    inserted = self.cache.find_or_insert(ids, counts=counts, return_evicted=True)
                except InsertionError as error:
                    self.write_back(error.evicted)
                    error.evicted = None
                    raise
            assert inserted.evicted is not None
            self.write_back(inserted.evicted)
        return replace(inserted, evicted=self.empty_rows(0) if return_evicted else None)

    @contextmanager
    def counting_new(self) -> Iterator[None]:
        """Around a batch on the cache whose known rows were brought up: the rows it makes are new
        to the whole."""
        before = self.cache.stats().inserts
        yield
        if self._only_cached is not None:
            self._only_cached += self.cache.stats().inserts - before

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
        to the store directly."""
        ids, embeddings, state, scores = self.check_whole_rows(ids, embeddings, state, scores)
        none = self.empty_rows(0) if return_evicted else None
        with self.lock:
            if scores is not None:
                if state is None:
                    state = self._known_state(ids)
                here = self.cache.assign(ids, embeddings, state=state, scores=scores)
                below = ~here
                self._only_cached = None
                self._forget(ids)
                self._drain()
                self.store.insert(Rows(ids[below], embeddings[below], state[below], scores[below]))
                return Written(torch.ones(len(ids), dtype=torch.bool), none)
            # Scores come from the table's strategy: through the cache, a part at a time.
            written = []
            step = max(1, self.cache.capacity // 8)
            for begin in range(0, len(ids), step):
                part = slice(begin, begin + step)
                self.bring_up(ids[part])
                with self.counting_new():
                    done = self.cache.insert(
                        ids[part],
                        embeddings[part],
                        state=None if state is None else state[part],
                        return_evicted=True,
                    )
                assert done.evicted is not None
                self.write_back(done.evicted)
                written.append(done.written)
            return Written(torch.cat(written) if written else torch.empty(0).bool(), none)

    def _known_state(self, ids: torch.Tensor) -> torch.Tensor:
        """The state of rows that exist, the optimizer's initial state for the others."""
        found = self.find(ids)
        initial = self.optimizer.initial_state(self.dim)
        return torch.where(found.found[:, None], found.state, initial.to(torch.float32))

    def assign(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        with self.lock:
            here = self.cache.assign(ids, embeddings, state=state, scores=scores)
            if bool(here.all()):
                return here
            self._drain()
            rest = (~here).nonzero().squeeze(1)
            found = self.find(ids[rest])
            there = found.found
            at = rest[there]
            self.store.insert(
                Rows(
                    ids[at],
                    embeddings[at].detach(),
                    found.state[there] if state is None else state[at],
                    found.scores[there] if scores is None else scores[at].view(torch.int64),
                )
            )
            self._forget(ids)
            here[at] = True
            return here

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        with self.lock:
            self._drain()
            self._only_cached = None
            self._forget(ids)
            here = self.cache.erase(ids)
            return here | self.store.erase(ids)

    def clear(self) -> None:
        with self.lock:
            self.cache.clear()
            self.store.clear()
            self._unwritten.clear()
            for ahead in self._ahead:
                ahead.forget_all()
            self._only_cached = 0
            self._flushed_at = None
            self.evictions += 1

    def reserve(self, rows: int) -> None:
        """Nothing to do: the cache does not grow, and the store grows as rows come."""
        check_integer("rows", rows, minimum=0, maximum=2**63 - 1)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """As :meth:`Table.set_optimizer`; another kind only while the store has no rows."""
        with self.lock:
            checked = self.cache._checked_optimizer(optimizer)
            if checked.kind is not self.cache.optimizer.kind:
                if checked.state_dim(self.dim) == self.state_dim:
                    self._restart_state(checked)
                elif self.store.size() or self._unwritten or self.store.snapshots():
                    raise UsageError(
                        f"the store of table {self.name!r} has rows with the state of "
                        f"{self.cache.optimizer.kind.name}; another kind of optimizer "
                        f"({checked.kind.name}) needs an empty store. Name the optimizer when the "
                        "module is made"
                    )
                else:
                    self.store.set_layout(self.options, checked)
            self.cache.set_optimizer(optimizer)

    def _restart_state(self, optimizer: Optimizer) -> None:
        """The state of all rows below starts again, for an optimizer with as many numbers."""
        self._drain()
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(r.ids for r in self.store.export())])
        initial = optimizer.initial_state(self.dim)
        for part in ids.split(65536):
            found = self.store.find(part)
            state = initial.expand_as(found.state).contiguous()
            self.store.insert(Rows(part, found.embeddings, state, found.scores))
        self._forget(ids)

    def make_group(self, tables: Sequence[Table]) -> TableGroup:
        from dynamicemb.tiers.cached_group import CachedTableGroup  # it imports this module

        return CachedTableGroup(tables)

    # ---- saving ----

    def write_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, state: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Insert saved rows."""
        self.insert(ids, embeddings, state=state, scores=scores)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return content.save(self)

    def check_state_dict(self, state: Mapping[str, torch.Tensor], kind: OptimizerKind) -> None:
        content.check(self, state, kind)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> int:
        return content.load(self, state)

    def progress(self) -> Progress:
        return self.cache.progress()

    def restore_progress(self, progress: Progress) -> None:
        self.cache.restore_progress(progress)

    def export_counter(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.cache.export_counter()

    def restore_counter(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        self.cache.restore_counter(ids, counts)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            f"table {self.name!r} has a store below it and cannot be copied or pickled; use "
            "state_dict, or a checkpoint"
        )

    # ---- reading ahead ----

    def count_cache_misses(self, missing: int) -> None:
        """For :meth:`cache_stats`."""
        self._cache_misses += missing

    def read_ahead(self, ahead: ReadAhead) -> None:
        """Rows of a later batch are being read by another thread; they are used when they come
        up."""
        with self.lock:
            self._ahead.append(ahead)

    def end_read_ahead(self, ahead: ReadAhead) -> None:
        with self.lock:
            self._ahead.remove(ahead)


class ReadAhead:
    """Rows of a store that were read before they are needed, as long as they are the truth."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids  # distinct, ascending; those not in the cache at the time
        self._valid = torch.ones(len(ids), dtype=torch.bool)
        self._found: Found | None = None
        self._done = threading.Event()
        self._error: BaseException | None = None

    def read(self, store: Store) -> None:
        """In the background."""
        try:
            self._found = store.find(self.ids)
        except BaseException as error:
            self._error = error  # the batch will meet it again
        finally:
            self._done.set()

    def forget(self, ids: torch.Tensor) -> None:
        """The store's rows of these ids changed, or will."""
        self._valid &= ~torch.isin(self.ids, ids)

    def forget_all(self) -> None:
        self._valid.zero_()

    def take(self, ids: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        """(rows of ``ids`` that were read and found, the ids about which nothing is known)."""
        self._done.wait()
        empty = torch.empty(0, dtype=torch.int64)
        if self._found is None or not len(self.ids):
            return Rows(empty, torch.empty(0), torch.empty(0), empty), ids
        at = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        known = (self.ids[at] == ids) & self._valid[at]
        rows = at[known & self._found.found[at]]
        found = self._found
        return (
            Rows(self.ids[rows], found.embeddings[rows], found.state[rows], found.scores[rows]),
            ids[~known],
        )


def _parse_progress(note: bytes) -> Progress:
    import ast

    try:
        call = ast.parse(note.decode(), mode="eval").body
        assert isinstance(call, ast.Call)
        return Progress(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
    except (SyntaxError, ValueError, AssertionError, TypeError) as error:
        raise InvalidArgumentError(f"the note of the snapshot is no progress: {note!r}") from error
