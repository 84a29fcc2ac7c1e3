"""The rows that a batch evicted, handed out before others take their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dynamicemb.kernels import evicted
from dynamicemb.kernels.launch import blocks, launch
from dynamicemb.table.cuda_batch import Batch
from dynamicemb.table.cuda_entries import ELEMENTS, NUMBERED
from dynamicemb.table.cuda_workspace import NUMBERING_PROGRAMS
from dynamicemb.table.rows import Rows

if TYPE_CHECKING:
    from dynamicemb.table.cuda import CudaTable


class Evicted:
    """Lists on the device which entries of a batch evicted a row, in their order. How many there
    are is on its way to the host while it does other things.

    ``entries`` int32 [n]: the list; ``ends`` int32 [tables]: where that of a table ends, 0 if it
    has none.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        device, tables = batch.device, batch.layout.tables
        self.entries = torch.empty(batch.n, dtype=torch.int32, device=device)
        self.ends = torch.empty(tables, dtype=torch.int32, device=device)
        tiles = blocks(batch.n, NUMBERED * NUMBERING_PROGRAMS)
        programs = blocks(batch.n, NUMBERED * tiles)
        totals = batch.space.totals
        launch(
            evicted.count_kernel,
            programs,
            (batch.fresh, batch.count, tiles, totals, self.ends, tables),
            (NUMBERED,),
            device=device,
        )
        launch(
            evicted.list_kernel,
            programs,
            (batch.fresh, batch.tables, batch.count, tiles, totals, self.entries, self.ends),
            (NUMBERED, NUMBERING_PROGRAMS, batch.one),
            device=device,
        )
        self._arrived: torch.cuda.Event | None = None
        self._ends = self.ends
        if device.type == "cuda":
            self._ends = torch.empty(tables, dtype=torch.int32, device="cpu", pin_memory=True)
            self._ends.copy_(self.ends, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    #: How many there are, once :meth:`rows` was called.
    count = 0

    def rows(self) -> list[Rows]:
        """The evicted rows of each table. Waits for their numbers; nothing may have been written
        to their slots since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts, begin = [], 0
        for table, end in zip(self._batch.layout.owners, self._ends.tolist(), strict=True):
            parts.append(self._packed(table, begin, max(end, begin)))
            begin = max(end, begin)
        self.count = begin
        return parts

    def _packed(self, table: CudaTable, begin: int, end: int) -> Rows:
        batch, count = self._batch, end - begin
        packed = table.empty_rows(count)
        if count == 0:
            return packed
        slots = torch.empty(count, dtype=torch.int32, device=batch.device)
        launch(
            evicted.pack_kernel,
            blocks(count, ELEMENTS),
            (
                self.entries,
                begin,
                count,
                batch.slots,
                batch.evicted_ids,
                batch.evicted_scores,
                batch.evicted_times,
                slots,
                packed.ids,
                packed.scores,
            ),
            (ELEMENTS, table.score_words == 2),
            warps=8,
            device=batch.device,
        )
        table.gather(slots, packed.embeddings, missing=False)
        if table.state_dim:
            packed.state = table.states_of(slots)
        return packed
