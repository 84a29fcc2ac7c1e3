"""Dumping and loading under the import path that existing code uses."""

from __future__ import annotations

from torch import nn

from dynamicemb.checkpoint import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.nn.discovery import find_collections, walk_collections
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


def get_dynamic_emb_module(model: nn.Module) -> list[DynamicModule]:
    """The dynamic modules of ``model``, itself included, each once: those that are children, and
    those that sharded collections keep beside the module tree."""
    return check_emb_collection_modules(model, [])


def check_emb_collection_modules(
    module: nn.Module, ret_list: list[DynamicModule], visited: set[int] | None = None
) -> list[DynamicModule]:
    """``ret_list`` with the dynamic modules of ``module`` appended that it does not have yet.

    ``visited``: ids (Python's ``id``) of modules to leave out; those found are added.
    """
    visited = set() if visited is None else visited
    for modules in find_collections(module).values():
        for one in modules:
            if id(one) not in visited and not any(one is other for other in ret_list):
                ret_list.append(one)
            visited.add(id(one))
    return ret_list
