"""Tables in main memory, on the C++ engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynamicemb.admission import ProbabilityAdmissionStrategy, admission_mask
from dynamicemb.errors import OutOfMemoryError, UsageError, check_integer
from dynamicemb.optimizers import Optimizer, OptimizerKind
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
)
from dynamicemb.table import content
from dynamicemb.table.base import (
    Bounds,
    Found,
    Inserted,
    Kept,
    Lookup,
    Pooling,
    Progress,
    Rows,
    SummedGradients,
    Table,
    TableGroup,
    TableStats,
    Written,
)
from dynamicemb.table.counter import IdCounter
from dynamicemb.table.engine import (
    ASSIGN,
    INSERT,
    LOCATE,
    TRAIN,
    _engine,
    address,
    engine_initializer,
    threads,
)
from dynamicemb.table.numbers import TYPES, state_layout, strategy_number

_CPU = torch.device("cpu")


class CpuTable(Table):
    """A table in main memory. See :class:`Table`."""

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
            self._rejected_initializer = engine_initializer(
                self.admit_strategy.initializer_args or options.initializer_args, self.seed
            )
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
    def bucket_capacity(self) -> int:
        return self._width

    def export_buckets(self) -> int:
        return self.capacity // self._width

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

    def export(
        self,
        *,
        batch_size: int = 65536,
        score_threshold: int | None = None,
        changed_since: int | None = None,
    ) -> Iterator[Rows]:
        batch_size = check_integer("batch_size", batch_size, minimum=1)
        threshold = None if changed_since is not None else 0
        if score_threshold is not None:
            threshold = check_integer(
                "score_threshold", score_threshold, minimum=0, maximum=2**64 - 1
            )
        if changed_since is not None:
            changed_since = check_integer(
                "changed_since", changed_since, minimum=1, maximum=2**64 - 1
            )
        return self._export(batch_size, threshold, changed_since)

    def _export(
        self, batch_size: int, threshold: int | None, changed_since: int | None
    ) -> Iterator[Rows]:
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
        if limit is None:
            limit = max(2**20, 2 * self.max_slots)
        self.engine.log_removals(check_integer("limit", limit, minimum=1, maximum=2**40))

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
        if optimizer.kind is not self._optimizer.kind:
            try:
                self.engine.set_state_layout(*state_layout(optimizer, self.dim))
            except MemoryError as error:
                raise OutOfMemoryError(f"table {self.name!r}: {error}") from error
            self.iteration = 0
        self._optimizer = optimizer

    def set_seed(self, seed: int) -> None:
        """New rows follow another seed."""
        self.seed = seed
        self.engine.set_initializer(engine_initializer(self.options.initializer_args, seed))
        if self.admit_strategy is not None:
            self._rejected_initializer = engine_initializer(
                self.admit_strategy.initializer_args or self.options.initializer_args, seed
            )

    def make_group(self, tables: Sequence[Table]) -> CpuTableGroup:
        return CpuTableGroup([table for table in tables if isinstance(table, CpuTable)])

    # ---- saving ----

    def state_dict(self) -> dict[str, torch.Tensor]:
        return content.save(self)

    def check_state_dict(self, state: Mapping[str, torch.Tensor], kind: OptimizerKind) -> None:
        content.check(self, state, kind)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> int:
        return content.load(self, state)

    def progress(self) -> Progress:
        strategy = self.admit_strategy
        counted = isinstance(strategy, ProbabilityAdmissionStrategy)
        return Progress(
            step=self.step,
            custom_score=self.custom_score,
            iteration=self.iteration,
            next_row_number=self.engine.next_row_number,
            admission_calls=strategy.calls if counted else 0,  # type: ignore[union-attr]
            seed=self.seed,
        )

    def restore_progress(self, progress: Progress) -> None:
        self.restore_scores(step=progress.step, custom_score=progress.custom_score)
        self.iteration = progress.iteration
        self.engine.next_row_number = progress.next_row_number
        self.set_seed(progress.seed)
        if isinstance(self.admit_strategy, ProbabilityAdmissionStrategy):
            self.admit_strategy.calls = progress.admission_calls

    def export_counter(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.counter is None else self.counter.export()

    def restore_counter(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        ids = self.check_ids("ids", ids)
        counts = self.check_counts(counts, len(ids))
        if self.counter is not None:
            self.counter.restore(ids, counts)

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
        """Ask the admission strategy about the missing ids of a batch."""
        strategy = self.admit_strategy
        if strategy is None:
            return
        count = batch.collect_missing()
        if count == 0:
            return
        ids = torch.empty(count, dtype=torch.int64, device="cpu")
        counts = torch.empty(count, dtype=torch.int64, device="cpu")
        batch.missing(ids.data_ptr(), counts.data_ptr())
        frequencies = counts
        if self.counter is not None:
            frequencies = counts + self.counter.counts(ids)
        mask = admission_mask(strategy, ids, frequencies)
        mask = mask.contiguous()
        rows = None
        if strategy.writes_rejected_rows:
            rejected = count - int(mask.sum())
            rows = torch.zeros(rejected, self.dim, dtype=torch.float32, device="cpu")
            strategy.initialize_non_admitted_embeddings(rows, torch.arange(rejected, device="cpu"))
        batch.admit(mask.data_ptr(), self._rejected_initializer, address(rows))
        if self.counter is not None:  # after the strategy, which may have raised
            self.counter.add(ids, counts)


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


@dataclass
class CpuLookup(Lookup):
    """One engine batch per table, over ids that are kept alive while they are needed."""

    batches: list[Any]
    bounds: tuple[int, ...]


class CpuTableGroup(TableGroup):
    """See :class:`TableGroup`."""

    def __init__(self, tables: Sequence[CpuTable]) -> None:
        self.tables: Sequence[CpuTable] = list(tables)

    def evaluate(
        self, ids: torch.Tensor, bounds: Bounds, pooling: Pooling, out: torch.Tensor
    ) -> None:
        assert not isinstance(bounds, torch.Tensor)
        segments = self._segments([None] * len(self.tables), bounds, pooling)
        layout = self._pooling(pooling, out)
        _engine.evaluate(segments, ids.data_ptr(), layout, out.data_ptr(), threads())

    def find_or_insert(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
        keep_evicted: bool = False,
        check: bool = True,
    ) -> CpuLookup:
        assert not isinstance(bounds, torch.Tensor)
        scores = [table.batch_score() for table in self.tables]
        batches = []
        for t, table in enumerate(self.tables):
            begin, end = bounds[t], bounds[t + 1]
            offset = 8 * begin
            batch = _engine.Batch(
                table.engine,
                TRAIN,
                ids.data_ptr() + offset,
                end - begin,
                0 if counts is None else counts.data_ptr() + offset,
            )
            for other in protect:
                assert isinstance(other, CpuLookup)
                batch.protect(other.batches[t])
            if keep_evicted:
                batch.keep_evicted()
            batches.append(batch)
        try:
            if any(table.admit_strategy is not None for table in self.tables):
                _engine.find_batches(batches, threads())
                for table, batch in zip(self.tables, batches, strict=True):
                    table.decide(batch)
                _engine.commit_batches(batches, scores, threads())
            else:
                _engine.run_batches(batches, scores, threads())
        except MemoryError as error:
            raise OutOfMemoryError(f"tables {[t.name for t in self.tables]}: {error}") from error
        for table in self.tables:
            table.advance_step()
        if check:
            for table, batch in zip(self.tables, batches, strict=True):
                table.check_failures(batch.failures, batch.size)
        return CpuLookup(batches, tuple(bounds))

    def find_or_insert_keeping(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> Kept:
        lookup = self.find_or_insert(
            ids, bounds, counts=counts, protect=protect, keep_evicted=True, check=False
        )
        return Kept(
            lookup,
            [table.evicted_of(b) for table, b in zip(self.tables, lookup.batches, strict=True)],
            [batch.failures for batch in lookup.batches],
        )

    def bring_in(
        self, t: int, given: Rows, needed: torch.Tensor, protect: Sequence[Lookup]
    ) -> Written:
        table = self.tables[t]
        batch = _engine.Batch(table.engine, INSERT, given.ids.data_ptr(), len(given), 0)
        batch.give(address(given.embeddings), address(given.state), address(given.scores))
        batch.keep_evicted()
        located = _engine.Batch(table.engine, LOCATE, needed.data_ptr(), len(needed), 0)
        _engine.run_batches([located], [(0, 0)], threads())
        batch.protect(located)
        for other in protect:
            assert isinstance(other, CpuLookup)
            batch.protect(other.batches[t])
        _engine.run_batches([batch], [(0, 0)], threads())
        return Written(table._written(batch), table.evicted_of(batch))

    def read(self, lookup: Lookup, pooling: Pooling, out: torch.Tensor) -> None:
        segments = self._lookup_segments(lookup, pooling)
        _engine.read(segments, self._pooling(pooling, out), out.data_ptr(), threads())

    def update(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        segments = self._lookup_segments(lookup, pooling)
        layout = self._pooling(pooling, gradient)
        _engine.update(segments, layout, gradient.data_ptr(), self._steps(), threads())

    def weight_gradient(
        self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor
    ) -> torch.Tensor:
        segments = self._lookup_segments(lookup, pooling)
        assert isinstance(lookup, CpuLookup)
        out = torch.zeros(lookup.bounds[-1], dtype=torch.float32, device="cpu")
        layout = self._pooling(pooling, gradient)
        _engine.weight_gradient(segments, layout, gradient.data_ptr(), out.data_ptr(), threads())
        return out

    def reduce(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> SummedGradients:
        assert isinstance(lookup, CpuLookup)
        segments = self._lookup_segments(lookup, pooling)
        layout = self._pooling(pooling, gradient)
        return [
            self._sums(table, segment, layout, gradient, lookup.bounds[t + 1] - lookup.bounds[t])
            for t, (table, segment) in enumerate(zip(self.tables, segments, strict=True))
        ]

    def merge(self, parts: Sequence[SummedGradients]) -> SummedGradients:
        merged = []
        for t, table in enumerate(self.tables):
            ids = torch.cat([part[t][0] for part in parts])
            gradient = torch.cat([part[t][1] for part in parts])
            segment, layout = self._located(table, ids, gradient)
            merged.append(self._sums(table, segment, layout, gradient, len(ids), clamp=False))
        return merged

    def update_summed(self, gradients: SummedGradients) -> None:
        self._steps()
        for table, (ids, gradient) in zip(self.tables, gradients, strict=True):
            segment, layout = self._located(table, ids, gradient)
            step = _engine_step(table, clamp=False)
            _engine.update([segment], layout, gradient.data_ptr(), [step], threads())

    def _sums(
        self,
        table: CpuTable,
        segment: Any,
        layout: Any,
        gradient: torch.Tensor,
        n: int,
        *,
        clamp: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty(n, dtype=torch.int64, device="cpu")
        sums = torch.empty(n, table.dim, dtype=torch.float32, device="cpu")
        limit = table.optimizer.numbers(1)["max_gradient"] if clamp else 0.0
        count = _engine.reduce(
            segment,
            layout,
            gradient.data_ptr(),
            limit,
            threads(),
            ids.data_ptr(),
            sums.data_ptr(),
        )
        return ids[:count], sums[:count]

    def _located(
        self, table: CpuTable, ids: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[Any, Any]:
        """A segment over given ids, with one gradient row each."""
        batch = _engine.Batch(table.engine, LOCATE, ids.data_ptr(), len(ids), 0)
        _engine.run_batches([batch], [(0, 0)], threads())
        layout = self._pooling(Pooling(DynamicEmbPoolingMode.NONE, torch.float32, (1,)), gradient)
        return _engine.Segment(table.engine, batch, 0, len(ids), 0, 1, 0), layout

    def _steps(self) -> list[Any]:
        """The next optimizer step of every table."""
        for table in self.tables:
            if not table.options.training:
                raise UsageError(
                    f"table {table.name!r} has training=False in its options and cannot be updated"
                )
            table.iteration += 1
        return [_engine_step(table) for table in self.tables]

    def _lookup_segments(self, lookup: Lookup, pooling: Pooling) -> list[Any]:
        assert isinstance(lookup, CpuLookup)
        return self._segments(lookup.batches, lookup.bounds, pooling)

    def _segments(
        self, batches: Sequence[Any], bounds: Sequence[int], pooling: Pooling
    ) -> list[Any]:
        segments = []
        feature = column = 0
        for t, table in enumerate(self.tables):
            features = pooling.features[t]
            begin, end = bounds[t], bounds[t + 1]
            segments.append(
                _engine.Segment(
                    table.engine, batches[t], begin, end - begin, feature, features, column
                )
            )
            feature += features
            column += features * table.dim
        return segments

    def _pooling(self, pooling: Pooling, output: torch.Tensor) -> Any:
        return _engine.Pooling(
            pooled=pooling.pooled,
            mean=pooling.mode is DynamicEmbPoolingMode.MEAN,
            batch_size=pooling.batch_size,
            offsets=address(pooling.offsets),
            weights=address(pooling.weights),
            type=TYPES[pooling.dtype],
            stride=output.shape[1],
        )


def _engine_step(table: CpuTable, *, clamp: bool = True) -> Any:
    """The engine's numbers for the update that ``table.iteration`` counts."""
    numbers = table.optimizer.numbers(table.iteration)
    if not clamp:
        numbers["max_gradient"] = 0.0  # the summands were clamped already
    return _engine.OptimizerStep(**numbers, rounding_seed=table.seed)
