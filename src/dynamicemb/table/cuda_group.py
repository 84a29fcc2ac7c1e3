"""Lookups and updates over several tables on one GPU, in one set of launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynamicemb.errors import UsageError
from dynamicemb.kernels import find, gradients, rows
from dynamicemb.kernels.gradients import HOT, SUM_BLOCK
from dynamicemb.kernels.launch import INTERPRETED, aligned, blocks, launch
from dynamicemb.kernels.layout import STEP_NAMES, STEP_NUMBERS
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbPoolingMode
from dynamicemb.table.base import (
    Bounds,
    Kept,
    Lookup,
    Pooling,
    Rows,
    SummedGradients,
    TableGroup,
    Written,
)
from dynamicemb.table.cuda_batch import (
    ELEMENTS,
    LANES,
    PERSISTENT,
    SLOT_GONE,
    SLOT_REJECTED,
    Batch,
)
from dynamicemb.table.cuda_layout import Layout, TableClass, to_device
from dynamicemb.table.numbers import NO_EVICTION_STRATEGY, TYPES

if TYPE_CHECKING:
    from dynamicemb.table.cuda import CudaTable

_L2, _DECOUPLED = 1, 2
#: Numbers of rows that one program updates: measured on an H200.
UPDATE_TILE = 256


@dataclass
class CudaLookup(Lookup):
    """A batch, and how often each table had changed when it was looked up."""

    batch: Batch
    changes: list[int]
    evicted: list[Rows] | None = None  # of each table
    features: dict[Any, Any] = field(default_factory=dict)


class CudaTableGroup(TableGroup):
    """See :class:`TableGroup`."""

    def __init__(self, tables: Sequence[CudaTable]) -> None:
        self.tables: Sequence[CudaTable] = list(tables)
        self.layout = Layout(self.tables)
        self.device = self.layout.device
        self._features: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_lock_order = sorted(self.tables, key=id)
        self._inside = 0  # the thread that holds the locks through this group

    @contextmanager
    def _entered(self) -> Iterator[Layout]:
        """The tables locked and in order with this stream, and their layout as it is now."""
        if self._inside == threading.get_ident():
            yield self.layout
            return
        with ExitStack() as stack:
            for table in self._in_lock_order:
                stack.enter_context(table.lock)
            self._inside = threading.get_ident()
            stack.callback(self._leave)
            if self.device.type == "cuda":
                if torch.cuda.current_device() != self.device.index:
                    stack.enter_context(torch.cuda.device(self.device))
                stream = torch._C._cuda_getCurrentRawStream(self.device.index)
                for table in self.tables:
                    if table.stream != stream:
                        table.enter()
            self.layout.refresh()
            yield self.layout

    def _leave(self) -> None:
        self._inside = 0

    def _bounds(self, bounds: Bounds | None) -> torch.Tensor | None:
        if len(self.tables) == 1 or bounds is None:
            return None
        if isinstance(bounds, torch.Tensor):
            return aligned(bounds)
        return to_device(torch.tensor(bounds, dtype=torch.int64, device="cpu"), self.device)

    # ---- reading ----

    def find_slots(self, ids: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
        """int32 [n]: the slot of each id in its table, or -1."""
        with self._entered() as layout:
            slots = torch.empty(len(ids), dtype=torch.int32, device=self.device)
            one_table = layout.tables == 1
            for one in layout.classes:
                if one.wide:
                    self._wide_slots(ids, bounds, one, slots)
                    continue
                launch(
                    find.lookup_kernel,
                    blocks(len(ids), LANES),
                    (
                        ids,
                        layout.meta if bounds is None else bounds,
                        len(ids),
                        layout.meta,
                        layout.tables,
                        one.number,
                        slots,
                    ),
                    (one.width, one.line, LANES, one_table, layout.one_class),
                    warps=1,
                    device=self.device,
                )
            return slots

    def _wide_slots(
        self, ids: torch.Tensor, bounds: torch.Tensor | None, one: TableClass, slots: torch.Tensor
    ) -> None:
        limits = [0, len(ids)] if bounds is None else bounds.tolist()
        for t in one.members:
            part = slice(limits[t], limits[t + 1])
            slots[part] = self.tables[t].wide_slots(ids[part])

    def gather(self, slots: torch.Tensor, out: torch.Tensor, *, missing: bool) -> None:
        """Rows of slots of the only table."""
        with self._entered() as layout:
            (one,) = layout.classes
            self._gather(
                layout, one, slots, None, None, out, TYPES[out.dtype], missing=missing, side=None
            )

    def find_rows(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Rows of ids of the only table, and which were there; no output dtype but the table's."""
        slots = self.find_slots(ids, None)
        self.gather(slots, out, missing=True)
        return slots

    def _gather(
        self,
        layout: Layout,
        one: TableClass,
        slots: torch.Tensor,
        entry_of: torch.Tensor | None,
        bounds: torch.Tensor | None,
        out: torch.Tensor,
        type_: int,
        *,
        missing: bool,
        side: torch.Tensor | None,
    ) -> None:
        count = len(out)
        block = max(1, (16384 if INTERPRETED else 2048) // one.columns)
        launch(
            rows.gather_kernel,
            blocks(count, block),
            (
                slots,
                slots if entry_of is None else entry_of,
                layout.meta if bounds is None else bounds,
                count,
                layout.meta,
                layout.floats,
                layout.tables,
                one.number,
                bits(out) if side is None else bits(side),
                bits(out),
                out.stride(0),
            ),
            (
                one.dim,
                one.columns,
                one.stride,
                one.type,
                type_,
                block,
                layout.tables == 1,
                layout.one_class,
                entry_of is not None,
                missing,
                side is not None,
            ),
            warps=1,
            device=self.device,
        )

    def _pool(
        self,
        layout: Layout,
        slots: torch.Tensor,
        entry_of: torch.Tensor | None,
        pooling: Pooling,
        out: torch.Tensor,
        count: int,
        *,
        missing: bool,
        sides: Mapping[tuple[int, int], torch.Tensor],
    ) -> None:
        tables, columns = self._feature_arrays(pooling.features)
        bags = len(tables) * pooling.batch_size
        assert pooling.offsets is not None
        for one in layout.classes:
            side = sides.get((one.dim, one.type))
            block = max(1, (4096 if INTERPRETED else 256) // one.columns)
            launch(
                rows.pool_kernel,
                blocks(bags, block),
                (
                    slots,
                    slots if entry_of is None else entry_of,
                    aligned(pooling.offsets),
                    tables,
                    columns,
                    out if pooling.weights is None else aligned(pooling.weights),
                    bags,
                    pooling.batch_size,
                    count,
                    layout.meta,
                    layout.floats,
                    layout.tables,
                    one.number,
                    bits(out) if side is None else bits(side),
                    bits(out),
                    out.stride(0),
                ),
                (
                    one.dim,
                    one.columns,
                    one.stride,
                    one.type,
                    TYPES[pooling.dtype],
                    block,
                    2 if INTERPRETED else 4,
                    layout.one_class,
                    entry_of is not None,
                    missing,
                    side is not None,
                    pooling.mode is DynamicEmbPoolingMode.MEAN,
                    pooling.weights is not None,
                ),
                warps=1,
                device=self.device,
            )

    def _feature_arrays(self, features: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Per feature: its table, and the column where its output starts (int32)."""
        if features not in self._features:
            tables, columns, column = [], [], 0
            for t, count in enumerate(features):
                for _ in range(count):
                    tables.append(t)
                    columns.append(column)
                    column += self.tables[t].dim
            self._features[features] = (
                to_device(torch.tensor(tables, dtype=torch.int32, device="cpu"), self.device),
                to_device(torch.tensor(columns, dtype=torch.int32, device="cpu"), self.device),
            )
        return self._features[features]

    def evaluate(
        self, ids: torch.Tensor, bounds: Bounds, pooling: Pooling, out: torch.Tensor
    ) -> None:
        ids = aligned(ids)
        limits = self._bounds(bounds)
        with self._entered() as layout:
            slots = self.find_slots(ids, limits)
            if pooling.pooled:
                self._pool(layout, slots, None, pooling, out, len(ids), missing=True, sides={})
                return
            for one in layout.classes:
                self._gather(
                    layout, one, slots, None, limits, out, TYPES[pooling.dtype],
                    missing=True, side=None,
                )  # fmt: skip

    # ---- training ----

    def find_or_insert(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
        keep_evicted: bool = False,
        check: bool = True,
    ) -> CudaLookup:
        scores = [table.batch_score() for table in self.tables]
        with self._entered():
            strict = [t for t in self.tables if check and not t.ignores_failures]
            before = [table.failures() for table in strict]
            batch, evicted = self.insert_batch(
                ids,
                bounds,
                scores,
                counts=counts,
                codes=None,
                train=True,
                keep_evicted=keep_evicted,
                protect=protect,
                admit=True,
            )
            batch.initialize(embeddings=True)
            self._number_rows(batch)
            for table in self.tables:
                table.advance_step()
            for table, failed in zip(strict, before, strict=True):
                table.report_failures(failed, batch.n)
            return CudaLookup(batch, [table.changes for table in self.tables], evicted)

    def _number_rows(self, batch: Batch) -> None:
        if batch.n:
            for one in batch.layout.classes:
                if one.strategy == NO_EVICTION_STRATEGY:
                    for t in one.members:
                        batch.number_rows(t)

    def insert_batch(
        self,
        ids: torch.Tensor,
        bounds: Bounds | None,
        scores: Sequence[tuple[int, int]],
        *,
        counts: torch.Tensor | None,
        codes: torch.Tensor | None,
        train: bool,
        keep_evicted: bool = False,
        protect: Sequence[Lookup] = (),
        admit: bool = False,
        distinct: bool = False,
    ) -> tuple[Batch, list[Rows] | None]:
        """The index's part of a batch: find, admit, grow, insert, evict. Rows of new entries are
        left to the caller; the rows that each table evicted are returned if they are kept.
        ``distinct``: no id occurs twice."""
        with self._entered() as layout:
            batch = Batch(layout, aligned(ids), self._bounds(bounds), distinct=distinct)
            if batch.n == 0:
                batch.slots = torch.empty(0, dtype=torch.int32, device=self.device)
                batch.fresh = torch.empty(0, dtype=torch.uint8, device=self.device)
                none = [table.empty_rows(0) for table in self.tables]
                return batch, none if keep_evicted else None
            totals = None if counts is None else batch.occurrences(aligned(counts))
            if admit and any(table.admit_strategy is not None for table in self.tables):
                if totals is None:
                    totals = batch.occurrences(None)
                codes = self._admit(batch, totals)
            self._grow(batch, codes)
            layout.refresh()
            layout.set_scores(scores)
            protected = [self._refreshed(one) for one in protect]
            for other in protected:
                other.mark(other.slots, on=True)
            batch.commit(
                codes=codes,
                counts=totals,
                train=train,
                scored=True,
                keep_evicted=keep_evicted,
            )
            for other in protected:
                other.mark(other.slots, on=False)
            for table in self.tables:
                table.changes += 1
                table.expect(batch.n)
            return batch, self._evicted(batch) if keep_evicted else None

    def _evicted(self, batch: Batch) -> list[Rows]:
        """The rows that a batch evicted, of each table, before they are overwritten."""
        used = int(batch.count)
        left = batch.fresh[:used] == 2
        evicted = []
        for t, table in enumerate(self.tables):
            own = left if batch.one else left & (batch.tables[:used] == t)
            entries = own.nonzero().squeeze(1)
            gone = table.rows_of(batch.slots[entries].to(torch.int64))
            gone.ids = batch.evicted_ids[entries]
            gone.scores = batch.evicted_scores[entries]
            if table.times is not None:
                gone.scores = torch.stack((batch.evicted_times[entries], gone.scores), dim=1)
            evicted.append(gone)
        return evicted

    def find_or_insert_keeping(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> Kept:
        with self._entered():
            before = [None if t.ignores_failures else t.failures() for t in self.tables]
            lookup = self.find_or_insert(
                ids, bounds, counts=counts, protect=protect, keep_evicted=True, check=False
            )
            assert lookup.evicted is not None
            return Kept(
                lookup,
                lookup.evicted,
                [
                    0 if failed is None else int(table.failures() - failed)
                    for table, failed in zip(self.tables, before, strict=True)
                ],
            )

    def bring_in(
        self, t: int, given: Rows, needed: torch.Tensor, protect: Sequence[Lookup]
    ) -> Written:
        with self._entered():
            near = self.tables[t].located(needed)
            protected = [near, *(self._refreshed(one) for one in protect)]
            for other in protected:
                other.mark(other.slots, on=True)
            written = self.tables[t].bring_in(given)
            for other in protected:
                other.mark(other.slots, on=False)
            return written

    def _admit(self, batch: Batch, totals: torch.Tensor) -> torch.Tensor:
        """Ask the tables' strategies about missing ids; returns the codes of the entries."""
        codes = batch.locate(None)
        used = int(batch.count)
        missing = codes[:used] == SLOT_GONE
        sides: dict[tuple[int, int], list[torch.Tensor]] = {}
        decided = torch.zeros(batch.n, dtype=torch.int32, device=self.device)
        for t, table in enumerate(self.tables):
            if table.admit_strategy is None:
                continue
            own = missing if batch.one else missing & (batch.tables[:used] == t)
            entries = own.nonzero().squeeze(1)
            if len(entries) == 0:
                continue
            mask, side = table.decide(batch.ids[entries], totals[entries])
            rejected = entries[~mask]
            alike = sides.setdefault((table.dim, TYPES[table.dtype]), [])
            first = sum(map(len, alike))
            numbers = torch.arange(first, first + len(rejected), device=self.device)
            decided[rejected] = SLOT_REJECTED - numbers.to(torch.int32)
            if side is not None:
                alike.append(side.contiguous())
        batch.sides = {shape: torch.cat(some) for shape, some in sides.items() if some}
        return decided

    def _grow(self, batch: Batch, codes: torch.Tensor | None) -> None:
        """Grow the tables that would pass their load factor. Waits for the device only where that
        cannot be ruled out otherwise."""
        asked = [t for t, table in enumerate(self.tables) if table.growth_possible(batch.n)]
        if not asked:
            return
        used = int(batch.count)
        missing = batch.locate(codes)[:used] == SLOT_GONE
        for t in asked:
            own = missing if batch.one else missing & (batch.tables[:used] == t)
            self.tables[t].grow_for(int(own.sum()))

    def _refreshed(self, lookup: Lookup) -> Batch:
        """The batch of a lookup with the slots as they are now."""
        assert isinstance(lookup, CudaLookup)
        changes = [table.changes for table in self.tables]
        if changes != lookup.changes and lookup.batch.n:
            lookup.batch.slots = lookup.batch.locate(lookup.batch.slots)
            lookup.changes = changes
        return lookup.batch

    def read(self, lookup: Lookup, pooling: Pooling, out: torch.Tensor) -> None:
        with self._entered() as layout:
            batch = self._refreshed(lookup)
            if batch.n == 0 and not pooling.pooled:
                return
            if pooling.pooled:
                self._pool(
                    layout, batch.slots, batch.entry_of, pooling, out, batch.n,
                    missing=False, sides=batch.sides,
                )  # fmt: skip
                return
            for one in layout.classes:
                self._gather(
                    layout, one, batch.slots, batch.entry_of, batch.bounds, out,
                    TYPES[pooling.dtype], missing=False, side=batch.side_of(one),
                )  # fmt: skip

    # ---- backward ----

    def update(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        self._start_update()
        with self._entered() as layout:
            batch = self._refreshed(lookup)
            self._update(layout, batch, pooling, gradient, clamp=True)

    def _start_update(self) -> None:
        for table in self.tables:
            if not table.options.training:
                raise UsageError(
                    f"table {table.name!r} has training=False in its options and cannot be updated"
                )
        for table in self.tables:
            table.iteration += 1

    def _update(
        self, layout: Layout, batch: Batch, pooling: Pooling, gradient: torch.Tensor, *, clamp: bool
    ) -> None:
        if batch.n == 0:
            return
        steps = self._steps(clamp)
        sums = _GradientSums(self, layout, batch, pooling, gradient, steps)
        for one in layout.classes:
            optimizer = self.tables[one.members[0]].optimizer
            flags = _flags(optimizer, clamp)
            hot = sums.hot(one, flags[-1])
            block = max(1, (4096 if INTERPRETED else UPDATE_TILE) // one.columns)
            launch(
                gradients.update_kernel,
                blocks(batch.n, block),
                (
                    batch.ids,
                    batch.tables,
                    batch.count,
                    batch.slots,
                    layout.meta,
                    layout.tables,
                    one.number,
                    steps,
                    *sums.arguments(hot),
                ),
                (
                    one.dim,
                    one.columns,
                    one.stride,
                    one.type,
                    one.state_stride,
                    *sums.constants,
                    one.kind,
                    *flags,
                    block,
                    2,
                    batch.one,
                    layout.one_class,
                    HOT,
                    SUM_BLOCK,
                ),
                warps=1,
                device=self.device,
            )

    def _steps(self, clamp: bool) -> torch.Tensor:
        """The numbers of every table's optimizer step, by their bits."""
        values = np.zeros((STEP_NUMBERS, len(self.tables)), dtype=np.int32)
        before = None
        for t, table in enumerate(self.tables):
            if before is None or (table.iteration, table.optimizer) != (
                before.iteration,
                before.optimizer,
            ):
                numbers = table.optimizer.numbers(max(table.iteration, 1))
                column = np.array([numbers[name] for name in STEP_NAMES], dtype=np.float32)
                values[:-1, t] = column.view(np.int32)
                values[-1, t] = numbers["step"]
            else:  # the tables of a module mostly agree
                values[:, t] = values[:, t - 1]
            before = table
        return to_device(torch.from_numpy(values), self.device)

    def weight_gradient(
        self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor
    ) -> torch.Tensor:
        with self._entered() as layout:
            batch = self._refreshed(lookup)
            out = torch.zeros(batch.n, dtype=torch.float32, device=self.device)
            if batch.n == 0:
                return out
            sums = _GradientSums(self, layout, batch, pooling, gradient, out)
            for one in layout.classes:
                side = batch.side_of(one)
                block = max(1, (4096 if INTERPRETED else 256) // one.columns)
                launch(
                    gradients.weight_gradient_kernel,
                    blocks(batch.n, block),
                    (
                        batch.slots,
                        batch.entry_of,
                        batch.bounds_or_any,
                        batch.n,
                        layout.meta,
                        layout.floats,
                        layout.tables,
                        one.number,
                        bits(gradient) if side is None else bits(side),
                        bits(sums.gradient),
                        sums.stride,
                        sums.bag_of,
                        sums.columns,
                        sums.batch_size,
                        sums.offsets,
                        out,
                    ),
                    (
                        one.dim,
                        one.columns,
                        one.stride,
                        one.type,
                        *sums.constants[:-1],
                        block,
                        batch.one,
                        layout.one_class,
                        side is not None,
                    ),
                    warps=1,
                    device=self.device,
                )
            return out

    def reduce(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> SummedGradients:
        assert isinstance(lookup, CudaLookup)
        with self._entered() as layout:
            batch = lookup.batch
            used = int(batch.count)
            there = (batch.slots[:used] >= 0) | (batch.slots[:used] == SLOT_GONE)
            summed: SummedGradients = [self._nothing(table) for table in self.tables]
            for one, sums in self._sums(layout, batch, pooling, gradient, clamp=True):
                for t in one.members:
                    own = there if batch.one else there & (batch.tables[:used] == t)
                    entries = own.nonzero().squeeze(1)
                    summed[t] = batch.ids[entries], sums[entries]
            return summed

    def _nothing(self, table: CudaTable) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.empty(0, dtype=torch.int64, device=self.device),
            torch.empty(0, table.dim, dtype=torch.float32, device=self.device),
        )

    def _sums(
        self, layout: Layout, batch: Batch, pooling: Pooling, gradient: torch.Tensor, *, clamp: bool
    ) -> Iterator[tuple[TableClass, torch.Tensor]]:
        """Per class: the summed gradient of every entry, float32."""
        if batch.n == 0:
            return
        steps = self._steps(clamp)
        sums = _GradientSums(self, layout, batch, pooling, gradient, steps)
        for one in layout.classes:
            clamps = _flags(self.tables[one.members[0]].optimizer, clamp)[-1]
            hot = sums.hot(one, clamps)
            out = torch.empty(batch.n, one.dim, dtype=torch.float32, device=self.device)
            block = max(1, (4096 if INTERPRETED else 256) // one.columns)
            launch(
                gradients.reduce_kernel,
                blocks(batch.n, block),
                (
                    batch.tables,
                    batch.count,
                    layout.meta,
                    layout.tables,
                    one.number,
                    steps,
                    *sums.arguments(hot),
                    out,
                ),
                (
                    one.dim,
                    one.columns,
                    *sums.constants,
                    clamps,
                    block,
                    2 if INTERPRETED else 4,
                    batch.one,
                    layout.one_class,
                    HOT,
                    SUM_BLOCK,
                ),
                warps=1,
                device=self.device,
            )
            yield one, out

    def merge(self, parts: Sequence[SummedGradients]) -> SummedGradients:
        merged: SummedGradients = []
        for t, table in enumerate(self.tables):
            ids = torch.cat([part[t][0] for part in parts])
            gradient = torch.cat([part[t][1] for part in parts])
            group = table.group
            with group._entered() as layout:
                batch = Batch(layout, ids, None)
                used = int(batch.count)
                merged.append(self._nothing(table))
                for _, sums in group._sums(layout, batch, _UNPOOLED, gradient, clamp=False):
                    merged[t] = batch.ids[:used], sums[:used]
        return merged

    def update_summed(self, gradients: SummedGradients) -> None:
        self._start_update()
        for table, (ids, gradient) in zip(self.tables, gradients, strict=True):
            group = table.group
            with group._entered() as layout:
                batch = Batch(layout, aligned(ids.contiguous()), None)
                if batch.n:
                    batch.slots = batch.locate(None)
                    group._update(layout, batch, _UNPOOLED, gradient.contiguous(), clamp=False)


_UNPOOLED = Pooling(DynamicEmbPoolingMode.NONE, torch.float32, (1,))


class _GradientSums:
    """What the kernels that sum gradients share: where the gradient of an occurrence is."""

    def __init__(
        self,
        group: CudaTableGroup,
        layout: Layout,
        batch: Batch,
        pooling: Pooling,
        gradient: torch.Tensor,
        steps: torch.Tensor,
    ) -> None:
        self.layout, self.batch, self.steps = layout, batch, steps
        self.gradient = aligned(gradient)
        self.stride = gradient.stride(0) if gradient.dim() > 1 else 0
        self.order, self.starts = batch.group()
        self.batch_size = max(pooling.batch_size, 1)
        self.bag_of = self.columns = self.offsets = self.order
        self.weights = self.order if pooling.weights is None else aligned(pooling.weights)
        self.constants = (
            TYPES[pooling.dtype],
            pooling.pooled,
            pooling.mode is DynamicEmbPoolingMode.MEAN,
            pooling.weights is not None,
        )
        if pooling.pooled:
            assert pooling.offsets is not None
            tables, self.columns = group._feature_arrays(pooling.features)
            self.offsets = aligned(pooling.offsets)
            self.bag_of = torch.empty(batch.n, dtype=torch.int32, device=batch.device)
            bags = len(tables) * pooling.batch_size
            launch(
                rows.bags_kernel,
                blocks(bags, ELEMENTS),
                (self.offsets, bags, batch.n, self.bag_of),
                (ELEMENTS,),
                warps=8,
                device=batch.device,
            )

    def _source(self) -> tuple[Any, ...]:
        return (
            self.order,
            bits(self.gradient),
            self.stride,
            self.bag_of,
            self.columns,
            self.batch_size,
            self.offsets,
            self.weights,
        )

    def arguments(self, hot: torch.Tensor) -> tuple[Any, ...]:
        """From ``starts`` to ``weights``, as the kernels take them."""
        base, _, _ = self.batch.hot()
        return (self.starts, base, hot, *self._source())

    def hot(self, one: TableClass, clamps: bool) -> torch.Tensor:
        """The sums of blocks of ids that occur very often."""
        batch, layout = self.batch, self.layout
        base, entry, work = batch.hot()
        if batch.n <= HOT:
            return self.steps
        sums = torch.empty(len(entry), one.columns, dtype=torch.float32, device=batch.device)
        block = max(1, (4096 if INTERPRETED else 128) // one.columns)
        launch(
            gradients.hot_sums_kernel,
            min(blocks(len(entry), block), PERSISTENT),
            (
                self.starts,
                base,
                entry,
                work,
                batch.tables,
                layout.meta,
                layout.tables,
                one.number,
                self.steps,
                *self._source(),
                sums,
            ),
            (
                one.dim,
                one.columns,
                *self.constants,
                clamps,
                block,
                2 if INTERPRETED else 12,
                batch.one,
                layout.one_class,
                SUM_BLOCK,
            ),
            warps=1,
            device=batch.device,
        )
        return sums


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16 as int16, as the kernels see it."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def _flags(optimizer: Optimizer, clamp: bool) -> tuple[bool, int, bool, bool, bool]:
    """(maximize, kind of weight decay, nesterov, stochastic rounding, clamped gradients)."""
    args = optimizer.args
    decay = 0
    if args.weight_decay != 0:
        decay = _DECOUPLED if optimizer.decoupled_weight_decay else _L2
    return (
        args.maximize,
        decay,
        args.nesterov,
        args.stochastic_rounding,
        clamp and args.gradient_clipping,
    )
