"""How often ids without a row were seen."""

from __future__ import annotations

import torch

from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbTableOptions
from dynamicemb.table.base import Table
from dynamicemb.table.engine import TRAIN, _engine, engine_initializer, threads
from dynamicemb.table.numbers import LFU_STRATEGY


class IdCounter:
    """Occurrences of ids that have no row. They outlive the row: an id that was admitted and
    evicted is admitted again at once. When a bucket is full, its smallest count goes."""

    def __init__(self, capacity: int, bucket_capacity: int) -> None:
        options = DynamicEmbTableOptions(
            dim=1, max_capacity=capacity, bucket_capacity=bucket_capacity
        )
        width, _, buckets = Table.bucket_layout_of(options)
        self.table = _engine.Table(
            dim=0,
            type=0,
            init_buckets=buckets,
            max_buckets=buckets,
            width=width,
            max_load_factor=0.0,
            strategy=LFU_STRATEGY,
            initializer=engine_initializer(DynamicEmbInitializerArgs(), 0),
            missing_value=0.0,
            state_columns=0,
            state_scalar=False,
            initial_state=[],
        )

    def add(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Count distinct ids."""
        batch = _engine.Batch(self.table, TRAIN, ids.data_ptr(), len(ids), counts.data_ptr())
        _engine.run_batches([batch], [(0, 0)], threads())

    def counts(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n]: how often each id was counted."""
        found = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        counts = torch.empty(len(ids), dtype=torch.int64, device="cpu")
        self.table.read(
            ids.data_ptr(), len(ids), threads(), found.data_ptr(), 0, 0, counts.data_ptr()
        )
        return counts

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, counts), both int64 [n]."""
        ids = torch.empty(self.table.size, dtype=torch.int64, device="cpu")
        counts = torch.empty_like(ids)
        self.table.export_rows(
            0, len(ids), 0, None, threads(), ids.data_ptr(), 0, 0, counts.data_ptr()
        )
        return ids, counts

    def restore(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Start again from these counts."""
        self.table.clear()
        if len(ids):
            self.add(ids.contiguous(), counts.contiguous())
