"""Which implementation serves a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynamicemb.errors import InvalidArgumentError, wrong_type
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.base import Table
from dynamicemb.table.group import TableGroup

Settings = dict[str, Any]

# What makes a table of options that ask for a store below it; the tier layer says so.
_make_with_store: Callable[[DynamicEmbTableOptions, Settings, torch.device], Table] | None = None


def make_with_store(
    make: Callable[[DynamicEmbTableOptions, Settings, torch.device], Table],
) -> None:
    """Let ``make`` serve options with ``caching`` or ``external_storage``."""
    global _make_with_store
    _make_with_store = make


def create_table(
    options: DynamicEmbTableOptions,
    *,
    optimizer: Optimizer | None = None,
    name: str = "table",
    seed: int | None = None,
    clock: Callable[[], int] | None = None,
    device: torch.device | str | None = None,
) -> Table:
    """Make an empty table.

    ``options`` must have ``dim`` and ``max_capacity``. ``optimizer`` fixes the state a row carries
    (default: plain SGD, no state). ``seed`` governs new rows; ``None`` draws one from torch's
    generator, so that ``torch.manual_seed`` does. ``clock`` gives the TIMESTAMP score. ``device``:
    "cpu" (needs the C++ extension), or "cuda", "cuda:1", ... (needs Triton); default: torch's
    default device.
    """
    if not isinstance(options, DynamicEmbTableOptions):
        raise wrong_type("options", options, "a DynamicEmbTableOptions")
    settings: Settings = {"optimizer": optimizer, "name": name, "seed": seed, "clock": clock}
    where = _checked_device(device)
    if options.caching or options.external_storage is not None:
        assert _make_with_store is not None, "dynamicemb imports the tier layer"
        return _make_with_store(options, settings, where)
    return _new_table(where, options, settings)


def _new_table(device: torch.device, options: DynamicEmbTableOptions, settings: Settings) -> Table:
    # Imported here: a machine may have the C++ extension or Triton alone.
    if device.type == "cuda":
        from dynamicemb.table.cuda import CudaTable

        return CudaTable(options, **settings, device=device)
    from dynamicemb.table.cpu import CpuTable

    return CpuTable(options, **settings)


def create_group(tables: Sequence[Table]) -> TableGroup:
    """Tables of one device that are looked up together; each once, since a batch of a table must
    see what another one did to it."""
    if not tables:
        raise InvalidArgumentError("tables is empty; allowed: at least one table")
    if len({id(table) for table in tables}) < len(tables):
        names = [table.name for table in tables]
        raise InvalidArgumentError(f"tables {names} have one table twice; allowed: each once")
    for table in tables:
        if table.device != tables[0].device:
            raise wrong_type("tables", table, "tables of one device")
    for table in tables:
        if type(table) is not type(tables[0]):  # a mixture: one with a store below knows both
            return next(t for t in tables if t.has_store).make_group(tables)
    return tables[0].make_group(tables)


def _checked_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = torch.get_default_device()
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        known = torch.device("meta")
    if known.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device is {str(device)!r}; allowed: 'cpu', 'cuda', 'cuda:0'")
    return known
