"""One batch of ids over the tables of a group, on their device: dedup, find, insert, evict.

What happens is said in docs/design.md. Every step is one launch over all tables; counts stay on
the device. Two things need the host to wait: an admission strategy, which is asked in Python, and
growth, where it cannot be ruled out from the numbers the host knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.kernels import dedup, find, initialize, insert
from dynamicemb.kernels.gradients import HOT, LONG, SUM_BLOCK
from dynamicemb.kernels.launch import INTERPRETED, blocks, launch, power_of_two
from dynamicemb.kernels.layout import FAILED, GONE, REJECTED
from dynamicemb.table.cuda_crowded import place_sorted
from dynamicemb.table.cuda_streams import record
from dynamicemb.table.cuda_workspace import NUMBERING_PROGRAMS, Workspace, hot_blocks
from dynamicemb.table.numbers import LFU_STRATEGY, NO_EVICTION_STRATEGY, PAIR_STRATEGY

if TYPE_CHECKING:
    from dynamicemb.table.cuda_layout import Layout, TableClass

#: Ids per program: one per lane. The interpreter wants few programs.
LANES = 256 if INTERPRETED else 32
PLACES = 256 if INTERPRETED else 128
ELEMENTS = 256
#: Ids that one program claims cells for, and ids of a tile whose entries are numbered.
CLAIMED = 256 if INTERPRETED else 32
NUMBERED = 512
COMMITTED = 512
#: Slots that one program looks at for the lowest scores, at a time.
VICTIM_TILE, VICTIM_WARPS = (2048 if INTERPRETED else 256), 1
#: Programs of launches whose work only the device knows; many more where the last batch had much.
PERSISTENT = 2 if INTERPRETED else 132 * 16
MORE_PROGRAMS = 2 if INTERPRETED else 132 * 64
ROW_PROGRAMS = 2 if INTERPRETED else 132 * 8
#: More newcomers per bucket than this are ranked by a sort instead of by lists.
CROWDED = 128

SLOT_FAILED, SLOT_GONE, SLOT_REJECTED = FAILED.value, GONE.value, REJECTED.value


class Batch:
    """The distinct ids of a call ("entries", in order of first occurrence) and their slots.

    Entry arrays have room for one entry per id; ``count`` (int32 [1], on the device) says how many
    are used. ``slots[e]``: the slot of entry e in its table, or SLOT_FAILED, SLOT_GONE, or
    SLOT_REJECTED - k for an entry that was not admitted and reads row k of the ``sides``
    of its table's (dim, type). The arrays belong to a workspace that other batches use after this
    one: what outlives the batch is copied.
    """

    _space: Workspace | None = None

    def __init__(
        self,
        layout: Layout,
        ids: torch.Tensor,
        bounds: torch.Tensor | None,
        *,
        distinct: bool = False,
        space: Workspace | None = None,
        captured: bool = False,
        replayed: bool = False,
    ) -> None:
        """``distinct``: no id occurs twice. ``space``: to work there; else one of the layout's
        workspaces. ``captured``: its launches become a graph of that workspace, which stays the
        caller's; ``replayed``: that graph does it all."""
        self._gives_back = not captured
        self.layout = layout
        self.all_ids = ids
        # Some pointer where one table needs none.
        self.bounds = layout.meta if bounds is None else bounds
        self.bounds_step = 1 if bounds is None else bounds.stride(0)
        self.n = ids.shape[0]
        self.device = layout.device
        self.one = layout.tables == 1
        self.sides: dict[tuple[int, int], torch.Tensor] = {}
        self._grouped = self._listed = replayed
        self._guess()
        self._space = space = layout.workspaces.take(self.n) if space is None else space
        self.cut = cut = space.cut(self.n)
        self.count = space.count
        self.ids, self.tables = cut.ids, cut.tables
        self.first, self.entry_of = cut.first, cut.entry_of
        self.slots, self.fresh = cut.slots, cut.fresh
        if replayed:
            return
        if self.n == 0:
            space.work.zero_()
        elif distinct and self.one:
            self._take_distinct()
        else:
            self._dedup()

    def __del__(self) -> None:
        if self._space is not None and self._gives_back:
            self.layout.workspaces.give_back(self._space)

    @property
    def space(self) -> Workspace:
        assert self._space is not None
        return self._space

    def used(self) -> int:
        """How many entries there are; waits for the device unless ids are known to be distinct."""
        return self.n if self.first is self.entry_of else int(self.count)

    def used_elsewhere(self) -> None:
        """The current stream is another one than that which used the batch last."""
        record((self.all_ids, self.bounds, self.slots, *self.sides.values()))

    def side_of(self, one: TableClass) -> torch.Tensor | None:
        """The rows that rejected ids of a class of tables read."""
        return self.sides.get((one.dim, one.type))

    def _new(self, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        return torch.empty(self.n if count is None else count, dtype=dtype, device=self.device)

    def _run(self, function: Any, size: int, args: Any, constants: Any, warps: int = 1) -> None:
        launch(function, blocks(self.n, size), args, constants, warps=warps, device=self.device)

    def _run_entries(
        self, function: Any, size: int, args: Any, constants: Any, warps: int = 1
    ) -> None:
        """A kernel over the entries, which loops where there are more than expected."""
        programs = blocks(self.entries_guess, size)
        launch(function, programs, args, constants, warps=warps, device=self.device)

    # ---- distinct ids ----

    def _take_distinct(self) -> None:
        """The caller knows that no id occurs twice."""
        space = self.space
        self.ids = self.tables = self.all_ids
        self.first = self.entry_of
        self._run(
            dedup.distinct_kernel,
            ELEMENTS,
            (self.n, space.entry_of, space.work, space.words),
            (ELEMENTS,),
            warps=8,
        )

    def _dedup(self) -> None:
        n, layout, space = self.n, self.layout, self.space
        self.cut.space.fill_(-1)
        self._run(
            dedup.claim_kernel,
            CLAIMED,
            (self.all_ids, self.bounds, self.bounds_step, n, layout.tables, space.space,
             self.cut.cells - 1, layout.dummies, space.cell_of),
            (CLAIMED, self.one),
            warps=1,
        )  # fmt: skip
        tiles = blocks(n, NUMBERED * NUMBERING_PROGRAMS)
        programs = blocks(n, NUMBERED * tiles)
        launch(
            dedup.first_kernel,
            programs,
            (n, tiles, space.space, space.cell_of, space.is_first, space.totals),
            (NUMBERED,),
            warps=4,
            device=self.device,
        )
        launch(
            dedup.emit_kernel,
            programs,
            (self.all_ids, self.bounds, self.bounds_step, n, layout.tables, tiles, space.is_first,
             space.totals, space.cell_of, space.space, space.ids, space.first, space.tables,
             space.work, space.words, layout.hint),
            (NUMBERED, NUMBERING_PROGRAMS, self.one),
            warps=4,
            device=self.device,
        )  # fmt: skip
        self._run(
            dedup.entries_kernel,
            4 * ELEMENTS,
            (n, space.space, space.cell_of, space.entry_of),
            (4 * ELEMENTS,),
            warps=8,
        )

    def group(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(order, starts): the occurrences of entry e are order[starts[e] : starts[e + 1]],
        ascending."""
        cut = self.cut
        if not self._grouped:
            self._grouped = True
            if self.n:
                torch.sort(self.entry_of, stable=True, out=(cut.sorted, cut.order))
                self._run(
                    dedup.spans_kernel,
                    4 * ELEMENTS,
                    (cut.sorted, self.n, cut.starts),
                    (4 * ELEMENTS,),
                    warps=8,
                )
        return cut.order, cut.starts

    def list_hot(self) -> None:
        """List the blocks of entries with more than HOT occurrences: ``hot_entry`` of the workspace
        has the entries, ``hot_base`` the first block of an entry, ``hot_count`` how many."""
        if not self._listed and self.n > HOT:
            self._listed = True
            _, starts = self.group()
            space = self.space
            self._run(
                dedup.hot_kernel,
                ELEMENTS,
                (starts, self.count, hot_blocks(self.n), space.hot_base, space.hot_entry,
                 space.hot_count),
                (HOT, LONG, SUM_BLOCK, ELEMENTS),
                warps=8,
            )  # fmt: skip

    def _guess(self) -> None:
        """How many entries and hot blocks there may be, from batches before. Kernels are started
        for so many, and loop where there are more: results do not depend on it."""
        self.entries_guess, self.hot_guess = self.n, hot_blocks(self.n)
        entries, ids, parts, self.evicting_guess = self.layout.hint_array.tolist()
        if ids > 0 and entries > 0:
            scale = 1.05 * self.n / ids
            self.entries_guess = min(self.entries_guess, int(scale * entries) + 64)
            self.hot_guess = min(self.hot_guess, int(scale * parts) + 64)

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
        """int32: the last occurrence of each entry."""
        if self.first is self.entry_of:  # each is the only one
            return self.entry_of
        last = torch.zeros(self.n, dtype=torch.int32, device=self.device)
        self._run(dedup.last_kernel, ELEMENTS, (self.n, self.entry_of, last), (ELEMENTS,), warps=8)
        return last

    # ---- find ----

    def locate(self, codes: torch.Tensor | None) -> torch.Tensor:
        """Slots of the entries as the tables are now; failed and rejected ones of ``codes`` stay.
        Changes nothing."""
        slots = self._new(torch.int32)
        for one in self.layout.classes:
            self._find(one, slots, codes, None, None, write=False, marked=False, free=False)
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
        marked: bool,
        free: bool,
    ) -> None:
        layout, any_pointer = self.layout, self.ids
        known = None
        if one.wide:
            known = self._new(torch.int32)
            for t in one.members:
                wanted = slice(None) if self.one else (self.tables == t)
                found = layout.owners[t].wide_slots(self.ids)
                known[wanted] = found if self.one else found[wanted]
        self._run_entries(
            find.find_kernel,
            LANES,
            (
                self.ids,
                self.tables,
                self.count,
                layout.meta,
                layout.tables,
                one.number,
                layout.batch_numbers.device_tensor,
                any_pointer if counts is None else counts,
                any_pointer if codes is None else codes,
                any_pointer if known is None else known,
                slots,
                any_pointer if following is None else following,
                self.space.free,
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
                marked,
                known is not None,
                free,
            ),
        )

    # ---- insert ----

    def commit(
        self,
        *,
        codes: torch.Tensor | None,
        counts: torch.Tensor | None,
        train: bool,
        marked: bool,
        keep_evicted: bool,
    ) -> None:
        """Find all entries, score the hits, insert the others: fills ``slots`` and ``fresh``.
        ``marked``: slots are in use that the batch's score does not tell; see ``start_batch``."""
        layout, space = self.layout, self.space
        found, following, choice = space.found, space.following, space.choice
        # Some pointer where nothing is kept.
        self.evicted_ids = self.evicted_scores = self.evicted_times = self.ids
        if keep_evicted:
            self.evicted_ids = self._new(torch.int64)
            self.evicted_scores = self._new(torch.int64)
            self.evicted_times = self._new(torch.int64)
        for one in layout.classes:
            counting = one.strategy in (LFU_STRATEGY, PAIR_STRATEGY)
            if counting and counts is None:
                counts = self.occurrences(None)
            direct = one.wide or self.n > CROWDED * one.fewest_buckets
            marks = marked or direct
            free = not direct and one.width == one.line
            self._find(one, found, codes, counts, following, write=True, marked=marks, free=free)
            if direct:
                victims = torch.zeros(self.n, dtype=torch.uint8, device=self.device)
                for t in one.members:
                    place_sorted(self, t, one, found, choice, victims)
            else:
                victims = self._place(one, found, following, choice, marked, free)
            pointers = self.ids
            self._run_entries(
                insert.commit_kernel,
                COMMITTED,
                (
                    self.ids,
                    self.tables,
                    self.count,
                    layout.meta,
                    layout.tables,
                    one.number,
                    layout.batch_numbers.device_tensor,
                    pointers if counts is None else counts,
                    found,
                    choice,
                    victims,
                    self.slots,
                    self.fresh,
                    space.new,
                    space.new_count,
                    self.evicted_ids,
                    self.evicted_scores,
                    self.evicted_times,
                ),
                (
                    one.width,
                    COMMITTED,
                    self.one,
                    layout.one_class,
                    one.strategy,
                    train,
                    keep_evicted,
                    direct,
                ),
                warps=4,
            )

    def _place(
        self,
        one: TableClass,
        found: torch.Tensor,
        following: torch.Tensor,
        choice: torch.Tensor,
        marked: bool,
        free: bool,
    ) -> torch.Tensor:
        """Slots from the buckets' lists; returns the victims that ``choice`` refers to."""
        layout, space = self.layout, self.space
        work, leaders, victims = space.class_work[one.number], space.leaders, space.victims
        self._run_entries(
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
                space.free,
                work,
                leaders,
                space.capacity,
            ),
            (one.width, one.line, PLACES, self.one, layout.one_class, one.strategy, free),
            warps=4,
        )
        if one.strategy == NO_EVICTION_STRATEGY:
            return victims
        padded = power_of_two(one.width)
        rows = max(1, VICTIM_TILE // padded)
        many = blocks(self.evicting_guess, rows) > PERSISTENT
        launch(
            insert.victims_kernel,
            min(blocks(self.n, rows), MORE_PROGRAMS if many else PERSISTENT),
            (
                self.tables,
                layout.meta,
                layout.batch_numbers.device_tensor,
                layout.tables,
                one.number,
                work,
                leaders,
                space.capacity,
                victims,
                layout.hint,
            ),
            (one.width, padded, rows, self.one, layout.one_class, marked),
            warps=VICTIM_WARPS,
            device=self.device,
        )
        return victims

    # ---- rows ----

    def initialize(self, *, embeddings: bool) -> None:
        """Give new rows their first values."""
        layout = self.layout
        for one in layout.classes:
            if one.dim == 0 or (not embeddings and one.state_dim == 0):
                continue
            programs = min(blocks(self.n, one.row_block), ROW_PROGRAMS)
            launch(
                initialize.fresh_kernel,
                programs,
                (
                    self.ids,
                    self.tables,
                    self.space.new,
                    self.space.new_count,
                    self.slots,
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
        fresh = self.fresh > 0
        fresh &= torch.arange(self.n, device=self.device) < self.count
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

    def stamp(self) -> None:
        """Write down that the rows of these entries change now, in the tables that do so."""
        layout = self.layout
        if not layout.stamped or self.n == 0:
            return
        now = layout.now_numbers.keep([[table.known_changes.now for table in layout.owners]])
        self._run(
            find.stamp_kernel,
            ELEMENTS,
            (self.slots, self.tables, self.count, layout.meta, now, layout.tables),
            (ELEMENTS, self.one),
            warps=8,
        )

    def log_evictions(self) -> None:
        """Tell the tables that log removals which ids were evicted. Waits for the device."""
        evicted = self.fresh[: int(self.count)] == 2
        for t, table in enumerate(self.layout.owners):
            removals = table.known_changes.removals
            if removals is not None:
                own = evicted if self.one else evicted & (self.tables[: len(evicted)] == t)
                ids = self.evicted_ids[: len(evicted)][own]
                removals.add(table.known_changes.last_mark, ids)

    def protect(self) -> None:
        """Keep the rows of these entries from being evicted by the batch that is starting."""
        numbers = self.layout.batch_numbers.device_tensor
        self._run(
            find.mark_kernel,
            ELEMENTS,
            (self.slots, self.tables, self.count, self.layout.meta, numbers, self.layout.tables),
            (ELEMENTS, self.one),
            warps=8,
        )
