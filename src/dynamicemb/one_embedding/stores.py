"""Where rows are kept: dictionaries that say it, and what they mean."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamicemb.errors import check_choice, check_integer, check_path, wrong_type, wrong_value
from dynamicemb.tiers import RemoteStore
from dynamicemb.tiers.remote.url import redacted

PersistentPath = str | Sequence[str]
StoreOptionsDict = dict[str, Any]

_ON_FULL = ("error", "grow")


def make_device_mem_store_options(
    persistent_path: PersistentPath,
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    *,
    on_full: str = "error",
) -> StoreOptionsDict:
    """All rows in the memory of the module's device: a GPU's, or main memory on a CPU.

    Args:
        persistent_path: the folder for snapshots; ranks have a subfolder each. Or a list with one
            folder per rank.
        capacity: rows, over all ranks.
        size_factor: floats of a row with its optimizer state, as a multiple of ``embedding_dim``:
            1 for SGD, 2 for SGD with momentum and Adagrad, 3 for Adam, AdamW and Ftrl.
        storage_dim: the same as a number of floats; -1: ``size_factor`` says it.
        physical_block_size: 512 or 4096, the unit of the disk's reads and writes.
        on_full: what happens when new ids would make more rows than ``capacity``: "error" (an
            ``InsertionError`` before anything changes) or "grow".
    """
    return {
        "kv_store": {
            "caches": [_full(_checked_capacity(capacity), "device")],
            "persistent_table": _persistent(persistent_path, physical_block_size, capacity),
        },
        **_sizes(size_factor, storage_dim),
        "on_full": _checked_on_full(on_full),
    }


def make_cached_ssd_store_options(
    cache_budget_mb: int,
    persistent_path: PersistentPath,
    capacity: int | None = None,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    host_cache_budget_mb: int = 0,
) -> StoreOptionsDict:
    """All rows on an SSD; those in use in ``cache_budget_mb`` MiB of the device's memory, with a
    second cache of ``host_cache_budget_mb`` MiB in main memory below it.

    The budgets are each rank's, and hold everything that is kept of the rows. ``capacity`` is a
    hint without effect: the SSD's table grows as rows come. The other arguments are those of
    :func:`make_device_mem_store_options`.
    """
    device = check_integer("cache_budget_mb", cache_budget_mb, minimum=0)
    host = check_integer("host_cache_budget_mb", host_cache_budget_mb, minimum=0)
    if device == host == 0:
        raise wrong_value("cache_budget_mb", 0, "more than 0, or a host_cache_budget_mb")
    budgets = {"device": device, "host": host}
    hint = 0 if capacity is None else check_integer("capacity", capacity, minimum=0)
    return {
        "kv_store": {
            "caches": [_lru(mb, kind) for kind, mb in budgets.items() if mb],
            "persistent_table": _persistent(persistent_path, physical_block_size, hint),
        },
        **_sizes(size_factor, storage_dim),
    }


def make_cached_host_mem_store_options(
    cache_budget_mb: int,
    persistent_path: PersistentPath,
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    *,
    on_full: str = "error",
) -> StoreOptionsDict:
    """All rows in main memory; those in use in ``cache_budget_mb`` MiB of the device's memory.

    The other arguments are those of :func:`make_device_mem_store_options`.
    """
    budget = check_integer("cache_budget_mb", cache_budget_mb, minimum=1)
    return {
        "kv_store": {
            "caches": [_lru(budget, "device"), _full(_checked_capacity(capacity), "host")],
            "persistent_table": _persistent(persistent_path, physical_block_size, capacity),
        },
        **_sizes(size_factor, storage_dim),
        "on_full": _checked_on_full(on_full),
    }


def make_cached_remote_store_options(
    cache_budget_mb: int,
    url: str,
    persistent_path: PersistentPath,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    host_cache_budget_mb: int = 0,
) -> StoreOptionsDict:
    """All rows at a server, such as Redis, under the embedding's name; those in use in
    ``cache_budget_mb`` MiB of the device's memory, with a second cache of ``host_cache_budget_mb``
    MiB in main memory below it.

    Args:
        url: of the server; see docs/parameter_server.md.
        persistent_path: the folder for snapshots. With ``resume=True`` an embedding starts from the
            newest one there; if there is none, with the rows that the server has.
    The other arguments are those of :func:`make_cached_ssd_store_options`.
    """
    options = make_cached_ssd_store_options(
        cache_budget_mb,
        persistent_path,
        None,
        size_factor,
        storage_dim,
        physical_block_size,
        host_cache_budget_mb,
    )
    RemoteStore.at(url, table="rows")  # what is wrong with a URL is said here
    options["kv_store"]["remote"] = {"url": url}
    return options


def options_text(options: Mapping[str, Any]) -> str:
    """Store options as JSON, without the credentials of a URL."""
    kv_store = dict(options["kv_store"])
    if "remote" in kv_store:
        kv_store["remote"] = {"url": redacted(kv_store["remote"]["url"])}
    return json.dumps({**options, "kv_store": kv_store}, sort_keys=True)


def _full(capacity: int, kind: str) -> dict[str, Any]:
    return {"policy": "full", "capacity": capacity, "value_memory_kind": kind}


def _lru(budget_mb: int, kind: str) -> dict[str, Any]:
    return {"policy": "lru", "cache_memory_budget_mb": budget_mb, "value_memory_kind": kind}


def _persistent(path: Any, block: int, hint: int) -> dict[str, Any]:
    if not isinstance(path, (str, os.PathLike, list, tuple)) or not path:
        raise wrong_type("persistent_path", path, "a folder, or a list with one folder per rank")
    check_choice("physical_block_size", block, (512, 4096))
    if isinstance(path, (list, tuple)):
        plain: str | list[str] = [_folder(one) for one in path]
    else:
        plain = _folder(path)
    return {"path": plain, "physical_block_size": block, "capacity_hint": hint}


def _folder(path: Any) -> str:
    return check_path("persistent_path", path, "a folder, or a list with one folder per rank")


def _sizes(size_factor: int, storage_dim: int) -> dict[str, int]:
    check_integer("storage_dim", storage_dim, minimum=-1)
    return {
        "size_factor": check_integer("size_factor", size_factor, minimum=1),
        "storage_dim": storage_dim,
    }


def _checked_capacity(capacity: Any) -> int:
    return check_integer("capacity", capacity, minimum=1)


def _checked_on_full(on_full: object) -> str:
    check_choice("on_full", on_full, _ON_FULL)
    return str(on_full)


@dataclass(frozen=True)
class StoreOptions:
    """What a dictionary of the functions above says.

    capacity: rows that a full store holds, over all ranks; ``None``: all rows are on the SSD, or at
    the server of ``url``.
    device_cache_mb, host_cache_mb: of caches; 0: there is none.
    """

    path: str | tuple[str, ...]
    physical_block_size: int
    capacity: int | None
    device_cache_mb: int
    host_cache_mb: int
    size_factor: int
    storage_dim: int
    grows: bool
    url: str | None = field(default=None, repr=False)

    @property
    def caches_mb(self) -> list[int]:
        """The budgets of the caches, from the fastest on."""
        return [mb for mb in (self.device_cache_mb, self.host_cache_mb) if mb]

    @property
    def in_device_memory(self) -> bool:
        """Whether every row is in the memory of the device."""
        return self.capacity is not None and not self.device_cache_mb

    @property
    def on_ssd(self) -> bool:
        """Whether the SSD has every row at all times, not only those of snapshots."""
        return self.capacity is None and self.url is None

    @property
    def outlives_the_table(self) -> bool:
        """Whether rows stay where they are when the table goes."""
        return self.capacity is None

    @staticmethod
    def parse(options: object) -> StoreOptions:
        """Read ``options``, which stay as they are."""
        allowed = "a dictionary of make_device_mem_store_options and the like"
        if not isinstance(options, Mapping):
            raise wrong_type("store_options", options, allowed)
        try:
            kv_store = options["kv_store"]
            table = kv_store["persistent_table"]
            caches = list(kv_store["caches"])
            checked = _persistent(table["path"], table["physical_block_size"], 0)
            sizes = _sizes(options["size_factor"], options["storage_dim"])
            grows = _checked_on_full(options.get("on_full", "error")) == "grow"
            capacity, budgets = _parse_caches(caches)
            url = kv_store["remote"]["url"] if "remote" in kv_store else None
        except (KeyError, TypeError, AttributeError) as error:
            raise wrong_value("store_options", sorted(map(str, options)), allowed) from error
        if url is not None and capacity is not None:
            raise wrong_value("caches of store_options", "full", "lru, where rows are at a server")
        path = checked["path"]
        return StoreOptions(
            path=path if isinstance(path, str) else tuple(path),
            physical_block_size=checked["physical_block_size"],
            capacity=capacity,
            device_cache_mb=budgets.get("device", 0),
            host_cache_mb=budgets.get("host", 0),
            grows=grows,
            url=url,
            **sizes,
        )


def _parse_caches(caches: list[Any]) -> tuple[int | None, dict[str, int]]:
    """(capacity of the full one, budgets of the others by their memory)."""
    kinds = [(one["policy"], one["value_memory_kind"]) for one in caches]
    known = (
        [("full", "device")],
        [("lru", "device")],
        [("lru", "host")],
        [("lru", "device"), ("lru", "host")],
        [("lru", "device"), ("full", "host")],
    )
    if kinds not in known:
        raise wrong_value("caches of store_options", kinds, "those of a make_..._store_options")
    capacity = None
    if kinds[-1][0] == "full":
        capacity = _checked_capacity(caches[-1]["capacity"])
    budgets = {
        kind: check_integer("cache_memory_budget_mb", one["cache_memory_budget_mb"], minimum=1)
        for (policy, kind), one in zip(kinds, caches, strict=True)
        if policy == "lru"
    }
    return capacity, budgets
