"""Dumping and loading under the import path that existing code uses."""

from __future__ import annotations

from torch import nn

from dynamicemb.checkpoint import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.nn.discovery import walk_collections
from dynamicemb.nn.module import DynamicModule

__all__ = [
    "DynamicEmbDump",
    "DynamicEmbLoad",
    "check_emb_collection_modules",
    "find_sharded_modules",
    "get_dynamic_emb_module",
]


def find_sharded_modules(module: nn.Module, path: str = "") -> list[tuple[str, str, nn.Module]]:
    """(path, last name, collection) of every collection of dynamic tables in ``module``; see
    :func:`dynamicemb.nn.discovery.find_collections`."""
    return [
        (path + where, where.rpartition(".")[2], one) for where, one in walk_collections(module)
    ]


def get_dynamic_emb_module(module: nn.Module) -> list[DynamicModule]:
    """The dynamic modules inside ``module``, itself included."""
    return [one for one in module.modules() if isinstance(one, DynamicModule)]


def check_emb_collection_modules(
    module: nn.Module, ret_list: list[DynamicModule]
) -> list[DynamicModule]:
    """``ret_list`` with the dynamic modules inside ``module`` appended."""
    ret_list.extend(one for one in get_dynamic_emb_module(module) if one not in ret_list)
    return ret_list
