"""Tables on a disk, as every layout gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from dynamicemb.checkpoint.scores import strategy_names
from dynamicemb.errors import InvalidArgumentError
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import ScoreStrategy
from dynamicemb.routing import Routing
from dynamicemb.table.rows import Progress

NO_PROGRESS = Progress(
    step=1, custom_score=None, iteration=0, next_row_number=0, admission_calls=0, seed=0
)


@dataclass(frozen=True)
class Columns:
    """What of rows is read beside their ids, as far as it is there."""

    values: bool = True
    state: bool = True
    scores: bool = True


EVERYTHING = Columns()
IDS = Columns(values=False, state=False, scores=False)


@dataclass(frozen=True)
class Part:
    """Rows of a table that lie together, such as a rank's. ``rows``: in its files; ``clock``: the
    table's reading when they were written, where scores are of a clock; ``counted``: ids of its
    admission counter, ``None`` if that was not saved."""

    rank: int
    rows: int
    clock: int | None = None
    progress: Progress = NO_PROGRESS
    counted: int | None = None


@dataclass(frozen=True)
class TableInfo:
    """A table of a path.

    rows: in its files; in those of a chain an id may be more than once, see ``Content.count``.
    dtype: of the table; value_dtype: of what batches hold.
    strategy: ``None`` if there are no scores, or nobody knows what they mean.
    optimizer: ``None`` if that is not known. state_dim: numbers of state per row, 0 if not saved.
    routing: how ids were spread over the parts; its rank is 0.
    rank: of a table that every rank had for itself, whose this is; else ``None``.
    """

    collection: str
    name: str
    dim: int
    dtype: torch.dtype
    value_dtype: torch.dtype
    strategy: ScoreStrategy | None
    optimizer: Optimizer | None
    state_dim: int
    routing: Routing | None
    parts: tuple[Part, ...]
    bytes: int
    rank: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How the table is called on a screen."""
        place = f"{self.collection}/{self.name}" if self.collection else self.name
        return place if self.rank is None else f"{place}@{self.rank}"

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What tells it from others of the same path."""
        return self.collection, self.name, self.rank

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def counted(self) -> int | None:
        """Ids of the admission counters, ``None`` if none was saved."""
        known = [part.counted for part in self.parts if part.counted is not None]
        return sum(known) if known else None

    @property
    def clock(self) -> int | None:
        """The last reading of its clocks."""
        known = [part.clock for part in self.parts if part.clock is not None]
        return max(known) if known else None

    @property
    def score_names(self) -> list[str]:
        """The words of a score, as batches hold them: of the pair, TIMESTAMP comes first."""
        if self.strategy is None:
            return []
        return sorted(strategy_names(self.strategy), reverse=True)

    def row_bytes(self, columns: Columns = EVERYTHING) -> int:
        """Bytes that are read for a row."""
        size = 8 + (self.dim * self.value_dtype.itemsize if columns.values else 0)
        size += 4 * self.state_dim if columns.state else 0
        return size + (8 * len(self.score_names) if columns.scores else 0)


@dataclass
class Batch:
    """Rows: ids int64 [n], embeddings [n, dim], state float32 [n, state_dim], scores as a table
    has them, int64 [n] or [n, 2]; ``None`` for what was not asked for or is not there."""

    ids: torch.Tensor
    embeddings: torch.Tensor | None
    state: torch.Tensor | None
    scores: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.ids)

    def some(self, which: torch.Tensor) -> Batch:
        """The rows of a mask or of numbers."""
        return Batch(
            *(None if part is None else part[which] for part in vars(self).values())  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Damage:
    """What is wrong, and where: the file, the table's label, and the byte at which the damaged
    block begins, as far as they are known."""

    problem: str
    file: str | None = None
    table: str | None = None
    offset: int | None = None


class Content(ABC):
    """An open path. Use as a context manager.

    layout: in a word. tables: all that were asked for. notes: what a user should know about how
    the files were read. checksums: whether :meth:`batches` notices damage.
    """

    layout: str
    checksums: bool = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.tables: list[TableInfo] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}

    @abstractmethod
    def batches(
        self, table: TableInfo, part: int | None = None, columns: Columns = EVERYTHING
    ) -> Iterator[Batch]:
        """The rows of a table, or of one of its parts (by its place in ``parts``), each id once, a
        bounded number at a time. Damage that is noticed is a ``DynamicEmbError``."""

    def count(self, table: TableInfo) -> int:
        """How many rows :meth:`batches` gives."""
        return table.rows

    def counter(self, table: TableInfo) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(ids, counts) of the admission counters; ``None`` if they were not saved."""
        return None

    def damages(self, table: TableInfo, *, skip_rows: bool) -> Iterator[Damage | int]:
        """Compare what :meth:`batches` does not read (or, without ``skip_rows``, everything) with
        its checksums: what is wrong, and between that the bytes that were read."""
        return iter(())

    def find(self, table: TableInfo, ids: torch.Tensor) -> Batch:
        """The rows of those of ``ids`` that the table has."""
        found = []
        for batch in self.batches(table):
            which = torch.isin(batch.ids, ids)
            if bool(which.any()):
                found.append(batch.some(which))
        return joined(found, table)

    def close(self) -> None:  # noqa: B027  (most have nothing to let go)
        """Let the files go."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def choose(self, names: Sequence[str], rank: int | None = None) -> None:
        """Keep the tables that are called so (by name, or ``collection/name``), if any names are
        given, and of tables that every rank had for itself, that of ``rank``."""
        chosen = self.tables
        if names:
            known = {one.label.partition("@")[0] for one in self.tables}
            for name in names:
                if not any(_called(one, name) for one in self.tables):
                    raise InvalidArgumentError(
                        f"{self.path} has no table {name!r}; it has {', '.join(sorted(known))}"
                    )
            chosen = [one for one in chosen if any(_called(one, name) for name in names)]
        if rank is not None:
            chosen = [one for one in chosen if one.rank in (None, rank)]
        self.tables = chosen


def _called(table: TableInfo, name: str) -> bool:
    return name in (table.name, table.label, table.label.partition("@")[0])


def joined(batches: Sequence[Batch], table: TableInfo) -> Batch:
    """The rows of all, of one table."""
    if not batches:
        words = len(table.score_names)
        return Batch(
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, table.dim, dtype=table.value_dtype, device="cpu"),
            torch.empty(0, table.state_dim, device="cpu") if table.state_dim else None,
            torch.empty((0, 2) if words == 2 else 0, dtype=torch.int64, device="cpu")
            if words
            else None,
        )
    columns = zip(*(vars(one).values() for one in batches), strict=True)
    return Batch(*(None if some[0] is None else torch.cat(list(some)) for some in columns))  # type: ignore[arg-type]
