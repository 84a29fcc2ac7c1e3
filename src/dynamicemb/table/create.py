"""Which implementation serves a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dynamicemb.errors import InvalidArgumentError, wrong_type
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.base import Table, TableGroup
from dynamicemb.table.cpu import CpuTable, CpuTableGroup


def create_table(
    options: DynamicEmbTableOptions,
    *,
    optimizer: Optimizer | None = None,
    name: str = "table",
    seed: int | None = None,
    clock: Callable[[], int] | None = None,
    device: torch.device | str = "cpu",
) -> Table:
    """Make an empty table.

    ``options`` must have ``dim`` and ``max_capacity``. ``optimizer`` fixes the state a row carries
    (default: plain SGD, no state). ``seed`` governs new rows; ``None`` draws one from torch's
    generator, so that ``torch.manual_seed`` does. ``clock`` gives the TIMESTAMP score.
    """
    if not isinstance(options, DynamicEmbTableOptions):
        raise wrong_type("options", options, "a DynamicEmbTableOptions")
    _check_device(device)
    return CpuTable(options, optimizer=optimizer, name=name, seed=seed, clock=clock)


def create_group(tables: Sequence[Table]) -> TableGroup:
    """Tables of one device that are looked up together."""
    if not tables:
        raise InvalidArgumentError("tables is empty; allowed: at least one table")
    for table in tables:
        if not isinstance(table, CpuTable):
            raise wrong_type("tables", table, "tables of one device")
    return CpuTableGroup([table for table in tables if isinstance(table, CpuTable)])


def _check_device(device: torch.device | str) -> None:
    try:
        known = torch.device(device).type == "cpu"
    except (RuntimeError, TypeError):
        known = False
    if not known:
        raise InvalidArgumentError(
            f"device is {str(device)!r}; allowed: 'cpu' (this version has no GPU tables)"
        )
