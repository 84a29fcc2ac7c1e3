"""Which columns of a file are what: Criteo's layout by name, any other from a small YAML file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dynamicemb.checkpoint.json_object import shortened
from dynamicemb.cli.arguments import suggestion
from dynamicemb.cli.training.batch import Schema
from dynamicemb.cli.yaml import LONGEST, read_yaml
from dynamicemb.errors import InvalidArgumentError

KEYS = ("label", "dense", "sparse", "tables", "dense_transform", "columns", "separator")
TRANSFORMS = ("none", "log1p")


@dataclass(frozen=True)
class FileSchema:
    """The columns of a file.

    dense_transform: "log1p" takes sign(x) log(1 + |x|) of every dense number. columns: the names
    of all columns of a CSV without a header. separator: of a CSV; ``None``: by the file's name.
    """

    label: str
    columns_of: Schema
    dense_transform: str = "none"
    columns: tuple[str, ...] | None = None
    separator: str | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (self.label, *self.columns_of.dense, *self.columns_of.features)


def criteo() -> FileSchema:
    """A label, 13 counts and 26 categories, tab-separated without a header, as Criteo published
    its display advertising data; or columns of these names."""
    dense = tuple(f"I{n}" for n in range(1, 14))
    sparse = tuple(f"C{n}" for n in range(1, 27))
    return FileSchema(
        "label",
        Schema(dense, {name: (name,) for name in sparse}),
        dense_transform="log1p",
        columns=("label", *dense, *sparse),
        separator="\t",
    )


def read_schema(name: str) -> FileSchema:
    """The schema called ``name``, or in the YAML file ``name``. Errors name the file and key."""
    if name == "criteo":
        return criteo()
    try:
        with Path(name).open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)  # the rest would be refused
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidArgumentError(
            f"--schema {name} cannot be read: {reason}; allowed: criteo, or a YAML file"
        ) from error
    return _from_mapping(read_yaml(text, name), name)


def _from_mapping(values: dict[str, Any], where: str) -> FileSchema:
    for key in values:
        if key not in KEYS:
            hint = suggestion(key, KEYS)
            raise InvalidArgumentError(f"unknown key {shortened(key)} in {where}{hint}")
    label = values.get("label")
    if not isinstance(label, str):
        raise _wrong(f"label in {where}", label, "the name of the column of clicks")
    dense = _names(values, "dense", where)
    tables: dict[str, tuple[str, ...]] = {
        _table_name(name): (name,) for name in _names(values, "sparse", where)
    }
    shared = values.get("tables") or {}
    if not isinstance(shared, dict):
        raise _wrong(f"tables in {where}", shared, "`table: [column, ...]` lines")
    for table in shared:
        tables[_table_name(table)] = _names(shared, table, where)
    schema = Schema(dense, tables)
    every = Counter([label, *dense, *schema.features])
    if not schema.features:
        raise InvalidArgumentError(f"{where} names no sparse column; allowed: at least one")
    for name, times in every.items():
        if times > 1:
            raise InvalidArgumentError(f"column {shortened(name)} is named twice in {where}")
    transform = values.get("dense_transform", "none")
    if transform not in TRANSFORMS:
        raise _wrong(f"dense_transform in {where}", transform, ", ".join(TRANSFORMS))
    separator = values.get("separator")
    if separator is not None and (not isinstance(separator, str) or len(separator) != 1):
        raise _wrong(f"separator in {where}", separator, "one character")
    columns = _names(values, "columns", where) if values.get("columns") else None
    return FileSchema(label, schema, transform, columns, separator)


def _names(values: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    names = values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise _wrong(f"{key} in {where}", names, "a list of column names")
    return tuple(names)


def _wrong(name: str, value: object, allowed: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} is {shortened(value)}; allowed: {allowed}")


def _table_name(name: str) -> str:
    """TorchRec keeps tables in a ModuleDict, which has names of its own."""
    plain = name.replace(".", "_")
    return f"{plain}_table" if hasattr(nn.ModuleDict(), plain) else plain
