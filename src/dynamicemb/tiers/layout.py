"""Which table serves options that ask for a store below it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from dynamicemb.errors import wrong_value
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbTableOptions,
    align_to_table_size,
)
from dynamicemb.table.base import Table
from dynamicemb.table.create import create_table
from dynamicemb.tiers.cached_table import CachedTable
from dynamicemb.tiers.host import HostStore
from dynamicemb.tiers.sizing import least_bytes, memory_budget, rows_within, table_bytes

#: Rows in memory over an ``external_storage``, where no budget is given.
DEFAULT_CACHE_ROWS = 2**17


def create_cached_table(
    options: DynamicEmbTableOptions, settings: dict[str, Any], device: torch.device
) -> Table:
    """The table of options that have ``caching`` or ``external_storage``."""
    optimizer = _optimizer_of_rows(options, settings["optimizer"])
    budget = memory_budget(options)
    least = least_bytes(options, optimizer, device=device.type, cache=True)
    if 0 < budget < least:
        warnings.warn(
            f"table {settings['name']!r} has {budget} bytes for rows in use (local_hbm_for_values, "
            f"or this rank's part of global_hbm_for_values); one bucket takes {least} bytes, which "
            "are used",
            UserWarning,
            stacklevel=3,
        )
    rows = cache_rows(options, optimizer, device.type)
    if rows is None:
        return create_table(replace(options, caching=False), **settings, device=device)
    make_store: Any = options.external_storage or HostStore
    return CachedTable(options, cache_rows=rows, make_store=make_store, **settings, device=device)


def _optimizer_of_rows(options: DynamicEmbTableOptions, optimizer: Optimizer | None) -> Optimizer:
    """Whose state rows have."""
    if optimizer is None or not options.training:
        return Optimizer(OptimizerKind.SGD, OptimizerArgs())
    return optimizer


def cache_rows(
    options: DynamicEmbTableOptions, optimizer: Optimizer, device: str = "cpu"
) -> int | None:
    """Slots of the cache of options that have ``caching`` or ``external_storage``: as many as the
    budget holds, at least one bucket. ``None``: every row fits, and there is no cache."""
    budget = memory_budget(options)
    most = -(-(options.max_capacity or 1) // 16) * 16
    if budget:
        budget = max(budget, least_bytes(options, optimizer, device=device, cache=True))
        rows = rows_within(budget, options, optimizer, device=device, cache=True)
    elif options.external_storage is None:
        raise wrong_value(
            "local_hbm_for_values",
            0,
            "with caching=True a positive number of bytes: the memory of the cache",
        )
    else:
        rows = min(DEFAULT_CACHE_ROWS, 2 * most)
    return None if options.external_storage is None and rows >= most else rows


def memory_of(
    options: DynamicEmbTableOptions, optimizer: Optimizer, device: str = "cpu"
) -> tuple[int, int]:
    """(bytes on the table's device, bytes of main memory below it) of a full table with these
    options, whatever they ask for. An admission counter is not counted, nor what stores but
    main memory take."""
    assert options.max_capacity is not None
    optimizer = _optimizer_of_rows(options, optimizer)
    width = 16 if options.bucket_capacity == MAX_BUCKET_CAPACITY else options.bucket_capacity
    slots = align_to_table_size(options.max_capacity, width)
    rows = None
    if options.caching or options.external_storage is not None:
        rows = cache_rows(options, optimizer, device)
    if rows is None:
        return table_bytes(slots, options, optimizer, device=device), 0
    below = 0
    if options.external_storage is None or options.external_storage is HostStore:
        below = table_bytes(slots, options, optimizer)
    return table_bytes(rows, options, optimizer, device=device, cache=True), below
