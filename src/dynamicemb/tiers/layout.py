"""Which table serves options that ask for a store below it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dynamicemb.errors import wrong_value
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.base import Table
from dynamicemb.table.create import create_table
from dynamicemb.tiers.cached_table import CachedTable
from dynamicemb.tiers.host import HostStore
from dynamicemb.tiers.sizing import memory_budget, rows_within

#: Rows in memory over an ``external_storage``, where no budget is given.
DEFAULT_CACHE_ROWS = 2**17


def create_cached_table(
    options: DynamicEmbTableOptions, settings: dict[str, Any], device: torch.device
) -> Table:
    """The table of options that have ``caching`` or ``external_storage``."""
    optimizer = settings["optimizer"] or Optimizer(OptimizerKind.SGD, OptimizerArgs())
    if not options.training:
        optimizer = Optimizer(OptimizerKind.SGD, OptimizerArgs())
    budget = memory_budget(options)
    most = -(-(options.max_capacity or 1) // 16) * 16
    if budget:
        rows = rows_within(budget, options, optimizer, device=device.type)
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
            return create_table(replace(options, caching=False), **settings, device=device)
        make_store: Any = HostStore
    else:
        make_store = options.external_storage
    return CachedTable(options, cache_rows=rows, make_store=make_store, **settings, device=device)
