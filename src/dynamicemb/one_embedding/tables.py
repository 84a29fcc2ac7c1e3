"""Several tables over one store: they differ in how their new rows start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynamicemb.errors import InvalidArgumentError, check_integer, wrong_type, wrong_value
from dynamicemb.one_embedding.initializers import (
    InitializerOptions,
    initializer_args,
    make_normal_initializer,
)
from dynamicemb.options import DynamicEmbInitializerArgs
from dynamicemb.table import Table

MAX_TABLES = 256
TableOptions = dict[str, Any]


def make_table_options(param: Any) -> TableOptions:
    """The options of one table.

    ``param``: an initialiser (of ``make_uniform_initializer`` and the like) for all of a row, or a
    list with the options of each column (of :func:`make_column_options`).
    """
    if isinstance(param, Mapping):
        return {"initializer": dict(param)}
    if isinstance(param, (list, tuple)):
        return {"columns": list(param)}
    raise wrong_value("param", param, "an initializer, or a list of columns")


def make_table(param: Any) -> TableOptions:
    """The same as :func:`make_table_options`."""
    return make_table_options(param)


def make_column_options(initializer: InitializerOptions) -> TableOptions:
    """The options of one column of a table."""
    initializer_args("initializer", initializer)
    return {"initializer": dict(initializer)}


@dataclass(frozen=True)
class NewRows:
    """How the rows of each table start: per table, the initialiser of each column range."""

    widths: tuple[int, ...]
    tables: tuple[tuple[DynamicEmbInitializerArgs, ...], ...]

    @property
    def uniform(self) -> DynamicEmbInitializerArgs | None:
        """The one initialiser of all columns of all tables; ``None`` if there are several."""
        distinct = {args for columns in self.tables for args in columns}
        return distinct.pop() if len(distinct) == 1 else None

    def draw(self, table: Table, keys: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
        """[n, dim]: the new rows of distinct ``keys``, each by the table of its number."""
        if numbers is None:
            return self._draw_one(table, keys, 0)
        rows = torch.empty(len(keys), table.dim, dtype=table.dtype, device=keys.device)
        for number in torch.unique(numbers).tolist():
            here = (numbers == number).nonzero().squeeze(1)
            rows[here] = self._draw_one(table, keys[here], number)
        return rows

    def _draw_one(self, table: Table, keys: torch.Tensor, number: int) -> torch.Tensor:
        columns = self.tables[number]
        if len(set(columns)) == 1:
            return table.initial_rows(keys, columns[0])
        # A number is a function of (seed, id, column): whole rows are drawn, and a range is kept.
        drawn = [table.initial_rows(keys, args) for args in columns]
        ranges = [whole.split(self.widths, 1)[i] for i, whole in enumerate(drawn)]
        return torch.cat(ranges, 1)


def new_rows(
    tables: Sequence[TableOptions] | None,
    default_initializer: InitializerOptions | None,
    widths: Sequence[int],
) -> NewRows:
    """What ``tables`` say, checked. ``widths``: of the columns."""
    default = default_initializer
    if default is None:
        default = make_normal_initializer(mean=0.0, std=0.05)
    first = initializer_args("default_initializer", default)
    if tables is None:
        return NewRows(tuple(widths), ((first,) * len(widths),))
    if not isinstance(tables, (list, tuple)) or not tables:
        raise wrong_type("tables", tables, "None, or a list of make_table_options(...)")
    check_integer("len(tables)", len(tables), maximum=MAX_TABLES)
    return NewRows(
        tuple(widths), tuple(_columns(f"tables[{t}]", one, widths) for t, one in enumerate(tables))
    )


def _columns(
    name: str, table: TableOptions, widths: Sequence[int]
) -> tuple[DynamicEmbInitializerArgs, ...]:
    if not isinstance(table, Mapping) or set(table) not in ({"initializer"}, {"columns"}):
        raise wrong_type(name, table, "a dictionary of make_table_options(...)")
    if "initializer" in table:
        return (initializer_args(f"the initializer of {name}", table["initializer"]),) * len(widths)
    columns = table["columns"]
    if not isinstance(columns, (list, tuple)) or len(columns) != len(widths):
        count = len(columns) if isinstance(columns, (list, tuple)) else columns
        raise wrong_value(f"columns of {name}", count, f"{len(widths)}, as many as embedding_dim")
    for i, column in enumerate(columns):
        if not isinstance(column, Mapping) or set(column) != {"initializer"}:
            raise wrong_type(f"columns[{i}] of {name}", column, "make_column_options(...)")
    return tuple(
        initializer_args(f"columns[{i}] of {name}", column["initializer"])
        for i, column in enumerate(columns)
    )


def column_widths(embedding_dim: Any, *, several: bool) -> tuple[int, ...]:
    """``embedding_dim`` as the widths of columns; a list is allowed if ``several``."""
    if isinstance(embedding_dim, (list, tuple)):
        if not several:
            raise wrong_type(
                "embedding_dim",
                embedding_dim,
                "an integer; for several columns use MultiTableMultiColumnEmbedding",
            )
        if not embedding_dim:
            raise InvalidArgumentError("embedding_dim is []; allowed: at least one width")
        return tuple(check_integer("embedding_dim", one, minimum=1) for one in embedding_dim)
    return (check_integer("embedding_dim", embedding_dim, minimum=1),)
