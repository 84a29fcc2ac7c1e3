"""How many rows fit a memory budget, everything that a table keeps of them included."""

from __future__ import annotations

import torch.distributed as dist

from dynamicemb.errors import check_integer, wrong_value
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    align_to_table_size,
)
from dynamicemb.table.base import MAX_SLOTS
from dynamicemb.table.numbers import state_layout
from dynamicemb.tiers.base import RowLayout
from dynamicemb.tiers.row_numbers import NUMBER_BYTES

_WIDEST_SCAN = 1024  # wider buckets are found through a map
_CUDA_UNIT = 512  # of torch's allocator


def memory_budget(options: DynamicEmbTableOptions) -> int:
    """Bytes for rows on this rank: ``local_hbm_for_values``, or this rank's part of
    ``global_hbm_for_values``; 0: not said."""
    if options.local_hbm_for_values:
        return options.local_hbm_for_values
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return -(-options.global_hbm_for_values // ranks)


def rows_within(
    budget: int,
    options: DynamicEmbTableOptions,
    optimizer: Optimizer,
    *,
    device: str = "cpu",
    name: str = "local_hbm_for_values",
    cache: bool = False,
) -> int:
    """The slots of the largest table that takes at most ``budget`` bytes when it is full.

    Counted is all that :func:`table_bytes` counts. ``name``: of the budget, for the error if not
    even one bucket fits.
    """
    budget = check_integer(name, budget, minimum=1)
    width = _least_width(options)
    least = least_bytes(options, optimizer, device=device, cache=cache)
    if budget < least:
        raise wrong_value(
            name,
            budget,
            f"at least {least} bytes, one bucket of {width} slots (or a smaller bucket_capacity)",
        )
    low, high = 1, MAX_SLOTS // width  # whole buckets; `low` of them fit
    while low < high:
        middle = (low + high + 1) // 2
        if table_bytes(middle * width, options, optimizer, device=device, cache=cache) <= budget:
            low = middle
        else:
            high = middle - 1
    return low * width


def least_bytes(
    options: DynamicEmbTableOptions,
    optimizer: Optimizer,
    *,
    device: str = "cpu",
    cache: bool = False,
) -> int:
    """Memory of a full table of one bucket."""
    return table_bytes(_least_width(options), options, optimizer, device=device, cache=cache)


def _least_width(options: DynamicEmbTableOptions) -> int:
    if options.bucket_capacity == MAX_BUCKET_CAPACITY:
        return align_to_table_size(1)  # one bucket, in steps of this many slots
    return options.bucket_capacity


def table_bytes(
    slots: int,
    options: DynamicEmbTableOptions,
    optimizer: Optimizer,
    *,
    device: str = "cpu",
    cache: bool = False,
) -> int:
    """Memory of a full table of ``slots`` slots: rows with optimizer state, ids, scores, digests
    and stamps. ``device``: "cpu" or "cuda". ``cache``: it is the cache of a table with these
    options. An admission counter is not counted."""
    layout = RowLayout.of(options, optimizer)
    one_bucket = options.bucket_capacity == MAX_BUCKET_CAPACITY
    width = slots if one_bucket else options.bucket_capacity
    parts = [slots, 8 * slots]  # digests, ids
    if layout.score_words == 2:
        parts.append(8 * slots)
    if cache and options.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION:
        parts += [size * slots for size in NUMBER_BYTES]
    if device == "cuda":
        state = layout.state_dim if layout.state_dim < 2 else _round_up(layout.state_dim, 4)
        parts += [8 * slots, slots, 4 * slots]  # scores, marks, stamps
        parts += [8 * (slots // width), 32 * (slots // width)]  # heads and queues of buckets
        parts += [slots * _round_up(layout.dim * layout.dtype.itemsize, 16), slots * 4 * state]
        return sum(_round_up(part, _CUDA_UNIT) for part in parts)
    columns, _, _ = state_layout(optimizer, layout.dim)  # the others are in the slot's record
    embedding = _round_up(layout.dim * layout.dtype.itemsize, 4)
    parts += [16 * slots, slots * _round_up(embedding + 4 * columns, 16)]  # records, rows
    if width > _WIDEST_SCAN:
        parts.append(4 << (2 * slots - 1).bit_length())
    return sum(parts)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
