"""One batch of ids over the tables of a group, on their device: find, insert, evict.

What happens is said in docs/design.md. Every step is one launch over all tables; counts stay on
the device. Two things need the host to wait: an admission strategy, which is asked in Python, and
growth, where it cannot be ruled out from the numbers the host knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from dynamicemb.kernels import find, initialize, insert
from dynamicemb.kernels.launch import INTERPRETED, blocks, launch, power_of_two
from dynamicemb.kernels.layout import FAILED, GONE, REJECTED
from dynamicemb.table.cuda_crowded import place_sorted
from dynamicemb.table.cuda_entries import ELEMENTS, Entries
from dynamicemb.table.cuda_streams import record
from dynamicemb.table.numbers import LFU_STRATEGY, PAIR_STRATEGY

if TYPE_CHECKING:
    from dynamicemb.table.cuda_layout import TableClass

#: Ids per program: one per lane. The interpreter wants few programs.
LANES = 256 if INTERPRETED else 32
PLACES, PLACE_WARPS = (256 if INTERPRETED else 32), 1
COMMITTED = 512 if INTERPRETED else 128
#: Slots that one program looks at for the lowest scores, at a time. More take more registers, and
#: so more time where nothing is evicted.
SCANNED_SLOTS = 2048 if INTERPRETED else 128
#: Queues that a program fills at a time, and programs that do so.
FILLED = 16 if INTERPRETED else 4
FILLING_PROGRAMS = 1 if INTERPRETED else 132 * 4
#: Programs of launches whose work only the device knows.
ROW_PROGRAMS = 2 if INTERPRETED else 132 * 16
#: More newcomers per bucket than this are ranked by a sort instead of by lists.
CROWDED = 128

SLOT_FAILED, SLOT_GONE, SLOT_REJECTED = FAILED.value, GONE.value, REJECTED.value


class Batch(Entries):
    """Entries and their slots.

    ``slots[e]``: the slot of entry e in its table, or SLOT_FAILED, SLOT_GONE, or SLOT_REJECTED - k
    for an entry that was not admitted and reads row k of the ``sides`` of its table's (dim, type).
    """

    @cached_property
    def sides(self) -> dict[tuple[int, int], torch.Tensor]:
        """Rows that entries read that were not admitted."""
        return {}

    def used_elsewhere(self) -> None:
        """The current stream is another one than that which used the batch last."""
        record((self.all_ids, self.bounds, self.slots, *self.sides.values()))

    def side_of(self, one: TableClass) -> torch.Tensor | None:
        """The rows that rejected ids of a class of tables read."""
        return self.sides.get((one.dim, one.type))

    # ---- find ----

    def locate(self, codes: torch.Tensor | None) -> torch.Tensor:
        """Slots of the entries as the tables are now; failed and rejected ones of ``codes`` stay.
        Changes nothing."""
        slots = self._new(torch.int32)
        for one in self.layout.classes:
            self._find(one, slots, codes)
        return slots

    def _find(
        self,
        one: TableClass,
        slots: torch.Tensor,
        codes: torch.Tensor | None,
        counts: torch.Tensor | None = None,
        following: torch.Tensor | None = None,
        *,
        write: bool = False,
        marked: bool = False,
        free: bool = False,
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
                marked and layout.marked,
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
        layout = self.layout
        # Some pointer where nothing is kept.
        self.evicted_ids = self.evicted_scores = self.evicted_times = self.ids
        if keep_evicted:
            self.evicted_ids = self._new(torch.int64)
            self.evicted_scores = self._new(torch.int64)
            self.evicted_times = self._new(torch.int64)
        with self.settled():  # of several classes, some may be done
            try:
                for one in layout.classes:
                    counts = self._commit_class(one, codes, counts, train, marked, keep_evicted)
            except BaseException:
                # Newcomers are in the lists of their buckets, which are empty between batches.
                for table in layout.owners:
                    table.heads.fill_(-1)
                    table.changes += 1
                raise

    def _commit_class(
        self,
        one: TableClass,
        codes: torch.Tensor | None,
        counts: torch.Tensor | None,
        train: bool,
        marked: bool,
        keep_evicted: bool,
    ) -> torch.Tensor | None:
        """:meth:`commit` for the tables of a class; returns the counts of entries, if known."""
        layout, space = self.layout, self.space
        found, following, choice = space.found, space.following, space.choice
        counting = one.strategy in (LFU_STRATEGY, PAIR_STRATEGY)
        if counting and counts is None:
            counts = self.occurrences(None)
        direct = one.wide or self.n > CROWDED * one.fewest_buckets
        marks = marked or direct
        free = not direct and one.width == one.line
        self._find(one, found, codes, counts, following, write=True, marked=marks, free=free)
        # Scores that rows get must be new ones, and what is free must be known.
        queued = one.queued if free and not marked else 0
        if direct:
            for t in one.members:
                place_sorted(self, t, one, found, choice)
        else:
            self._place(one, found, following, choice, marked, free, queued)
        pointers = self.ids
        committing = blocks(self.entries_guess, COMMITTED)
        filling = min(blocks(self.entries_guess, 4 * FILLED), FILLING_PROGRAMS) if queued else 0
        launch(
            insert.commit_kernel,
            committing + filling,
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
                space.class_work[one.number],
                space.victims,
                space.low,
                self.slots,
                self.fresh,
                space.new,
                space.new_count,
                self.evicted_ids,
                self.evicted_scores,
                self.evicted_times,
                filling,
            ),
            (
                one.width,
                COMMITTED,
                self.one,
                layout.one_class,
                one.strategy,
                train,
                keep_evicted,
                queued,
                FILLED,
            ),
            warps=4,
            device=self.device,
        )
        return counts

    def _place(
        self,
        one: TableClass,
        found: torch.Tensor,
        following: torch.Tensor,
        choice: torch.Tensor,
        marked: bool,
        free: bool,
        queued: int,
    ) -> None:
        """Slots from the buckets' lists and queues."""
        layout, space = self.layout, self.space
        padded = power_of_two(one.width)
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
                layout.batch_numbers.device_tensor,
                found,
                following,
                choice,
                self.fresh,
                space.free,
                space.class_work[one.number],
                space.victims,
                space.low,
            ),
            (
                one.width,
                one.line,
                padded,
                PLACES,
                max(1, SCANNED_SLOTS // padded),
                self.one,
                layout.one_class,
                one.strategy,
                free,
                marked,
                queued,
            ),
            warps=PLACE_WARPS,
        )

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

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Whatever is done with the rows of new entries, they have their first values if it is cut
        off, and not those of rows that were evicted."""
        try:
            yield
        except BaseException:
            self.initialize(embeddings=True)
            raise

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
        now = layout.now_numbers.keep(
            np.array([[table.known_changes.now for table in layout.owners]], dtype=np.int32)
        )
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
