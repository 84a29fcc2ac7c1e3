"""What is in a table on a GPU: finding and exporting rows, what changed since a mark."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from dynamicemb.errors import UsageError
from dynamicemb.kernels import find
from dynamicemb.kernels.launch import aligned, blocks, launch
from dynamicemb.table.cuda_changes import LAST_MARK
from dynamicemb.table.cuda_entries import ELEMENTS
from dynamicemb.table.cuda_group import CudaTableGroup
from dynamicemb.table.cuda_layout import signed
from dynamicemb.table.cuda_memory import CudaMemory
from dynamicemb.table.cuda_streams import Entrance
from dynamicemb.table.id_log import IdLog
from dynamicemb.table.rows import Found, Rows


class CudaContent(CudaMemory):
    """The part of :class:`CudaTable` that reads."""

    _wide_index: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def find(self, ids: torch.Tensor) -> Found:
        ids = self.check_ids("ids", ids)
        embeddings = torch.empty(len(ids), self.dim, dtype=self.dtype, device=self._device)
        with self.entered:
            slots = self.group.find_rows(aligned(ids), embeddings)
            there = slots >= 0
            places = slots.clamp(min=0).to(torch.int64)
            state = self.states_of(places)
            scores = self._scores(places)
        return Found(
            there,
            embeddings,
            torch.where(there[:, None], state, 0.0),
            torch.where(there if scores.dim() == 1 else there[:, None], scores, 0),
        )

    def _scores(self, slots: torch.Tensor) -> torch.Tensor:
        scores = self.scores.index_select(0, slots)
        if self.times is None:
            return scores
        return torch.stack((self.times.index_select(0, slots), scores), dim=1)

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        return self._find_slots(self.check_ids("ids", ids)).to(torch.int64)

    def _find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        return self.group.find_slots(aligned(ids), None)

    @property
    def group(self) -> CudaTableGroup:
        """This table alone as a group."""
        if self._group is None:
            # A proxy: a cycle would keep the memory until the garbage collector comes by.
            self._group = CudaTableGroup([weakref.proxy(self)])
        return self._group

    _group: CudaTableGroup | None = None

    @property
    def entered(self) -> Entrance:
        return self.group._entered

    def wide_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """int32: slots of ids in buckets too wide to scan, or -1. Waits for the device."""
        if self._wide_index is None or self._wide_index[0] != self.changes:
            slots = (self.digests != 0).nonzero().squeeze(1)
            keys, order = torch.sort(self.keys[slots])
            self._wide_index = self.changes, keys, slots[order]
        _, keys, slots = self._wide_index
        if len(keys) == 0:
            return torch.full(ids.shape, -1, dtype=torch.int32, device=self._device)
        at = torch.searchsorted(keys, ids).clamp_(max=len(keys) - 1)
        return torch.where(keys[at] == ids, slots[at], -1).to(torch.int32)

    def touched_slots(self) -> torch.Tensor:
        """bool: which slots the running batch marked."""
        return self.touched == self.mark

    def buckets_of(self, ids: torch.Tensor, buckets: int | None = None) -> torch.Tensor:
        """int64: the bucket of each id."""
        ids = aligned(ids.contiguous())
        out = torch.empty(len(ids), dtype=torch.int64, device=self._device)
        launch(
            find.buckets_kernel,
            blocks(len(ids), ELEMENTS),
            (ids, len(ids), buckets or self.buckets, out),
            (ELEMENTS,),
            warps=8,
            device=self._device,
        )
        return out

    def gather(self, slots: torch.Tensor, out: torch.Tensor, *, missing: bool) -> None:
        """out[i] = the embedding in slots[i] (int32); without a slot the missing value, or 0."""
        self.group.gather(slots, out, missing=missing)

    def check_marked(self) -> None:
        if self.known_changes.stamps is None:
            raise UsageError(f"table {self.name!r} has no marks yet: call mark_changes() first")

    def _export(
        self, batch_size: int, threshold: int | None, changed_since: int | None
    ) -> Iterator[Rows]:
        with self.entered:
            occupied = self.digests != 0
            wanted = occupied
            if threshold is not None:
                words = self.scores if self.times is None else self.times
                limit = signed(threshold) ^ -(2**63)
                wanted = (words ^ -(2**63)) >= limit
            if changed_since is not None:
                stamps = self.known_changes.stamps
                assert stamps is not None
                changed = stamps > min(changed_since, LAST_MARK)
                wanted = changed if threshold is None else wanted | changed
            slots = (wanted & occupied).nonzero().squeeze(1)
        for part in slots.split(batch_size):
            if len(part):
                yield self.rows_of(part)

    def rows_of(self, slots: torch.Tensor) -> Rows:
        """Whole rows of occupied slots (int64)."""
        embeddings = torch.empty(len(slots), self.dim, dtype=self.dtype, device=self._device)
        with self.entered:
            self.gather(slots.to(torch.int32), embeddings, missing=False)
            state = self.states_of(slots)
            return Rows(self.keys.index_select(0, slots), embeddings, state, self._scores(slots))

    def states_of(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [n, state_dim]: the optimizer states in occupied slots."""
        return self.state.index_select(0, slots)[:, : self.state_dim].contiguous()

    # ---- changes ----

    def mark_changes(self) -> int:
        with self.entered:
            if self.known_changes.stamps is None:
                self.known_changes.stamps = self._zeros(self.capacity, torch.int32)
                self.moved()
            return self.known_changes.mark()

    def log_removals(self, limit: int | None = None) -> None:
        limit = self.removal_limit(limit)
        with self.entered:
            removals = self.known_changes.removals
            if removals is None:
                self.known_changes.removals = IdLog(limit, self.mark_changes(), self._device)
                self.moved()
            else:
                removals.set_limit(limit)

    @property
    def logs_removals(self) -> bool:
        return self.known_changes.removals is not None

    def logged_removals(self, mark: int) -> tuple[int, torch.Tensor]:
        removals = self.known_changes.removals
        assert removals is not None
        with self.entered:
            return removals.known_since, removals.after(mark)

    def _log_removed(self, slots: torch.Tensor) -> None:
        """The ids in these slots (int64) leave."""
        if self.known_changes.removals is not None:
            self.known_changes.removals.add(self.known_changes.last_mark, self.keys[slots])
