"""``torch.optim.swa_utils.AveragedModel`` averages rows: around its ``update_parameters``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dynamicemb.errors import UsageError
from dynamicemb.nn.discovery import find_collections
from dynamicemb.nn.module import DynamicModule
from dynamicemb.table import Table

_update_parameters = AveragedModel.update_parameters
_BATCH = 65536
#: Called with (averaged, model) after an update, to average what else a model keeps.
followers: list[Callable[[nn.Module, nn.Module], None]] = []


@functools.wraps(_update_parameters)
def _update_all(self: Any, model: nn.Module) -> None:
    """Average the parameters, then the rows of every dynamic table, by the same function.

    Afterwards the averaged table has the ids and scores of the model's table. A row that is new to
    it is a copy of the model's row.
    """
    pairs = _pairs(self.module, model)
    for pair in pairs:
        for one in pair:
            one.check_written()
    averaged_before = self.n_averaged.clone()
    _update_parameters(self, model)
    done: set[int] = set()
    for averaged, current in pairs:
        for mine, theirs in zip(averaged.tables, current.tables, strict=True):
            if id(mine) not in done:  # modules may share a table
                done.add(id(mine))
                _update_rows(self, averaged_before, mine, theirs)
        averaged.accept_written()
    for follow in followers:
        follow(self.module, model)


def _pairs(averaged: nn.Module, model: nn.Module) -> list[tuple[DynamicModule, DynamicModule]]:
    """The dynamic modules of both that hold the same tables."""
    mine, theirs = (
        [one for modules in find_collections(root).values() for one in modules]
        for root in (averaged, model)
    )
    shapes = [
        [[(table.name, table.dim, table.dtype) for table in one.tables] for one in modules]
        for modules in (mine, theirs)
    ]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"the averaged model has the dynamic tables {shapes[0]}, and the other one "
            f"{shapes[1]}; allowed: the model that it was made of"
        )
    return list(zip(mine, theirs, strict=True))


def _update_rows(averager: Any, averaged_before: torch.Tensor, mine: Table, theirs: Table) -> None:
    if mine is theirs:
        return
    gone = [rows.ids[~theirs.contains(rows.ids.to(theirs.device))] for rows in mine.export()]
    for ids in gone:
        mine.erase(ids)
    mine.reserve(max(len(theirs) - len(mine), 0))
    for rows in theirs.export(batch_size=_BATCH):
        ids, current = rows.ids.to(mine.device), rows.embeddings.to(mine.device)
        found = mine.find(ids)
        average = found.embeddings
        average[~found.found] = current[~found.found]
        known = found.found.nonzero().squeeze(1)
        if len(known):
            average[known] = _average(averager, averaged_before, average[known], current[known])
        mine.insert(ids, average, scores=rows.scores.to(mine.device))
    if len(mine) < len(theirs):
        warnings.warn(
            f"the average of table {mine.name!r} has {len(mine)} of {len(theirs)} rows; the others "
            "did not fit it",
            UserWarning,
            stacklevel=3,
        )


class _Rows(nn.Module):
    """A model whose only parameter holds rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows, requires_grad=False)


def _average(
    averager: Any, averaged_before: torch.Tensor, rows: torch.Tensor, current: torch.Tensor
) -> torch.Tensor:
    """The average of rows as ``averager`` averages a parameter, by an average of a stand-in."""
    stand_in: Any = AveragedModel(_Rows(rows))
    for name in ("avg_fn", "multi_avg_fn", "use_buffers"):
        setattr(stand_in, name, getattr(averager, name))
    stand_in.n_averaged = averaged_before.clone()
    _update_parameters(stand_in, _Rows(current))
    averaged: torch.Tensor = stand_in.module.rows.detach()
    return averaged


AveragedModel.update_parameters = _update_all  # type: ignore[method-assign]
