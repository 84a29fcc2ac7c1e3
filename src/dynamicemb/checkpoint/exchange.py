"""Rows to and from other tools' files: safetensors, Parquet, NumPy.

A file holds ``ids`` int64 [n], ``embeddings`` [n, dim], and as they are wanted ``state`` float32
[n, state_dim] and ``scores`` uint64 [n] or [n, 2]; row i of each belongs to id i. Its metadata says
what state and scores mean. Files of other tools need ids and embeddings only, under any name.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dynamicemb.checkpoint.exchange_formats import FORMATS, Array, Reader
from dynamicemb.checkpoint.json_object import parsed
from dynamicemb.checkpoint.scores import strategy_names
from dynamicemb.errors import (
    InvalidArgumentError,
    check_choice,
    check_integer,
    check_path,
    wrong_type,
    wrong_value,
)
from dynamicemb.nn.discovery import check_written, find_collections, tables_of
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import BATCH_SIZE_PER_DUMP, ScoreStrategy
from dynamicemb.routing import Routing
from dynamicemb.table import Rows, Table

#: What a file may hold beside ids.
NAMES = ("ids", "embeddings", "state", "scores")
#: The end of a file's name, and its format.
SUFFIXES = {".safetensors": "safetensors", ".parquet": "parquet", ".npz": "numpy"}


@dataclass(frozen=True)
class Imported:
    """read: rows of the source. owned: those that belong to this rank. lost: those that did not
    stay, or made others go, because the table is too small."""

    read: int
    owned: int
    lost: int


@dataclass(frozen=True)
class Meaning:
    """What state and scores of a file mean."""

    optimizer: str
    score_strategy: str

    @staticmethod
    def of(optimizer: Optimizer, strategy: ScoreStrategy) -> Meaning:
        # Rows hold the words in one order, however the user named the pair.
        words = sorted(strategy_names(strategy), reverse=True)
        return Meaning(optimizer.kind.name, " ".join(words))


def export_table(
    source: Table | nn.Module,
    path: str | os.PathLike[str],
    *,
    table_name: str | None = None,
    format: str | None = None,
    state: bool = True,
    scores: bool = True,
    batch_size: int = BATCH_SIZE_PER_DUMP,
) -> int:
    """Write the rows of a table (of this rank) to a file; returns how many.

    Args:
        source: a table, or a module with one; of several tables ``table_name`` says which.
        path: the file. It appears when it is complete; one that is there is replaced.
        format: "safetensors", "parquet" or "numpy"; None: by the path's end (.safetensors,
            .parquet, .npz).
        state, scores: also write these.
        batch_size: rows in memory at a time.

    bfloat16 rows are written as float32 to Parquet and NumPy, which have no such type; nothing is
    lost. Needs the ``safetensors`` or ``pyarrow`` package for these formats.
    """
    table, _ = _find_table(source, table_name)
    if isinstance(source, nn.Module):
        check_written(
            module
            for modules in find_collections(source).values()
            for module in modules
            if table in module.tables
        )
    path = Path(check_path("path", path, "the path of a file"))
    writer = FORMATS[_format_of(path, format)]
    batch_size = check_integer("batch_size", batch_size, minimum=1)
    count = len(table)
    layout = {
        "ids": Array((count,), torch.int64),
        "embeddings": Array((count, table.dim), table.dtype),
    }
    if state and table.state_dim:
        layout["state"] = Array((count, table.state_dim), torch.float32)
    if scores:
        words = (count,) if table.score_words == 1 else (count, 2)
        layout["scores"] = Array(words, torch.uint64)
    meta = json.dumps(asdict(_meta_of(table)))

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        total = 0
        for rows in table.export(batch_size=batch_size):
            total += len(rows)
            yield _columns(rows, layout)
        if total != count:
            raise InvalidArgumentError(
                f"table {table.name!r} changed while it was exported: {total} rows, not {count}"
            )

    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    try:
        writer.write(Path(temporary), layout, meta, batches)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return count


def import_table(
    target: Table | nn.Module,
    path: str | os.PathLike[str],
    *,
    table_name: str | None = None,
    format: str | None = None,
    names: Mapping[str, str] | None = None,
    state: bool = True,
    scores: bool = True,
    batch_size: int = BATCH_SIZE_PER_DUMP,
) -> Imported:
    """Store the rows of a file, of :func:`export_table` or of another tool, in a table.

    Args:
        target: a table, or a module with one; of several tables ``table_name`` says which. Of a
            table that is spread over ranks, each rank takes its own ids.
        names: what the file calls ``ids``, ``embeddings``, ``state`` and ``scores``, where it
            differs.
        state, scores: use them if the file has them. Without state, new rows start from the
            optimizer's initial one and rows that exist keep theirs; without scores, rows count as
            touched now.

    Everything is checked before the first row is stored. Embeddings are converted to the table's
    dtype. Rows that did not fit are counted in the result and warned about.

    Raises:
        InvalidArgumentError: a file that has other columns, sizes or types, or state or scores of
            another optimizer or strategy.
    """
    table, routing = _find_table(target, table_name)
    path = Path(check_path("path", path, "the path of a file"))
    kind = FORMATS[_format_of(path, format)]
    batch_size = check_integer("batch_size", batch_size, minimum=1)
    called = _checked_names(names)
    with kind.open(path) as reader:
        wanted = _wanted(table, reader, called, path, state=state, scores=scores)
        total = reader.arrays[called["ids"]].shape[0]
        table.reserve(total)
        before = table.stats()
        owned = 0
        for part in reader.batches([called[name] for name in wanted], batch_size):
            columns = {name: part[called[name]] for name in wanted}
            owned += _store(table, routing, columns)
    return _report(table, before, total, owned)


def import_rows(
    target: Table | nn.Module,
    ids: torch.Tensor | np.ndarray[Any, Any],
    embeddings: torch.Tensor | np.ndarray[Any, Any],
    *,
    table_name: str | None = None,
) -> Imported:
    """Start from rows that were trained elsewhere: ids [n] (int64 or uint64) and embeddings
    [n, dim] of any float type, as tensors or arrays. Rows that exist are overwritten. Of a table
    that is spread over ranks, each rank takes its own ids."""
    table, routing = _find_table(target, table_name)
    columns = {
        "ids": _as_tensor("ids", ids),
        "embeddings": _as_tensor("embeddings", embeddings),
    }
    arrays = {name: Array(tuple(one.shape), one.dtype) for name, one in columns.items()}
    _check_arrays(table, arrays, "the arguments")
    total = len(columns["ids"])
    table.reserve(total)
    before = table.stats()
    owned = 0
    for begin in range(0, total, BATCH_SIZE_PER_DUMP):
        part = slice(begin, begin + BATCH_SIZE_PER_DUMP)
        owned += _store(table, routing, {name: one[part] for name, one in columns.items()})
    return _report(table, before, total, owned)


def _find_table(target: object, name: str | None) -> tuple[Table, Routing | None]:
    if isinstance(target, Table):
        return target, None
    if not isinstance(target, nn.Module):
        raise wrong_type("target", target, "a Table or a torch.nn.Module")
    found = [
        entry
        for modules in find_collections(target).values()
        for one, entry in tables_of(modules).items()
        if name is None or one == name
    ]
    if len(found) != 1:
        every = ", ".join(
            one for modules in find_collections(target).values() for one in tables_of(modules)
        )
        raise wrong_value("table_name", name, f"the name of one table of the model: {every}")
    module, table = found[0]
    return table, None if module.routings is None else module.routings[table.name]


def _format_of(path: Path, format: str | None) -> str:
    if format is not None:
        check_choice("format", format, FORMATS)
        return format
    if path.suffix not in SUFFIXES:
        raise wrong_value("path", str(path), f"one that ends in {', '.join(SUFFIXES)}, or format=")
    return SUFFIXES[path.suffix]


def _meta_of(table: Table) -> Meaning:
    return Meaning.of(table.optimizer, table.options.score_strategy)


def _columns(rows: Rows, layout: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    columns = {
        "ids": rows.ids,
        "embeddings": rows.embeddings,
        "state": rows.state,
        "scores": rows.scores.view(torch.uint64),
    }
    return {name: columns[name].cpu() for name in layout}


def _checked_names(names: Mapping[str, str] | None) -> dict[str, str]:
    if names is not None and not isinstance(names, Mapping):
        raise wrong_type("names", names, "None or a dictionary")
    for name in names or {}:
        check_choice("names", name, NAMES)
    return {name: (names or {}).get(name, name) for name in NAMES}


def _wanted(
    table: Table,
    reader: Reader,
    called: Mapping[str, str],
    path: Path,
    *,
    state: bool,
    scores: bool,
) -> list[str]:
    """Which columns to read; checks that they fit the table."""
    for name in ("ids", "embeddings"):
        if called[name] not in reader.arrays:
            raise wrong_value(
                f"names[{name!r}]",
                called[name],
                f"one of {path}: {', '.join(list(reader.arrays)[:20])}",
            )
    wanted = ["ids", "embeddings"]
    here = _meta_of(table)
    there = read_meta(reader.meta)
    for name, use, key in (
        ("state", state, "optimizer"),
        ("scores", scores, "score_strategy"),
    ):
        if not use or called[name] not in reader.arrays:
            continue
        meaning = there.get(key)
        if meaning != getattr(here, key):
            raise InvalidArgumentError(
                f"{name} of {path} belong to {key} {meaning!r}; allowed: {getattr(here, key)!r}, "
                f"the table's, or {name}=False to leave them"
            )
        wanted.append(name)
    _check_arrays(table, {name: reader.arrays[called[name]] for name in wanted}, str(path))
    return wanted


def read_meta(text: str) -> dict[str, Any]:
    """What a file says of itself; nothing if that makes no sense."""
    try:
        meta = parsed(text) if text else {}
    except ValueError:
        meta = {}
    return meta if isinstance(meta, dict) else {}


def _check_arrays(table: Table, arrays: Mapping[str, Array], where: str) -> None:
    ids = arrays["ids"]
    if ids.dtype not in (torch.int64, torch.uint64) or len(ids.shape) != 1:
        raise InvalidArgumentError(
            f"ids of {where} are {ids}; allowed: one dimension of int64 or uint64"
        )
    count = ids.shape[0]
    shapes = {
        "embeddings": (count, table.dim),
        "state": (count, table.state_dim),
        "scores": (count,) if table.score_words == 1 else (count, 2),
    }
    for name, array in arrays.items():
        if name == "ids":
            continue
        types: tuple[torch.dtype, ...] = (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
        )
        if name == "state":
            types = (torch.float32,)
        if name == "scores":
            types = (torch.int64, torch.uint64)
        if array.shape != shapes[name] or array.dtype not in types:
            raise InvalidArgumentError(
                f"{name} of {where} are {array}; allowed: {shapes[name]} of "
                f"{', '.join(map(str, types))}"
            )


def _store(table: Table, routing: Routing | None, columns: dict[str, torch.Tensor]) -> int:
    if routing is not None:
        mine = routing.owned(columns["ids"])
        columns = {name: one.view(_plain(one.dtype))[mine] for name, one in columns.items()}
    device = table.device
    state, scores = columns.get("state"), columns.get("scores")
    table.insert(
        columns["ids"].to(device),
        columns["embeddings"].to(device, table.dtype),
        state=None if state is None else state.to(device),
        scores=None if scores is None else scores.view(torch.int64).to(device),
    )
    return len(columns["ids"])


def _plain(dtype: torch.dtype) -> torch.dtype:
    """uint64 tensors cannot be indexed by a mask; int64 ones of the same bits can."""
    return torch.int64 if dtype == torch.uint64 else dtype


def _report(table: Table, before: Any, total: int, owned: int) -> Imported:
    after = table.stats()
    lost = after.evictions - before.evictions + after.failures - before.failures
    if lost:
        warnings.warn(
            f"{lost} rows did not fit table {table.name!r}, whose capacity is {table.capacity}",
            UserWarning,
            stacklevel=3,
        )
    return Imported(total, owned, lost)


def _as_tensor(name: str, value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    raise wrong_type(name, value, "a tensor or a NumPy array")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
