"""Tables in main memory, on the C++ engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dynamicemb.admission import admission_mask
from dynamicemb.errors import OutOfMemoryError, check_integer
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
)
from dynamicemb.table.base import Table
from dynamicemb.table.counter import IdCounter
from dynamicemb.table.cpu_group import CpuTableGroup
from dynamicemb.table.device_table import DeviceTable
from dynamicemb.table.engine import (
    ASSIGN,
    INSERT,
    _engine,
    address,
    engine_initializer,
    threads,
)
from dynamicemb.table.numbers import TYPES, state_layout, strategy_number
from dynamicemb.table.rows import (
    Found,
    Inserted,
    Pooling,
    Rows,
    TableStats,
    Written,
)

_CPU = torch.device("cpu")


class CpuTable(DeviceTable):
    """A table in main memory. See :class:`Table`."""

    can_expire = True

    def __init__(
        self,
        options: DynamicEmbTableOptions,
        *,
        optimizer: Optimizer | None = None,
        name: str = "table",
        seed: int | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(options, optimizer=optimizer, name=name, seed=seed, clock=clock)
        options = self.options
        self._width, start, maximum = self.bucket_layout_of(options)
        self.max_slots = self._width * maximum
        columns, scalar, initial = state_layout(self.optimizer, self.dim)
        try:
            self.engine = _engine.Table(
                dim=self.dim,
                type=TYPES[self.dtype],
                init_buckets=start,
                max_buckets=maximum,
                width=self._width,
                max_load_factor=options.max_load_factor,
                strategy=strategy_number(options),
                initializer=engine_initializer(options.initializer_args, self.seed),
                missing_value=options.eval_initializer_args.value,
                state_columns=columns,
                state_scalar=scalar,
                initial_state=initial,
            )
        except MemoryError as error:
            raise OutOfMemoryError(f"table {name!r}: {error}") from error
        self.admit_strategy = None
        self.counter: IdCounter | None = None
        if options.admit_strategy is not None:
            self.admit_strategy = options.admit_strategy.per_table()
        self._rejected_initializer = self._initializer_of_rejected()
        if options.admission_counter is not None:
            config = options.admission_counter
            self.counter = IdCounter(config.capacity, config.bucket_capacity)

    @property
    def device(self) -> torch.device:
        return _CPU

    @property
    def capacity(self) -> int:
        return self.engine.capacity

    @property
    def next_row_number(self) -> int:
        return self.engine.next_row_number

    @next_row_number.setter
    def next_row_number(self, number: int) -> None:
        self.engine.next_row_number = number

    def size(self) -> int:
        return self.engine.size

    def stats(self) -> TableStats:
        size, capacity = self.engine.size, self.engine.capacity
        used = self.engine.bytes + (self.counter.table.bytes if self.counter else 0)
        counters = self.engine.counters()
        return TableStats(
            hits=counters[0],
            misses=counters[1],
            inserts=counters[2],
            evictions=counters[3],
            failures=counters[4],
            rejections=counters[5],
            dropped_gradients=counters[6],
            size=size,
            capacity=capacity,
            load_factor=size / capacity,
            bytes=used,
        )

    def reset_stats(self) -> None:
        self.engine.reset_counters()

    # ---- reading ----

    def find(self, ids: torch.Tensor) -> Found:
        ids = self.check_ids("ids", ids)
        found = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        rows = self.empty_rows(len(ids))
        self.engine.read(
            ids.data_ptr(),
            len(ids),
            threads(),
            found.data_ptr(),
            rows.embeddings.data_ptr(),
            rows.state.data_ptr(),
            rows.scores.data_ptr(),
        )
        return Found(found, rows.embeddings, rows.state, rows.scores)

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        slots = torch.empty(len(ids), dtype=torch.int64, device="cpu")
        self.engine.find(ids.data_ptr(), len(ids), threads(), slots.data_ptr())
        return slots

    def initial_rows(
        self, ids: torch.Tensor, args: DynamicEmbInitializerArgs | None = None
    ) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        rows = torch.empty(len(ids), self.dim, dtype=torch.float32, device="cpu")
        initializer = engine_initializer(args or self.options.initializer_args, self.seed)
        _engine.initialize_rows(initializer, ids.data_ptr(), len(ids), self.dim, rows.data_ptr())
        return rows.to(self.dtype)

    def _export(
        self, batch_size: int, threshold: int | None, changed_since: int | None
    ) -> Iterator[Rows]:
        if changed_since is None and threshold is None:
            threshold = 0
        cursor = 0
        while True:
            rows = self.empty_rows(min(batch_size, self.engine.size))
            count, cursor = self.engine.export_rows(
                cursor,
                len(rows),
                threshold,
                changed_since,
                threads(),
                rows.ids.data_ptr(),
                rows.embeddings.data_ptr(),
                rows.state.data_ptr(),
                rows.scores.data_ptr(),
            )
            if count == 0:
                return
            yield Rows(
                rows.ids[:count], rows.embeddings[:count], rows.state[:count], rows.scores[:count]
            )

    # ---- changes ----

    def mark_changes(self) -> int:
        return self.engine.mark_changes()

    def log_removals(self, limit: int | None = None) -> None:
        self.engine.log_removals(self.removal_limit(limit))

    @property
    def logs_removals(self) -> bool:
        return self.engine.logs_removals

    def logged_removals(self, mark: int) -> tuple[int, torch.Tensor]:
        ids = _engine.removed_since(self.engine, mark)
        known_since = self.engine.removals_known_since  # read after: it only grows
        if not ids:
            return known_since, torch.empty(0, dtype=torch.int64, device="cpu")
        return known_since, torch.frombuffer(bytearray(ids), dtype=torch.int64)

    # ---- writing ----

    def find_or_insert(
        self,
        ids: torch.Tensor,
        *,
        counts: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Inserted:
        ids = self.check_ids("ids", ids)
        if counts is not None:
            counts = self.check_counts(counts, len(ids))
        group = CpuTableGroup([self])
        lookup = group.find_or_insert(
            ids, (0, len(ids)), counts=counts, keep_evicted=return_evicted, check=False
        )
        batch = lookup.batches[0]
        embeddings = torch.empty(len(ids), self.dim, dtype=self.dtype, device="cpu")
        pooling = Pooling(DynamicEmbPoolingMode.NONE, self.dtype, (1,))
        group.read(lookup, pooling, embeddings)
        slots = torch.empty(len(ids), dtype=torch.int64, device="cpu")
        batch.slots(slots.data_ptr())
        evicted = self.evicted_of(batch) if return_evicted else None
        self.check_failures(batch.failures, batch.size, evicted)
        return Inserted(embeddings, slots, evicted)

    def insert(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Written:
        batch = self._write(INSERT, ids, embeddings, state, scores, return_evicted)
        evicted = self.evicted_of(batch) if return_evicted else None
        self.check_failures(batch.failures, batch.size, evicted)
        return Written(self._written(batch), evicted)

    def assign(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._written(self._write(ASSIGN, ids, embeddings, state, scores, False))

    def _write(
        self,
        mode: int,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        state: torch.Tensor | None,
        scores: torch.Tensor | None,
        keep_evicted: bool,
    ) -> Any:
        ids, embeddings, state, scores = self.check_whole_rows(ids, embeddings, state, scores)
        batch = _engine.Batch(self.engine, mode, ids.data_ptr(), len(ids), 0)
        batch.give(address(embeddings), address(state), address(scores))
        if keep_evicted:
            batch.keep_evicted()
        score = (0, 0) if scores is not None or mode == ASSIGN else self.batch_score()
        try:
            _engine.run_batches([batch], [score], threads())
        except MemoryError as error:
            raise OutOfMemoryError(f"table {self.name!r}: {error}") from error
        return batch

    def _written(self, batch: Any) -> torch.Tensor:
        written = torch.empty(batch.size, dtype=torch.bool, device="cpu")
        batch.written(written.data_ptr())
        return written

    def evicted_of(self, batch: Any) -> Rows:
        """The rows that an engine batch evicted."""
        rows = self.empty_rows(batch.evicted_count)
        batch.evicted(
            rows.ids.data_ptr(),
            rows.embeddings.data_ptr(),
            rows.state.data_ptr(),
            rows.scores.data_ptr(),
        )
        return rows

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        removed = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        self.engine.erase(ids.data_ptr(), len(ids), threads(), removed.data_ptr())
        return removed

    def expire(self, before: int, *, slots: int) -> int:
        before = check_integer("before", before, minimum=0, maximum=2**64 - 1)
        slots = check_integer("slots", slots, minimum=1)
        return self.engine.expire(before, slots)

    def clear(self) -> None:
        self.engine.clear()

    def undo_point(self) -> Callable[[], None] | None:
        if self.size() or self.logs_removals:  # the log would have to forget what came after
            return None
        before, optimizer, progress = self.engine.when_empty(), self.optimizer, self.progress()

        def undo() -> None:
            self.engine.make_empty(before)
            self.set_optimizer(optimizer)
            self.restore_progress(progress)

        return undo

    def reserve(self, rows: int) -> None:
        rows = check_integer("rows", rows, minimum=0, maximum=2**63 - 1)
        try:
            self.engine.reserve(rows)
        except MemoryError as error:
            raise OutOfMemoryError(f"table {self.name!r}: {error}") from error

    def set_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = self._checked_optimizer(optimizer)
        columns, scalar, initial = state_layout(optimizer, self.dim)
        if optimizer.kind is not self._optimizer.kind:
            try:
                self.engine.set_state_layout(columns, scalar, initial)
            except MemoryError as error:
                raise OutOfMemoryError(f"table {self.name!r}: {error}") from error
            self.iteration = 0
        elif optimizer.state_initial_value() != self._optimizer.state_initial_value():
            self.engine.set_initial_state(initial)
        self._optimizer = optimizer

    def set_seed(self, seed: int) -> None:
        """New rows follow another seed."""
        self.seed = seed
        self.engine.set_initializer(engine_initializer(self.options.initializer_args, seed))
        self._rejected_initializer = self._initializer_of_rejected()

    def _initializer_of_rejected(self) -> Any:
        strategy = self.admit_strategy
        args = None if strategy is None else strategy.initializer_args
        return engine_initializer(args or self.options.initializer_args, self.seed)

    def make_group(self, tables: Sequence[Table]) -> CpuTableGroup:
        return CpuTableGroup([table for table in tables if isinstance(table, CpuTable)])

    # ---- saving ----

    def write_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, state: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Insert saved rows; those that do not fit are counted, not reported."""
        self._write(INSERT, ids, embeddings, state, scores, False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling and copying carry the rows along."""
        settings = (self.options, self.optimizer, self.name, self.seed, self._clock_function)
        return _restore_table, (*settings, self.state_dict())

    # ---- admission ----

    def decide(self, batch: Any) -> None:
        """Ask the admission strategy and the limit about the missing ids of a batch."""
        if not self.decides:
            return
        count = batch.collect_missing()
        if count == 0:
            return
        ids = torch.empty(count, dtype=torch.int64, device="cpu")
        counts = torch.empty(count, dtype=torch.int64, device="cpu")
        batch.missing(ids.data_ptr(), counts.data_ptr())
        mask = torch.ones(count, dtype=torch.bool, device="cpu")
        rows = None
        strategy = self.admit_strategy
        if strategy is not None:
            frequencies = counts
            if self.counter is not None:
                frequencies = counts + self.counter.counts(ids)
            mask = admission_mask(strategy, ids, frequencies)
            if strategy.writes_rejected_rows:
                rejected = count - int(mask.sum())
                rows = torch.zeros(rejected, self.dim, dtype=torch.float32, device="cpu")
                places = torch.arange(rejected, device="cpu")
                strategy.initialize_non_admitted_embeddings(rows, places)
        refused = self._refused(ids, mask)
        if refused is not None:
            rows = self._rows_of_rejected(ids, mask, refused, rows)
            mask = mask & ~refused
        mask = mask.contiguous()
        batch.admit(mask.data_ptr(), self._rejected_initializer, address(rows))
        if self.counter is not None:  # after the strategy, which may have raised
            self.counter.add(ids, counts)

    def _rows_of_rejected(
        self,
        ids: torch.Tensor,
        admitted: torch.Tensor,
        refused: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """float32, what the ids without a row read: 0.0 where they are ``refused``, else ``rows``,
        or what the initialiser of rejected ids says."""
        if rows is None:
            rejected = ids[~admitted]
            rows = torch.empty(len(rejected), self.dim, dtype=torch.float32, device="cpu")
            _engine.initialize_rows(
                self._rejected_initializer,
                rejected.data_ptr(),
                len(rejected),
                self.dim,
                rows.data_ptr(),
            )
        without = ~admitted | refused
        every = torch.zeros(int(without.sum()), self.dim, dtype=torch.float32, device="cpu")
        every[~admitted[without]] = rows
        return every


def _restore_table(
    options: DynamicEmbTableOptions,
    optimizer: Optimizer,
    name: str,
    seed: int,
    clock: Callable[[], int],
    state: Mapping[str, torch.Tensor],
) -> CpuTable:
    table = CpuTable(options, optimizer=optimizer, name=name, seed=seed, clock=clock)
    table.load_state_dict(state)
    table.reset_stats()
    return table
