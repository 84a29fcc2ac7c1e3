"""Dynamic tables in ``torch.distributed.checkpoint``.

Each rank saves its tables as one entry, ``rank_<r>``, a string of bytes: DCP has no tensors whose
number of rows is not known before they are loaded. A load on another number of ranks reads all
entries, and each rank keeps the rows that it owns now.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dynamicemb.checkpoint.dump import routing_of
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    UsageError,
    check_path,
    wrong_type,
)
from dynamicemb.nn.discovery import (
    accept_replaced,
    check_written,
    find_collections,
    tables_of,
    walk_collections,
)
from dynamicemb.nn.module import DynamicModule
from dynamicemb.routing import Routing
from dynamicemb.table import Table
from dynamicemb.table.content import NAMES, merge, optimizer_kind, whole

_VERSION = 1
#: Parts of names that wrappers add.
_WRAPPERS = frozenset({"module", "_dmp_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class _Saved:
    """One table of one rank."""

    content: dict[str, torch.Tensor]
    routing: Routing | None


#: (collection path, table name) -> what was saved.
_Payload = dict[tuple[str, str], _Saved]


class DynamicTables:
    """The dynamic tables of a model as a ``Stateful`` of ``torch.distributed.checkpoint``.

    ::

        dcp.save({"model": dense_state_dict(model), "tables": DynamicTables(model)},
                 checkpoint_id=path)
        dcp.load({"model": dense_state_dict(model),
                  "tables": DynamicTables(model, saved_in=path)}, checkpoint_id=path)

    ``saved_in``: the checkpoint that will be loaded (a path, or DCP's storage reader); needed only
    if another number of ranks may have saved it. ``pg``: the ranks, as given to ``dcp.save``.
    ``name``: the key that this object has in the dictionary that is loaded.

    Rows, optimizer state, scores, admission counters and the tables' counts are saved; a load puts
    them in the place of what the tables hold. A rank's tables are in memory twice meanwhile, and
    once more as bytes: for large tables use ``DynamicEmbDump``, which streams.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        saved_in: str | os.PathLike[str] | Any = None,
        pg: Any = None,
        name: str = "tables",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise wrong_type("model", model, "a torch.nn.Module")
        self._model = model
        self._ranks = Ranks(pg)
        self._saved_by = self._ranks.size if saved_in is None else _saved_by(saved_in, name)
        self._loading = saved_in is not None

    def state_dict(self) -> dict[str, Any]:
        """This rank's tables, or, of an object that was made with ``saved_in``, an empty place for
        each entry that a load needs."""
        if self._loading:
            return {f"rank_{rank}": b"" for rank in self._wanted()}
        check_written(module for _, _, module, _ in self._tables())
        payload = {
            "version": _VERSION,
            "world_size": self._ranks.size,
            "tables": [
                {
                    "collection": where,
                    "name": name,
                    "routing": None if routing is None else asdict(routing),
                    "content": {key: one.cpu() for key, one in table.state_dict().items()},
                }
                for where, name, module, table in self._tables()
                for routing in [routing_of(module, table)]
            ],
        }
        data = io.BytesIO()
        torch.save(payload, data)
        return {f"rank_{self._ranks.rank}": data.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put what was saved in the place of what the tables hold: all of them, or, if it is not
        complete or does not fit, none, on every rank."""
        contents: list[dict[str, torch.Tensor]] = []
        self._ranks.together(lambda: contents.extend(self._contents(state_dict)))
        for (_, _, module, table), content in zip(self._tables(), contents, strict=True):
            module.load_table(table, content)
        accept_replaced((module, table) for _, _, module, table in self._tables())

    def _contents(self, state_dict: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
        """What each table is to hold."""
        payloads = {key: _decode(value, key) for key, value in state_dict.items()}
        for key, (world_size, _) in payloads.items():
            if world_size != self._saved_by or len(payloads) not in (1, world_size):
                raise CheckpointError(
                    f"{key} was saved by {world_size} ranks, and {self._ranks.size} load it; "
                    "allowed: the same number, or DynamicTables(model, saved_in=the checkpoint)"
                )
        contents = []
        for where, name, module, table in self._tables():
            saved = [
                payload[where, name] for _, payload in payloads.values() if (where, name) in payload
            ]
            if len(saved) != len(payloads):
                raise CheckpointError(f"table {name!r} of {where!r} was not saved by all ranks")
            routing = routing_of(module, table)
            if len(saved) == 1 and self._saved_by > 1 and saved[0].routing != routing:
                raise CheckpointError(
                    f"ids of table {name!r} were spread by {saved[0].routing}, and now are by "
                    f"{routing}; allowed: the same, or DynamicTables(model, saved_in=path)"
                )
            _check_complete(table, saved)
            content = _merge(table, saved, routing, self._ranks)
            kind = table.optimizer.kind if module.fused else optimizer_kind(content)
            content = {key: one.to(table.device) for key, one in content.items()}
            table.check_state_dict(content, kind)
            contents.append(content)
        return contents

    def _wanted(self) -> Sequence[int]:
        if self._saved_by == self._ranks.size and not self._moved():
            return [self._ranks.rank]
        return range(self._saved_by)

    def _moved(self) -> bool:
        """Whether a rank may own other ids than when it saved: its routing is not known before the
        load, so it is only certain where nothing is spread over ranks."""
        return any(routing_of(module, table) is not None for _, _, module, table in self._tables())

    def _tables(self) -> list[tuple[str, str, DynamicModule, Table]]:
        found = [
            (where, name, module, table)
            for where, modules in find_collections(self._model).items()
            for name, (module, table) in tables_of(modules).items()
        ]
        if not found:
            raise UsageError(f"{type(self._model).__name__} has no dynamic embedding tables")
        return found


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` under its usual names without what belongs to dynamic tables."""
    inside: list[str] = []  # prefixes of modules of which nothing is dense
    names: set[str] = set()  # the entries that stand for the dynamic tables of a collection
    for path, collection in walk_collections(model):
        prefix = path.removeprefix("model").removeprefix(".")
        prefix += "." if prefix else ""
        if hasattr(collection, "dynamic_modules"):  # sharded: ordinary tables may be in it too
            sharded: Any = collection
            tables = [table.name for one in sharded.dynamic_modules() for table in one.tables]
            names.update(prefix + sharded._weight_name.format(table) for table in tables)
        else:
            inside.append(prefix)
    return {
        key: value
        for key, value in model.state_dict().items()
        if (plain := _unwrapped(key)) not in names and not plain.startswith(tuple(inside))
    }


def _unwrapped(key: str) -> str:
    """``key`` without the parts that wrappers add."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _saved_by(saved_in: Any, name: str) -> int:
    """How many ranks saved a checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.storage import StorageReader

    reader = saved_in
    if not isinstance(saved_in, StorageReader):
        reader = FileSystemReader(check_path("saved_in", saved_in, "a folder, or a StorageReader"))
    pattern = re.compile(re.escape(name) + r"\.rank_(\d+)")
    ranks = {
        int(matched[1])
        for key in reader.read_metadata().state_dict_metadata
        if (matched := pattern.fullmatch(key))
    }
    if not ranks or ranks != set(range(len(ranks))):
        raise CheckpointError(
            f"the checkpoint has dynamic tables of ranks {sorted(ranks)} under {name!r}; allowed: "
            "those of 0 to the last"
        )
    return len(ranks)


def _decode(value: Any, key: str) -> tuple[int, _Payload]:
    """(ranks that saved, tables) of one entry."""
    if not isinstance(value, bytes) or not value:
        raise CheckpointError(f"{key} was not loaded: it is {str(value)[:40]!r}; allowed: bytes")
    try:
        payload = torch.load(io.BytesIO(value), weights_only=True)
        if payload["version"] != _VERSION:
            raise CorruptCheckpointError(f"{key} has version {payload['version']!r}")
        saved = {
            (one["collection"], one["name"]): _Saved(
                {name: part for name, part in one["content"].items() if name in NAMES},
                None if one["routing"] is None else Routing(**one["routing"]),
            )
            for one in payload["tables"]
        }
        for one in saved.values():
            optimizer_kind(one.content)  # its numbers make sense
            for name, part in one.content.items():
                if not isinstance(part, torch.Tensor):
                    raise wrong_type(name, part, "a tensor")
        return int(payload["world_size"]), saved
    except CorruptCheckpointError:
        raise
    except Exception as error:  # whatever a corrupt entry makes torch.load raise
        raise CorruptCheckpointError(f"{key} cannot be read: {error}") from error


def _check_complete(table: Table, saved: Sequence[_Saved]) -> None:
    """A tensor that is missing, or of another length than was saved, is corrupt; one that does not
    fit the table is a mistake of the caller."""
    for one in saved:
        try:
            whole(table, one.content, optimizer_kind(one.content))
        except InvalidArgumentError as error:
            raise CorruptCheckpointError(str(error)) from error


def _merge(
    table: Table, saved: Sequence[_Saved], routing: Routing | None, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """What this rank takes of the tables that several ranks saved."""
    if len(saved) == 1:
        return saved[0].content
    if routing is None and all(one.routing is None for one in saved):
        return saved[min(ranks.rank, len(saved) - 1)].content  # each rank has a table of its own
    contents = [whole(table, one.content, optimizer_kind(one.content)) for one in saved]
    if routing is not None:
        contents = [_owned(content, routing) for content in contents]
    return merge(contents)


def _owned(content: Mapping[str, torch.Tensor], routing: Routing) -> dict[str, torch.Tensor]:
    """The rows and counts of the ids that this rank owns."""
    rows, counts = routing.owned(content["ids"]), routing.owned(content["counter_ids"])
    owned = {
        name: content[name][counts if name.startswith("counter") else rows] for name in NAMES[:-1]
    }
    return {**owned, "meta": content["meta"]}
