"""How often ids without a row were seen, counted on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dynamicemb.options import DynamicEmbScoreStrategy, DynamicEmbTableOptions

if TYPE_CHECKING:
    from dynamicemb.table.cuda import CudaTable


def counting_options(capacity: int, bucket_capacity: int) -> DynamicEmbTableOptions:
    """Those of a table whose scores are the counts."""
    return DynamicEmbTableOptions(
        dim=1,
        max_capacity=capacity,
        bucket_capacity=bucket_capacity,
        max_load_factor=0.0,
        score_strategy=DynamicEmbScoreStrategy.LFU,
    )


class CudaIdCounter:
    """See :class:`dynamicemb.table.counter.IdCounter`."""

    def __init__(self, table: CudaTable) -> None:
        """``table`` has the options above, and no rows."""
        self.table = table

    def add(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Count distinct ids."""
        self.table.group.insert_batch(
            ids, None, [(0, 0)], counts=counts, codes=None, train=True, distinct=True
        )

    def counts(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n]: how often each id was counted."""
        with self.table.entered:
            slots = self.table.find_slots(ids)
            counted = self.table.scores[slots.clamp(min=0)]
            return torch.where(slots >= 0, counted, 0)

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, counts), both int64 [n]."""
        with self.table.entered:
            slots = (self.table.digests != 0).nonzero().squeeze(1)
            return self.table.keys[slots], self.table.scores[slots]

    def restore(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Start again from these counts."""
        with self.table.entered:
            self.table.clear()
            if len(ids):
                self.add(ids.contiguous(), counts.contiguous())
