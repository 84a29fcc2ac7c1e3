"""The distinct ids of a batch on a GPU, and the occurrences of each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.kernels import dedup
from dynamicemb.kernels.gradients import HOT, LONG, SUM_BLOCK
from dynamicemb.kernels.launch import INTERPRETED, blocks, launch
from dynamicemb.table.cuda_workspace import NUMBERING_PROGRAMS, Workspace, hot_blocks

if TYPE_CHECKING:
    from dynamicemb.table.cuda_layout import Layout
    from dynamicemb.table.cuda_replay import BatchGraph

ELEMENTS = 256
#: Ids that one program claims cells for, and ids of a tile whose entries are numbered.
CLAIMED = 256 if INTERPRETED else 32
NUMBERED = 512


class Entries:
    """The distinct ids of a call, its "entries", in the order of their first occurrence.

    Entry arrays have room for one entry per id; ``count`` (int32 [1], on the device) says how many
    are used. ``first[e]``: the first occurrence of entry e; ``entry_of[i]``: the entry of
    occurrence i; ``slots`` and ``fresh`` are for what happens to entries. The arrays belong to a
    workspace that other batches use after this one: what outlives the batch is copied.
    """

    _space: Workspace | None = None

    def __init__(
        self,
        layout: Layout,
        ids: torch.Tensor,
        bounds: torch.Tensor | None,
        *,
        distinct: bool = False,
        numbers: Any = None,
        space: Workspace | None = None,
        graph: BatchGraph | None = None,
        replayed: bool = False,
    ) -> None:
        """``distinct``: no id occurs twice, in one table; ``numbers`` of the batch are then written
        as well, see :meth:`Layout.start_batch`. ``space``: to work there; else one of the layout's
        workspaces. ``graph``: its launches become this graph of that workspace, which stays the
        caller's, and ``ids`` are where their address will be; ``replayed``: it does it all."""
        self._graph = graph
        self.layout = layout
        self.all_ids = ids
        # Some pointer where one table needs none.
        self.bounds = layout.meta if bounds is None else bounds
        self.bounds_step = 1 if bounds is None else bounds.stride(0)
        self.n = ids.shape[0] if graph is None else graph.n
        self.device = layout.device
        self.one = layout.tables == 1
        self._sorted = self._grouped = self._listed = replayed
        self._distinct = distinct and self.one
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
        elif self._distinct:
            self._take_distinct(numbers)
        else:
            self._dedup()

    def __del__(self) -> None:
        if self._space is not None and self._graph is None:
            self.layout.workspaces.give_back(self._space)

    @property
    def space(self) -> Workspace:
        assert self._space is not None
        return self._space

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

    def _take_distinct(self, numbers: Any) -> None:
        """The caller knows that no id occurs twice."""
        space, target = self.space, self.layout.batch_numbers
        self.ids = self.tables = self.all_ids
        self.first = self.entry_of
        source, count = target.words, 0
        if numbers is not None:
            source, count = target.stage(numbers), target.count
        self._run(
            dedup.distinct_kernel,
            ELEMENTS,
            (self.n, space.entry_of, space.work, space.words, source, target.words, count),
            (ELEMENTS,),
            warps=8,
        )

    def _dedup(self) -> None:
        n, layout, space = self.n, self.layout, self.space
        pointed = self._graph is not None
        if self._graph is None:  # a graph finds them free
            space.free_cells(n)
            space.cells_are_free = False
        self._run(
            dedup.claim_kernel,
            CLAIMED,
            (self.all_ids, self.bounds, self.bounds_step, n, layout.tables, space.space,
             self.cut.cells - 1, layout.dummies, space.cell_of),
            (CLAIMED, self.one, pointed),
            warps=1,
        )  # fmt: skip
        if self._graph is not None:
            with self._graph.branches.sorting():
                self._sort()
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
             space.spans, space.work, space.words, layout.hint),
            (NUMBERED, NUMBERING_PROGRAMS, self.one, pointed),
            warps=4,
            device=self.device,
        )  # fmt: skip
        with nullcontext() if self._graph is None else self._graph.branches.numbering():
            self._run(
                dedup.entries_kernel,
                4 * ELEMENTS,
                (n, space.space, space.cell_of, space.entry_of),
                (4 * ELEMENTS,),
                warps=8,
            )
            if self._graph is not None:
                space.free_cells(n)  # for the next batch: here nothing waits for it

    def _sort(self) -> None:
        """Put the occurrences of each id beside each other: by cells, which are known before
        entries are numbered."""
        if not self._sorted:
            self._sorted = True
            cut = self.cut
            torch.sort(cut.cell_of, stable=True, out=(cut.sorted, cut.order))

    def group(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(order, spans): the occurrences of entry e are order[spans[2 * e] : spans[2 * e + 1]],
        ascending, or the ``first`` alone where that is empty."""
        cut = self.cut
        if not self._grouped:
            self._grouped = True
            if self._distinct:
                cut.spans.zero_()
            elif self.n:
                self._sort()
                self._run(
                    dedup.spans_kernel,
                    4 * ELEMENTS,
                    (cut.sorted, cut.order, self.entry_of, self.n, cut.spans),
                    (4 * ELEMENTS,),
                    warps=8,
                )
        return cut.order, cut.spans

    def list_hot(self) -> None:
        """List the blocks of entries with more than HOT occurrences: ``hot_entry`` of the workspace
        has the entries, ``hot_base`` the first block of an entry, ``hot_count`` how many."""
        if not self._listed and self.n > HOT:
            self._listed = True
            _, spans = self.group()
            space = self.space
            self._run(
                dedup.hot_kernel,
                ELEMENTS,
                (spans, self.count, hot_blocks(self.n), space.hot_base, space.hot_entry,
                 space.hot_count),
                (HOT, LONG, SUM_BLOCK, ELEMENTS),
                warps=8,
            )  # fmt: skip

    def _guess(self) -> None:
        """How many entries and hot blocks there may be, from batches before. Kernels are started
        for so many, and loop where there are more: results do not depend on it."""
        self.entries_guess, self.hot_guess = self.n, hot_blocks(self.n)
        entries, ids, parts = self.layout.hint_array.tolist()
        if ids > 0 and entries > 0:
            scale = 1.05 * self.n / ids
            self.entries_guess = min(self.entries_guess, int(scale * entries) + 64)
            self.hot_guess = min(self.hot_guess, int(scale * parts) + 64)

    def occurrences(self, given: torch.Tensor | None) -> torch.Tensor:
        """int64: how often each entry occurs, or the sum of the ``given`` counts."""
        order, spans = self.group()
        totals = self._new(torch.int64)
        self._run(
            dedup.counts_kernel,
            ELEMENTS,
            (spans, self.first, order, self.count, self.ids if given is None else given, totals),
            (ELEMENTS, given is not None),
            warps=8,
        )
        return totals

    def last(self) -> torch.Tensor:
        """int32: the last occurrence of each entry."""
        if self._distinct:  # each is the only one
            return self.entry_of
        last = torch.zeros(self.n, dtype=torch.int32, device=self.device)
        self._run(dedup.last_kernel, ELEMENTS, (self.n, self.entry_of, last), (ELEMENTS,), warps=8)
        return last
