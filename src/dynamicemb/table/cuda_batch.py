"""One batch of ids over the tables of a group, on their device: dedup, find, insert, evict.

What happens is said in docs/design.md. Every step is one launch over all tables; counts stay on
the device. Two things need the host to wait: an admission strategy, which is asked in Python, and
growth, where it cannot be ruled out from the numbers the host knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.kernels import dedup, find, initialize, insert
from dynamicemb.kernels.gradients import HOT, SUM_BLOCK
from dynamicemb.kernels.launch import INTERPRETED, blocks, launch, power_of_two
from dynamicemb.kernels.layout import FAILED, GONE, REJECTED
from dynamicemb.table.numbers import LFU_STRATEGY, NO_EVICTION_STRATEGY, PAIR_STRATEGY

if TYPE_CHECKING:
    from dynamicemb.table.cuda_layout import Layout, TableClass

#: Ids per program: one per lane. The interpreter wants few programs.
LANES = 256 if INTERPRETED else 32
PLACES = 256 if INTERPRETED else 128
ELEMENTS = 256
#: More newcomers per bucket than this are ranked by a sort instead of by lists.
CROWDED = 128
PERSISTENT = 2 if INTERPRETED else 132 * 16

SLOT_FAILED, SLOT_GONE, SLOT_REJECTED = FAILED.value, GONE.value, REJECTED.value


class Batch:
    """The distinct ids of a call ("entries", in order of first occurrence) and their slots.

    Entry arrays have room for one entry per id; ``count`` (int32 [1], on the device) says how many
    are used. ``slots[e]``: the slot of entry e in its table, or SLOT_FAILED, SLOT_GONE, or
    SLOT_REJECTED - k for an entry that was not admitted and reads row k of the ``sides``
    of its table's (dim, type).
    """

    def __init__(
        self,
        layout: Layout,
        ids: torch.Tensor,
        bounds: torch.Tensor | None,
        *,
        distinct: bool = False,
    ) -> None:
        self.layout = layout
        self.all_ids = ids
        self.bounds = bounds
        self.n = len(ids)
        self.device = ids.device
        self.sides: dict[tuple[int, int], torch.Tensor] = {}
        self._order: torch.Tensor | None = None
        self._hot: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if distinct and self.one:
            self._take_distinct()
        else:
            self._dedup()

    def side_of(self, one: TableClass) -> torch.Tensor | None:
        """The rows that rejected ids of a class of tables read."""
        return self.sides.get((one.dim, one.type))

    def _new(self, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        return torch.empty(self.n if count is None else count, dtype=dtype, device=self.device)

    @property
    def count(self) -> torch.Tensor:
        """How many entries there are: int32, one number on the device."""
        return self._work[:1]

    @property
    def one(self) -> bool:
        return self.layout.tables == 1

    @property
    def bounds_or_any(self) -> torch.Tensor:
        """The bounds, or some pointer where one table needs none."""
        return self.layout.meta if self.bounds is None else self.bounds

    def _run(self, function: Any, size: int, args: Any, constants: Any, warps: int = 1) -> None:
        launch(function, blocks(self.n, size), args, constants, warps=warps, device=self.device)

    # ---- distinct ids ----

    def _take_distinct(self) -> None:
        """The caller knows that no id occurs twice."""
        self.ids = self.tables = self.all_ids
        self.entry_of = self.first = torch.arange(self.n, dtype=torch.int32, device=self.device)
        self._work = torch.zeros(16, dtype=torch.int32, device=self.device)
        self._work[0] = self.n

    def _dedup(self) -> None:
        n, tables = self.n, self.layout.tables
        self.ids = self._new(torch.int64)
        self.first = self._new(torch.int32)
        self.entry_of = self._new(torch.int32)
        self.tables = self.ids if self.one else self._new(torch.int32)
        if n == 0:
            self._work = torch.zeros(16, dtype=torch.int32, device=self.device)
            return
        self._work = self._new(torch.int32, 16)
        cells = power_of_two(2 * n)
        space = torch.full((cells,), -1, dtype=torch.int32, device=self.device)
        cell_of = self._new(torch.int32)
        first = self._new(torch.int32)
        bounds = self.bounds_or_any
        self._run(
            dedup.claim_kernel,
            ELEMENTS,
            (self.all_ids, bounds, n, tables, space, cells - 1, self.layout.dummies, cell_of),
            (ELEMENTS, self.one),
            warps=8,
        )
        self._run(dedup.first_kernel, ELEMENTS, (n, space, cell_of, first), (ELEMENTS,), warps=8)
        ranks = torch.cumsum(first, 0, dtype=torch.int32)
        self._run(
            dedup.emit_kernel,
            ELEMENTS,
            (self.all_ids, bounds, n, tables, space, cell_of, ranks, self.entry_of, self.ids,
             self.first, self.tables, self._work),
            (ELEMENTS, self.one),
            warps=8,
        )  # fmt: skip

    def group(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(order, starts): the occurrences of entry e are order[starts[e] : starts[e + 1]],
        ascending."""
        if self._order is None:
            self._starts = self._new(torch.int32, self.n + 1)
            if self.n == 0:
                self._order = self._new(torch.int64)
                return self._order, self._starts
            entries, self._order = torch.sort(self.entry_of, stable=True)
            self._run(
                dedup.spans_kernel, ELEMENTS, (entries, self.n, self._starts), (ELEMENTS,), warps=8
            )
        return self._order, self._starts

    def hot(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(first block of an entry, entry of a block, number of blocks) of the entries with more
        than HOT occurrences."""
        if self._hot is None:
            _, starts = self.group()
            base = self._new(torch.int32)
            entry = self._new(torch.int32, 2 * blocks(self.n, HOT) + 1)  # enough
            work = self._work[4:]
            if self.n > HOT:
                self._run(
                    dedup.hot_kernel,
                    ELEMENTS,
                    (starts, self.count, base, entry, work),
                    (HOT, SUM_BLOCK, ELEMENTS),
                    warps=8,
                )
            self._hot = base, entry, work
        return self._hot

    def occurrences(self, given: torch.Tensor | None) -> torch.Tensor:
        """int64: how often each entry occurs, or the sum of the ``given`` counts."""
        order, starts = self.group()
        totals = self._new(torch.int64)
        self._run(
            dedup.counts_kernel,
            ELEMENTS,
            (starts, order, self.count, self.ids if given is None else given, totals),
            (ELEMENTS, given is not None),
            warps=8,
        )
        return totals

    def last(self) -> torch.Tensor:
        """int64: the last occurrence of each entry."""
        order, starts = self.group()
        if self.n == 0:
            return order
        return order[(starts[1 : self.n + 1] - 1).clamp_(0, self.n - 1)]

    # ---- find ----

    def locate(self, codes: torch.Tensor | None) -> torch.Tensor:
        """Slots of the entries as the tables are now; failed and rejected ones of ``codes`` stay.
        Changes nothing."""
        slots = self._new(torch.int32)
        for one in self.layout.classes:
            self._find(one, slots, codes, None, None, write=False, scored=False)
        return slots

    def _find(
        self,
        one: TableClass,
        slots: torch.Tensor,
        codes: torch.Tensor | None,
        counts: torch.Tensor | None,
        following: torch.Tensor | None,
        *,
        write: bool,
        scored: bool,
    ) -> None:
        layout, any_pointer = self.layout, self.ids
        known = None
        if one.wide:
            known = self._new(torch.int32)
            for t in one.members:
                wanted = slice(None) if self.one else (self.tables == t)
                found = layout.owners[t].wide_slots(self.ids)
                known[wanted] = found if self.one else found[wanted]
        self._run(
            find.find_kernel,
            LANES,
            (
                self.ids,
                self.tables,
                self.count,
                layout.meta,
                layout.tables,
                one.number,
                layout.batch_scores,
                any_pointer if counts is None else counts,
                any_pointer if codes is None else codes,
                any_pointer if known is None else known,
                slots,
                any_pointer if following is None else following,
            ),
            (
                one.width,
                one.line,
                LANES,
                self.one,
                layout.one_class,
                one.strategy,
                write,
                codes is not None,
                scored,
                known is not None,
            ),
        )

    # ---- insert ----

    def commit(
        self,
        *,
        codes: torch.Tensor | None,
        counts: torch.Tensor | None,
        train: bool,
        scored: bool,
        keep_evicted: bool,
    ) -> None:
        """Find all entries, score the hits, insert the others: fills ``slots`` and ``fresh``."""
        layout = self.layout
        found = self._new(torch.int32)
        following = self._new(torch.int32)
        choice = self._new(torch.int32)
        self.slots = self._new(torch.int32)
        self.fresh = self._new(torch.uint8)
        kept = self.n if keep_evicted else 0
        self.evicted_ids = self._new(torch.int64, kept)
        self.evicted_scores = self._new(torch.int64, kept)
        self.evicted_times = self._new(torch.int64, kept)
        for one in layout.classes:
            counting = one.strategy in (LFU_STRATEGY, PAIR_STRATEGY)
            if counting and counts is None:
                counts = self.occurrences(None)
            self._find(one, found, codes, counts, following, write=True, scored=scored)
            direct = one.wide or self.n > CROWDED * one.fewest_buckets
            if direct:
                victims = torch.zeros(self.n, dtype=torch.uint8, device=self.device)
                for t in one.members:
                    self._place_sorted(t, one, found, choice, victims)
            else:
                victims = self._place(one, found, following, choice)
            pointers = self.ids
            self._run(
                insert.commit_kernel,
                ELEMENTS,
                (
                    self.ids,
                    self.tables,
                    self.count,
                    layout.meta,
                    layout.tables,
                    one.number,
                    layout.batch_scores,
                    pointers if counts is None else counts,
                    found,
                    choice,
                    victims,
                    self.slots,
                    self.fresh,
                    self.evicted_ids,
                    self.evicted_scores,
                    self.evicted_times,
                ),
                (
                    one.width,
                    ELEMENTS,
                    self.one,
                    layout.one_class,
                    one.strategy,
                    train,
                    keep_evicted,
                    direct,
                ),
                warps=8,
            )

    def _place(
        self, one: TableClass, found: torch.Tensor, following: torch.Tensor, choice: torch.Tensor
    ) -> torch.Tensor:
        """Slots from the buckets' lists; returns the victims that ``choice`` refers to."""
        layout = self.layout
        work = self._work[8:] if one.number == 0 else torch.zeros_like(self._work)
        leaders = self._new(torch.int32, 3 * self.n)
        victims = self._new(torch.int32)
        self._run(
            insert.place_kernel,
            PLACES,
            (
                self.ids,
                self.tables,
                self.count,
                layout.meta,
                layout.tables,
                one.number,
                found,
                following,
                choice,
                work,
                leaders,
                self.n,
            ),
            (one.width, one.line, PLACES, self.one, layout.one_class, one.strategy),
            warps=4,
        )
        if one.strategy == NO_EVICTION_STRATEGY:
            return victims
        padded = power_of_two(one.width)
        rows = max(1, (2048 if INTERPRETED else 512) // padded)
        launch(
            insert.victims_kernel,
            min(blocks(self.n, rows), PERSISTENT),
            (
                self.ids,
                self.tables,
                layout.meta,
                layout.tables,
                one.number,
                work,
                leaders,
                self.n,
                victims,
            ),
            (one.width, padded, rows, self.one, layout.one_class),
            warps=1,
            device=self.device,
        )
        return victims

    def _place_sorted(
        self,
        t: int,
        one: TableClass,
        found: torch.Tensor,
        choice: torch.Tensor,
        victims: torch.Tensor,
    ) -> None:
        """The same slots by sorting, for buckets that are wide or get many newcomers. Waits for the
        device."""
        table = self.layout.owners[t]
        used = int(self.count)
        missing = found[:used] == SLOT_GONE
        if not self.one:
            missing &= self.tables[:used] == t
        entries = missing.nonzero().squeeze(1)
        if len(entries) == 0:
            return
        bucket, order = torch.sort(table.buckets_of(self.ids[entries]), stable=True)
        entries = entries[order]
        rank = torch.arange(len(bucket), device=self.device) - torch.searchsorted(bucket, bucket)
        empty = table.digests == 0
        free, free_start, free_count = _by_bucket(empty.nonzero().squeeze(1), one.width, table)
        takes = rank < free_count[bucket]
        at = (free_start[bucket] + rank).clamp(max=max(len(free) - 1, 0))
        slot = torch.full_like(bucket, SLOT_FAILED)
        if len(free):
            slot = torch.where(takes, free[at], slot)
        evicts = torch.zeros_like(takes)
        if one.strategy != NO_EVICTION_STRATEGY:
            candidates = (~empty & ~table.touched_slots()).nonzero().squeeze(1)
            by_score = torch.sort(table.scores[candidates] ^ -(2**63), stable=True).indices
            old, old_start, old_count = _by_bucket(candidates[by_score], one.width, table)
            rank = rank - free_count[bucket]
            evicts = ~takes & (rank < old_count[bucket])
            at = (old_start[bucket] + rank).clamp(0, max(len(old) - 1, 0))
            if len(old):
                slot = torch.where(evicts, old[at], slot)
        choice[entries] = slot.to(torch.int32)
        victims[entries] = evicts.to(torch.uint8)

    # ---- rows ----

    def initialize(self, *, embeddings: bool) -> None:
        """Give new rows their first values."""
        layout = self.layout
        for one in layout.classes:
            if one.dim == 0 or (not embeddings and one.state_dim == 0):
                continue
            programs = min(blocks(self.n, one.row_block), PERSISTENT)
            launch(
                initialize.fresh_kernel,
                programs,
                (
                    self.ids,
                    self.tables,
                    self.count,
                    self.slots,
                    self.fresh,
                    layout.meta,
                    layout.floats,
                    layout.tables,
                    one.number,
                ),
                (
                    one.dim,
                    one.columns,
                    one.stride,
                    one.type,
                    one.mode,
                    one.state_dim,
                    one.state_columns,
                    one.state_stride,
                    one.state_from,
                    one.row_block,
                    self.one,
                    layout.one_class,
                    embeddings,
                ),
                warps=4,
                device=self.device,
            )

    def number_rows(self, t: int) -> None:
        """NO_EVICTION: number the new rows of table t."""
        table, layout = self.layout.owners[t], self.layout
        fresh = (self.fresh > 0) & (torch.arange(self.n, device=self.device) < self.count)
        if not self.one:
            fresh &= self.tables == t
        ranks = torch.cumsum(fresh, 0, dtype=torch.int32)
        self._run(
            insert.number_kernel,
            ELEMENTS,
            (
                self.slots,
                self.fresh,
                self.tables,
                self.count,
                ranks,
                table.next_number,
                layout.meta,
                layout.tables,
                t,
            ),
            (ELEMENTS, self.one),
            warps=8,
        )
        before = table.next_number.clone()
        table.next_number += ranks[-1:]
        wrapped = (table.next_number ^ -(2**63)) < (before ^ -(2**63))
        table.next_number.masked_fill_(wrapped, -1)

    def mark(self, slots: torch.Tensor, *, on: bool) -> None:
        """Keep the rows of these entries from being evicted, or allow it again."""
        self._run(
            find.mark_kernel,
            ELEMENTS,
            (slots, self.tables, self.count, self.layout.meta, self.layout.tables),
            (ELEMENTS, self.one, on),
            warps=8,
        )


def _by_bucket(
    slots: torch.Tensor, width: int, table: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots grouped by bucket in their order, where each bucket starts, how many it has)."""
    bucket, order = torch.sort(torch.div(slots, width, rounding_mode="floor"), stable=True)
    counts = torch.bincount(bucket, minlength=table.buckets)
    return slots[order], torch.cumsum(counts, 0) - counts, counts
