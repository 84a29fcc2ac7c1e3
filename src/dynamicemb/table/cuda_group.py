"""Lookups and updates over several tables on one GPU, in one set of launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dynamicemb.errors import UsageError
from dynamicemb.kernels import find
from dynamicemb.kernels.launch import aligned, blocks, launch
from dynamicemb.table import cuda_gradients
from dynamicemb.table import cuda_reading as reading
from dynamicemb.table.cuda_batch import LANES, SLOT_GONE, SLOT_REJECTED, Batch
from dynamicemb.table.cuda_evicted import Evicted
from dynamicemb.table.cuda_gradients import sums_per_entry
from dynamicemb.table.cuda_layout import Layout, TableClass, to_device
from dynamicemb.table.cuda_replay import Replay
from dynamicemb.table.cuda_streams import Entrance
from dynamicemb.table.group import TableGroup
from dynamicemb.table.numbers import NO_EVICTION_STRATEGY, TYPES
from dynamicemb.table.rows import (
    UNPOOLED,
    Bounds,
    Kept,
    Lookup,
    Pooling,
    Rows,
    SummedGradients,
    Written,
)
from dynamicemb.table.scored import batch_scores

if TYPE_CHECKING:
    from dynamicemb.table.cuda import CudaTable


@dataclass
class CudaLookup(Lookup):
    """A batch, and how often each table had changed when it was looked up."""

    batch: Batch
    changes: list[int]
    stream: int | None  # that used it last
    evicted: list[Rows] | None = None  # of each table


class CudaTableGroup(TableGroup):
    """See :class:`TableGroup`."""

    def __init__(self, tables: Sequence[CudaTable]) -> None:
        self.tables: Sequence[CudaTable] = list(tables)
        self.layout = Layout(self.tables)
        self.device = self.layout.device
        self._replay = Replay(self.layout)
        self._strict = [
            (t, table) for t, table in enumerate(self.tables) if not table.ignores_failures
        ]
        self._entered = self.together = Entrance(self.tables, self.layout)

    @property
    def _decides(self) -> bool:
        return any(table.decides for table in self.tables)

    def _bounds(self, bounds: Bounds | None) -> torch.Tensor | None:
        if self.layout.tables == 1 or bounds is None:
            return None
        if isinstance(bounds, torch.Tensor):
            return aligned(bounds)
        return to_device(torch.tensor(bounds, dtype=torch.int64, device="cpu"), self.device)

    # ---- reading ----

    def find_slots(self, ids: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
        """int32 [n]: the slot of each id in its table, or -1."""
        with self._entered as layout:
            count, one_table = ids.shape[0], layout.tables == 1
            slots = torch.empty(count, dtype=torch.int32, device=self.device)
            for one in layout.classes:
                if one.wide:
                    self._wide_slots(ids, bounds, one, slots)
                    continue
                launch(
                    find.lookup_kernel,
                    blocks(count, LANES),
                    (
                        ids,
                        *reading.pointer_and_step(layout, bounds),
                        count,
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
        with self._entered as layout:
            (one,) = layout.classes
            reading.gather(
                layout, one, slots, None, None, out, TYPES[out.dtype], missing=missing, side=None
            )

    def find_rows(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Rows of ids of the only table, and their slots (-1: the missing value); no output dtype
        but the table's."""
        with self._entered as layout:
            if not reading.one_launch(layout):
                slots = self.find_slots(ids, None)
                self.gather(slots, out, missing=True)
                return slots
            slots = torch.empty(len(ids), dtype=torch.int32, device=self.device)
            reading.find_and_copy(layout, ids, None, out, TYPES[out.dtype], slots)
            return slots

    def evaluate(
        self, ids: torch.Tensor, bounds: Bounds, pooling: Pooling, out: torch.Tensor
    ) -> None:
        ids = aligned(ids)
        limits = self._bounds(bounds)
        with self._entered as layout:
            if not pooling.pooled and reading.one_launch(layout):
                reading.find_and_copy(layout, ids, limits, out, TYPES[pooling.dtype], None)
                return
            slots = self.find_slots(ids, limits)
            if pooling.pooled:
                reading.pool(
                    layout, slots, None, pooling, out, ids.shape[0], missing=True, sides={}
                )
                return
            for one in layout.classes:
                reading.gather(
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
        out: torch.Tensor | None = None,
    ) -> CudaLookup:
        """``out``: for the row of every id."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError("a training step cannot be captured in a CUDA graph; evaluation can")
        scores = batch_scores(self.tables)
        with self._entered:
            strict = self._strict if check else []
            before = [table.failures() for _, table in strict]
            evicted = None
            plain = counts is None and not protect and not keep_evicted
            plain = plain and not self._decides and not self.layout.logged
            if plain and self._replay.serves(ids) and not self._may_grow(ids):
                numbers = self.layout.start_batch(scores)
                batch = self._replay.train(aligned(ids), self._bounds(bounds), numbers, out)
                self._count_changes(batch)
            else:
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
                if out is not None:
                    reading.read_batch(self.layout, batch, out)
            for table in self.tables:
                table.advance_step()
            if strict:
                limits = bounds.tolist() if isinstance(bounds, torch.Tensor) else bounds
                for (t, table), failed in zip(strict, before, strict=True):
                    table.report_failures(failed, limits[t + 1] - limits[t])
            changes = [table.changes for table in self.tables]
            return CudaLookup(batch, changes, self.layout.stream, evicted)

    def _may_grow(self, ids: torch.Tensor) -> bool:
        return any(table.growth_possible(ids.shape[0]) for table in self.layout.growing)

    def _count_changes(self, batch: Batch) -> None:
        batch.stamp()
        for table in self.tables:
            table.changes += 1
        for table in self.layout.growing:
            table.expect(batch.n)

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
        hold: Callable[[], None] | None = None,
        meanwhile: Callable[[Batch, Evicted], None] | None = None,
    ) -> tuple[Batch, list[Rows] | None]:
        """The index's part of a batch: find, admit, grow, insert, evict. Rows of new entries are
        left to the caller; the rows that each table evicted are returned if they are kept.
        ``distinct``: no id occurs twice, in one table. ``hold`` is called when the batch has its
        mark, to keep rows from being evicted by it; ``meanwhile`` before the host waits for the
        number of evicted rows, which it must leave alone."""
        with self._entered as layout:
            numbers = layout.start_batch(scores) if distinct else None
            batch = Batch(
                layout, aligned(ids), self._bounds(bounds), distinct=distinct, numbers=numbers
            )
            if batch.n == 0:
                none = [table.empty_rows(0) for table in self.tables]
                return batch, none if keep_evicted else None
            totals = None if counts is None else batch.occurrences(aligned(counts))
            if admit and self._decides:
                if totals is None:
                    totals = batch.occurrences(None)
                codes = self._admit(batch, totals)
            self._grow(batch, codes)
            layout.refresh()
            if numbers is None:
                layout.batch_numbers.write(layout.start_batch(scores))
            for other in protect:
                self._refreshed(other).protect()
            if hold is not None:
                hold()
            batch.commit(
                codes=codes,
                counts=totals,
                train=train,
                marked=layout.marked or bool(protect) or hold is not None,
                keep_evicted=keep_evicted or layout.logged,
            )
            self._count_changes(batch)
            with batch.settled():
                if layout.logged:
                    batch.log_evictions()
                if not keep_evicted:
                    return batch, None
                evicted = Evicted(batch)
                if meanwhile is not None:
                    meanwhile(batch, evicted)
                return batch, evicted.rows()

    def find_or_insert_keeping(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> Kept:
        with self._entered:
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
        with self._entered:
            table = self.tables[t]

            def hold() -> None:
                table.located(needed).protect()
                if protect:
                    self.layout.batch_numbers.write(self.layout.marks())
                for other in protect:
                    self._refreshed(other).protect()

            return table.bring_in(given, hold)

    def _admit(self, batch: Batch, totals: torch.Tensor) -> torch.Tensor:
        """Ask the tables who of the missing ids gets a row; returns the codes of the entries."""
        codes = batch.locate(None)
        used = int(batch.count)
        missing = codes[:used] == SLOT_GONE
        sides: dict[tuple[int, int], list[torch.Tensor]] = {}
        decided = torch.zeros(batch.n, dtype=torch.int32, device=self.device)
        for t, table in enumerate(self.tables):
            if not table.decides:
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
        if lookup.stream != self.layout.stream:
            lookup.stream = self.layout.stream
            lookup.batch.used_elsewhere()
        changes = [table.changes for table in self.tables]
        if changes != lookup.changes and lookup.batch.n:
            lookup.batch.slots = lookup.batch.locate(lookup.batch.slots)
            lookup.changes = changes
        return lookup.batch

    def read(self, lookup: Lookup, pooling: Pooling, out: torch.Tensor) -> None:
        with self._entered as layout:
            batch = self._refreshed(lookup)
            if pooling.pooled:
                reading.pool(
                    layout, batch.slots, batch.entry_of, pooling, out, batch.n,
                    missing=False, sides=batch.sides,
                )  # fmt: skip
            else:
                reading.read_batch(layout, batch, out)

    def train(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        pooling: Pooling,
        out: torch.Tensor,
    ) -> Lookup:
        if pooling.pooled or out.data_ptr() % 16:
            return super().train(ids, bounds, pooling, out)
        return self.find_or_insert(ids, bounds, out=out)

    # ---- backward ----

    def update(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        self._start_update()
        with self._entered as layout:
            batch = self._refreshed(lookup)
            cuda_gradients.update(layout, batch, pooling, gradient, clamp=True)

    def _start_update(self) -> None:
        for table in self.tables:
            if not table.options.training:
                raise UsageError(
                    f"table {table.name!r} has training=False in its options and cannot be updated"
                )
        for table in self.tables:
            table.iteration += 1

    def weight_gradient(
        self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor
    ) -> torch.Tensor:
        with self._entered as layout:
            batch = self._refreshed(lookup)
            return cuda_gradients.weight_gradient(layout, batch, pooling, gradient)

    def reduce(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> SummedGradients:
        assert isinstance(lookup, CudaLookup)
        with self._entered as layout:
            batch = lookup.batch
            used = int(batch.count)
            there = (batch.slots[:used] >= 0) | (batch.slots[:used] == SLOT_GONE)
            summed: SummedGradients = [self._nothing(table) for table in self.tables]
            for one, sums in sums_per_entry(layout, batch, pooling, gradient, clamp=True):
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

    def merge(self, parts: Sequence[SummedGradients]) -> SummedGradients:
        merged: SummedGradients = []
        for t, table in enumerate(self.tables):
            ids = torch.cat([part[t][0] for part in parts])
            gradient = torch.cat([part[t][1] for part in parts])
            group = table.group
            with group._entered as layout:
                batch = Batch(layout, ids, None)
                used = int(batch.count)
                merged.append(self._nothing(table))
                sums = sums_per_entry(layout, batch, UNPOOLED, gradient, clamp=False)
                for _, summed in sums:
                    merged[t] = batch.ids[:used].clone(), summed[:used]
        return merged

    def update_summed(self, gradients: SummedGradients) -> None:
        self._start_update()
        for table, (ids, gradient) in zip(self.tables, gradients, strict=True):
            group = table.group
            with group._entered as layout:
                batch = Batch(layout, aligned(ids.contiguous()), None)
                if batch.n:
                    batch.slots = batch.locate(None)
                    cuda_gradients.update(
                        layout, batch, UNPOOLED, gradient.contiguous(), clamp=False
                    )
