"""A table's description as JSON, for layouts that have a place for a text beside the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from dynamicemb.checkpoint.exchange import Meaning
from dynamicemb.checkpoint.manifest import DTYPE_NAMES, DTYPES
from dynamicemb.checkpoint.scores import strategy_names, uses_clock
from dynamicemb.cli.contents.base import NO_PROGRESS, Part, TableInfo
from dynamicemb.errors import DynamicEmbError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import (
    DynamicEmbScoreStrategy,
    ScoreStrategy,
    normalize_score_strategy,
)
from dynamicemb.table.rows import Progress

#: The member that holds the description.
TABLE = "table"


def describe(table: TableInfo) -> dict[str, Any]:
    """What a reader needs to make the same checkpoint again, and for ``import_table`` what state
    and scores mean."""
    optimizer = table.optimizer
    about: dict[str, Any] = {
        "collection": table.collection,
        "name": table.name,
        "dtype": DTYPE_NAMES[table.dtype],
        "value_dtype": DTYPE_NAMES[table.value_dtype],
        "score_strategy": None if table.strategy is None else strategy_names(table.strategy),
        "optimizer": None
        if optimizer is None
        else {"kind": optimizer.kind.name, "args": asdict(optimizer.args)},
        "clock": table.clock,
        "progress": asdict(progress_of(table)),
        "options": dict(table.options),
    }
    meaning: dict[str, Any] = {}
    if optimizer is not None and table.strategy is not None:
        meaning = asdict(Meaning.of(optimizer, table.strategy))
    elif optimizer is not None:
        meaning = {"optimizer": optimizer.kind.name}
    return {**meaning, TABLE: about}


def progress_of(table: TableInfo) -> Progress:
    """Of the whole table: the highest of each number of its parts, as a load takes them."""
    some = [part.progress for part in table.parts]
    if not some:
        return NO_PROGRESS
    custom = [one.custom_score for one in some if one.custom_score is not None]
    seeds = {one.seed for one in some}
    return Progress(
        step=max(one.step for one in some),
        custom_score=max(custom) if custom else None,
        iteration=max(one.iteration for one in some),
        next_row_number=max(one.next_row_number for one in some),
        admission_calls=max(one.admission_calls for one in some),
        seed=seeds.pop() if len(seeds) == 1 else some[0].seed,
    )


class Described:
    """The description in a file, with a default for all that is missing or makes no sense."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        about = meta.get(TABLE)
        self._about: Mapping[str, Any] = about if isinstance(about, Mapping) else {}
        self._meta = meta

    def text(self, name: str, default: str) -> str:
        value = self._about.get(name)
        return value if isinstance(value, str) and value else default

    def dtype(self, name: str, default: torch.dtype) -> torch.dtype:
        return DTYPES.get(str(self._about.get(name)), default)

    @property
    def strategy(self) -> ScoreStrategy | None:
        names = self._about.get("score_strategy")
        if names is None:
            names = str(self._meta.get("score_strategy", "")).split()
        known = DynamicEmbScoreStrategy.__members__
        if not isinstance(names, list) or not names or not all(one in known for one in names):
            return None
        try:
            return normalize_score_strategy(tuple(known[one] for one in names))
        except DynamicEmbError:
            return None

    @property
    def optimizer(self) -> Optimizer | None:
        said = self._about.get("optimizer")
        if not isinstance(said, Mapping):
            said = {"kind": self._meta.get("optimizer"), "args": {}}
        kind = OptimizerKind.__members__.get(str(said.get("kind")))
        args = said.get("args")
        known = {item.name for item in fields(OptimizerArgs)}
        if kind is None or not isinstance(args, Mapping) or not set(args) <= known:
            return None
        try:
            return Optimizer(kind, OptimizerArgs(**args))
        except (DynamicEmbError, TypeError):
            return None

    @property
    def options(self) -> Mapping[str, Any]:
        value = self._about.get("options")
        return value if isinstance(value, Mapping) else {}

    def part(self, rows: int, clock: int) -> Part:
        """All rows as one part; ``clock``: the reading that is taken if none was written."""
        said_clock = self._about.get("clock")
        if isinstance(said_clock, int) and 0 <= said_clock < 2**64:
            clock = said_clock
        said = self._about.get("progress")
        progress = NO_PROGRESS
        if isinstance(said, Mapping):
            numbers = {
                item.name: said.get(item.name, getattr(NO_PROGRESS, item.name))
                for item in fields(Progress)
            }
            if all(one is None or type(one) is int for one in numbers.values()):
                progress = Progress(**numbers)
        timed = self.strategy is not None and uses_clock(self.strategy)
        return Part(rank=0, rows=rows, clock=clock if timed else None, progress=progress)
