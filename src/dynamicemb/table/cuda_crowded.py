"""Slots for newcomers by sorting, where lists of buckets do not serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.kernels.layout import EVICTED, FAILED, GONE
from dynamicemb.table.numbers import NO_EVICTION_STRATEGY

if TYPE_CHECKING:
    from dynamicemb.table.cuda_batch import Batch
    from dynamicemb.table.cuda_layout import TableClass


def place_sorted(
    batch: Batch,
    t: int,
    one: TableClass,
    found: torch.Tensor,
    choice: torch.Tensor,
) -> None:
    """What ``place_kernel`` chooses, by sorting, for buckets that are wide or get many newcomers.
    Waits for the device."""
    table = batch.layout.owners[t]
    used = int(batch.count)
    missing = found[:used] == GONE.value
    if not batch.one:
        missing &= batch.tables[:used] == t
    entries = missing.nonzero().squeeze(1)
    if len(entries) == 0:
        return
    bucket, order = torch.sort(table.buckets_of(batch.ids[entries]), stable=True)
    entries = entries[order]
    rank = torch.arange(len(bucket), device=batch.device) - torch.searchsorted(bucket, bucket)
    empty = table.digests == 0
    free, free_start, free_count = _by_bucket(empty.nonzero().squeeze(1), one.width, table)
    takes = rank < free_count[bucket]
    at = (free_start[bucket] + rank).clamp(max=max(len(free) - 1, 0))
    slot = torch.full_like(bucket, FAILED.value)
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
    batch.fresh[entries] = torch.where(evicts, EVICTED.value, 0).to(torch.uint8)


def _by_bucket(
    slots: torch.Tensor, width: int, table: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots grouped by bucket in their order, where each bucket starts, how many it has)."""
    bucket, order = torch.sort(torch.div(slots, width, rounding_mode="floor"), stable=True)
    counts = torch.bincount(bucket, minlength=table.buckets)
    return slots[order], torch.cumsum(counts, 0) - counts, counts
