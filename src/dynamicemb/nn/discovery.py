"""Finding the dynamic tables of a model, by the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from dynamicemb.errors import wrong_type, wrong_value
from dynamicemb.nn.module import DynamicModule
from dynamicemb.table import Table

#: Attributes under which wrappers keep the wrapped module; they are no part of a path. "module" is
#: also a likely name for a child of a model's own, so it counts only in the wrappers named below.
_WRAPPER_ATTRIBUTES = frozenset(
    {
        "_dmp_wrapped_module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
    }
)
_WRAPPER_CLASSES = frozenset(
    {
        "DistributedDataParallel",
        "DataParallel",
        "DistributedModelParallel",
        "DMPCollection",
        "FullyShardedDataParallel",
    }
)

#: ``{collection path: [its modules]}``.
Collections = dict[str, list[DynamicModule]]


def find_collections(model: nn.Module) -> Collections:
    """The dynamic modules of ``model``, by the path of their collection, in the order of the model.

    A collection is a module whose class has ``is_dynamic_collection = True``, or a
    :class:`DynamicModule` outside of one. Its path is "model" and the names of the children that
    lead to it, joined by dots; wrappers (``DistributedModelParallel``, ``DistributedDataParallel``,
    a compiled model, ...) add nothing. A module that is reached twice has its first path.
    """
    found: Collections = {}
    for path, module in walk_collections(model):
        # A sharded collection keeps its modules out of the module tree, and lists them itself.
        listed = getattr(module, "dynamic_modules", None)
        modules = listed() if listed else _dynamic(module)
        if modules:
            found[path] = modules
    return found


def walk_collections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, collection) of :func:`find_collections`; a collection may have no dynamic module."""
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module")
    return _walk(model, "model", set())


def _dynamic(module: nn.Module) -> list[DynamicModule]:
    return [one for one in module.modules() if isinstance(one, DynamicModule)]


def tables_of(modules: Sequence[DynamicModule]) -> dict[str, tuple[DynamicModule, Table]]:
    """The tables of one collection, by name."""
    tables: dict[str, tuple[DynamicModule, Table]] = {}
    for module in modules:
        for table in module.tables:
            if table.name in tables and tables[table.name][1] is not table:
                raise wrong_value(
                    "table name", table.name, "different names for the tables of one collection"
                )
            tables[table.name] = (module, table)
    return tables


def check_written(modules: Iterable[DynamicModule]) -> None:
    """Call :meth:`DynamicModule.check_written` of every module; do so before rows are read."""
    for module in modules:
        module.check_written()


def accept_replaced(replaced: Iterable[tuple[DynamicModule, Table]]) -> None:
    """Accept what was written to the handle of every module all of whose tables were replaced."""
    tables: dict[DynamicModule, list[Table]] = {}
    for module, table in replaced:
        tables.setdefault(module, []).append(table)
    for module, new in tables.items():
        if all(any(one is table for one in new) for table in module.tables):
            module.accept_written()


def select_tables(
    collections: Collections, table_names: Mapping[str, Sequence[str]] | Sequence[str] | None
) -> dict[str, dict[str, tuple[DynamicModule, Table]]]:
    """The tables that ``table_names`` chooses: ``{path: {table: (module, table)}}``.

    ``None``: all. ``{collection: [table, ...]}``: these; a collection is named by its path or the
    last part of it, and one that is not named is left out. ``[table, ...]``: these, wherever they
    are. A name that does not exist is an ``InvalidArgumentError``.
    """
    everything = {path: tables_of(modules) for path, modules in collections.items()}
    if table_names is None:
        return everything
    if isinstance(table_names, Mapping):
        chosen: dict[str, dict[str, tuple[DynamicModule, Table]]] = {}
        for collection, names in table_names.items():
            for path in resolve_collection(everything, collection):
                tables = everything[path]
                for name in _names("table_names", names):
                    if name not in tables:
                        raise wrong_value(
                            f"a table of {collection!r} in table_names", name, ", ".join(tables)
                        )
                    chosen.setdefault(path, {})[name] = tables[name]
        return chosen
    wanted = set(_names("table_names", table_names))
    known = {name for tables in everything.values() for name in tables}
    for name in sorted(wanted - known):
        raise wrong_value("a table in table_names", name, ", ".join(sorted(known)) or "none")
    chosen = {
        path: {name: entry for name, entry in tables.items() if name in wanted}
        for path, tables in everything.items()
    }
    return {path: tables for path, tables in chosen.items() if tables}


def resolve_collection(collections: Mapping[str, Any], name: object) -> list[str]:
    """The paths that ``name`` means: itself, else every path whose last part it is."""
    if not isinstance(name, str):
        raise wrong_type("the name of a collection", name, "a string")
    if name in collections:
        return [name]
    paths = [path for path in collections if path.rpartition(".")[2] == name]
    if not paths:
        raise wrong_value("the name of a collection", name, ", ".join(collections) or "none")
    return paths


def _names(argument: str, names: object) -> list[str]:
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
        raise wrong_type(
            argument, names, "None, {collection: [table name, ...]} or [table name, ...]"
        )
    return list(names)


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if getattr(type(module), "is_dynamic_collection", False) or isinstance(module, DynamicModule):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _walk(child, path if _is_wrapper(module, name) else f"{path}.{name}", seen)


def _is_wrapper(module: nn.Module, child: str) -> bool:
    if child in _WRAPPER_ATTRIBUTES:
        return True
    names = {one.__name__ for one in type(module).__mro__}
    return child == "module" and bool(names & _WRAPPER_CLASSES)
