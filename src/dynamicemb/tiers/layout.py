"""How the memory that a table is given is spent."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dynamicemb.errors import wrong_value
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.base import Table
from dynamicemb.table.cpu import CpuTable
from dynamicemb.tiers.base import RowLayout
from dynamicemb.tiers.cached_table import CachedTable
from dynamicemb.tiers.host import HostStore

#: Rows in memory over an ``external_storage``, where no budget is given.
DEFAULT_CACHE_ROWS = 2**17


def slot_bytes(options: DynamicEmbTableOptions, optimizer: Optimizer) -> int:
    """Memory of a slot of a table on the CPU: row, id, digest, score and stamps."""
    layout = RowLayout.of(options, optimizer)
    scalar = optimizer.kind in (OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.PARTIAL_ROWWISE_ADAM)
    columns = layout.state_dim - scalar
    embedding = -(-layout.dim * layout.dtype.itemsize // 4) * 4
    stride = -(-(embedding + 4 * columns) // 16) * 16
    return stride + 1 + 8 + 16 + 8 * (layout.score_words - 1)


def memory_budget(options: DynamicEmbTableOptions) -> int:
    """Bytes for rows on this rank: ``local_hbm_for_values``, or this rank's part of
    ``global_hbm_for_values``; 0: not said."""
    if options.local_hbm_for_values:
        return options.local_hbm_for_values
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return -(-options.global_hbm_for_values // ranks)


def rows_within(budget: int, options: DynamicEmbTableOptions, optimizer: Optimizer) -> int:
    """Slots that fit ``budget`` bytes, in whole buckets; an error if none does."""
    width = min(options.bucket_capacity, options.max_capacity or 1)
    width = -(-width // 16) * 16
    bucket = width * slot_bytes(options, optimizer)
    if budget < bucket:
        raise wrong_value(
            "local_hbm_for_values",
            budget,
            f"at least {bucket} bytes, one bucket of {width} slots (or a smaller bucket_capacity)",
        )
    return budget // bucket * width


def create_cached_table(options: DynamicEmbTableOptions, settings: dict[str, Any]) -> Table:
    """The table of options that have ``caching`` or ``external_storage``."""
    optimizer = settings["optimizer"] or Optimizer(OptimizerKind.SGD, OptimizerArgs())
    if not options.training:
        optimizer = Optimizer(OptimizerKind.SGD, OptimizerArgs())
    budget = memory_budget(options)
    most = -(-(options.max_capacity or 1) // 16) * 16
    if budget:
        rows = rows_within(budget, options, optimizer)
    elif options.external_storage is None:
        raise wrong_value(
            "local_hbm_for_values",
            0,
            "with caching=True a positive number of bytes: the memory of the cache",
        )
    else:
        rows = min(DEFAULT_CACHE_ROWS, 2 * most)
    if options.external_storage is None:
        if rows >= most:  # all of it fits
            return CpuTable(options, **settings)
        return CachedTable(options, cache_rows=rows, make_store=HostStore, **settings)
    return CachedTable(options, cache_rows=rows, make_store=options.external_storage, **settings)
