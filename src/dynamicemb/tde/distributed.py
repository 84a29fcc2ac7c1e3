"""What ranks tell each other about a batch. Every rank gives ids the same slots, since every rank
sees the ids of all and a slot map is a function of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dynamicemb.errors import UsageError

#: What a rank has: a batch, nothing more, or an error.
BATCH, END, FAILED = 0, 1, 2


class Exchange:
    """Ids of all ranks, over a gloo group of its own. All ranks of the process group make it, in
    the same order. Without a process group, or with one rank, there is nothing to exchange."""

    def __init__(self) -> None:
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def gather(self, parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """[rank][part]: the int64 tensors of every rank, which all have as many. UsageError if
        another rank has none, or failed."""
        if self._group is None:
            return [list(parts)]
        sizes = self._tell(BATCH, [len(one) for one in parts])
        totals = [sum(one) for one in sizes]
        padded = torch.zeros(max(1, *totals), dtype=torch.int64, device="cpu")
        padded[: totals[self.rank]] = torch.cat(
            [torch.empty(0, dtype=torch.int64, device="cpu"), *parts]
        )
        received = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(received, padded, group=self._group)
        return [
            list(ids[:total].split(counts))
            for ids, total, counts in zip(received, totals, sizes, strict=True)
        ]

    def end(self, parts: int) -> None:
        """This rank has no more batches. UsageError if another has."""
        if self._group is not None:
            self._tell(END, [0] * parts)

    def fail(self, parts: int) -> None:
        """This rank failed and takes no part in the batch."""
        if self._group is not None:
            try:
                self._tell(FAILED, [0] * parts)
            except UsageError:
                return  # the others see it too, and this rank has an error of its own

    def _tell(self, status: int, counts: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor([status, *counts], dtype=torch.int64, device="cpu")
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self._group)
        said = [int(one[0]) for one in everyone]
        if status != FAILED and FAILED in said:
            raise UsageError(
                f"rank {said.index(FAILED)} failed while it made its batch ready; see its error"
            )
        if status != FAILED and len(set(said)) > 1:
            raise UsageError(
                f"rank {said.index(END)} has no more batches and rank {said.index(BATCH)} has; "
                "allowed: as many on every rank"
            )
        return [one[1:].tolist() for one in everyone]
