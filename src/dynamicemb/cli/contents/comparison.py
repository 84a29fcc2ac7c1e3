"""The rows of two tables side by side, in bounded memory, whatever order they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from dynamicemb.cli.contents.base import Batch, Columns, Content, TableInfo, joined
from dynamicemb.cli.contents.partition import Share, shares
from dynamicemb.cli.contents.statistics import Highest
from dynamicemb.errors import CorruptCheckpointError

Advance = Callable[[int], object]


@dataclass
class Distance:
    """How far numbers are from each other: the largest and the mean |difference|."""

    largest: float = 0.0
    total: float = 0.0
    numbers: int = 0

    def add(self, difference: torch.Tensor) -> None:
        if difference.numel():
            self.largest = max(self.largest, float(difference.max()))
            self.total += float(difference.double().sum())
            self.numbers += difference.numel()

    @property
    def mean(self) -> float:
        return self.total / self.numbers if self.numbers else 0.0


@dataclass
class Comparison:
    """What came out. ``equal`` and ``changed`` count ids that both have; ``scores_changed`` those
    of them whose scores differ. ``differs``: what is not the same of the tables as a whole, in
    words. The lists hold some ids: the lowest that only one has, and the changed ones that differ
    most, with their largest |difference|."""

    label: str
    rows_a: int = 0
    rows_b: int = 0
    only_a: int = 0
    only_b: int = 0
    equal: int = 0
    changed: int = 0
    scores_changed: int = 0
    embeddings: Distance = field(default_factory=Distance)
    state: Distance = field(default_factory=Distance)
    differs: list[str] = field(default_factory=list)
    ids_only_a: list[int] = field(default_factory=list)
    ids_only_b: list[int] = field(default_factory=list)
    ids_changed: list[tuple[int, float]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.differs or self.only_a or self.only_b or self.changed)


@dataclass(frozen=True)
class What:
    """What of the rows is compared, and the |difference| up to which numbers are equal."""

    state: bool
    scores: bool
    tolerance: float


class Compared:
    """A table of ``a`` and one of ``b``; :meth:`compare` goes through them."""

    def __init__(
        self,
        a: tuple[Content, TableInfo],
        b: tuple[Content, TableInfo],
        what: What,
        *,
        ids: int,
        memory: int,
    ) -> None:
        self._a, self._b = a, b
        self._memory = memory
        self._tolerance = what.tolerance
        here, there = a[1], b[1]
        label = here.label if here.label == there.label else f"{here.label} = {there.label}"
        self.result = Comparison(label)
        self._columns = Columns(
            values=here.dim == there.dim,
            state=what.state and 0 < here.state_dim == there.state_dim,
            scores=what.scores and here.score_names == there.score_names,
        )
        self._few = [_Lowest(ids), _Lowest(ids)]
        self._most = Highest(ids)
        self._compare_tables(what)

    def _compare_tables(self, what: What) -> None:
        here, there = self._a[1], self._b[1]
        pairs: list[tuple[str, object, object]] = [("dim", here.dim, there.dim)]
        if what.state:
            kinds = [None if t.optimizer is None else t.optimizer.kind.name for t in (here, there)]
            if None not in kinds:
                pairs.append(("optimizer", kinds[0], kinds[1]))
            pairs.append(("numbers of state", here.state_dim, there.state_dim))
        if what.scores:
            names = [" ".join(table.score_names) or "not there" for table in (here, there)]
            pairs.append(("scores", names[0], names[1]))
        for name, one, other in pairs:
            if one != other:
                self.result.differs.append(f"{name}: {one} in A, {other} in B")

    def compare(self, advance: Advance) -> Comparison:
        """Go through all rows. ``advance`` is called with the number of rows that were read."""
        for share in shares(self._a[1].rows, self._row_bytes(), self._memory):
            self._compare_share(share, advance)
        result = self.result
        result.ids_only_a, result.ids_only_b = (one.ids() for one in self._few)
        result.ids_changed = self._most.items()
        return result

    def passes(self) -> int:
        """How often the rows are read."""
        return len(shares(self._a[1].rows, self._row_bytes(), self._memory))

    def _row_bytes(self) -> int:
        """Of a row in memory: once as it is read, once in order, and some bookkeeping."""
        return 2 * self._a[1].row_bytes(self._columns) + 32

    def _batches(self, side: tuple[Content, TableInfo], advance: Advance) -> Iterator[Batch]:
        content, table = side
        for batch in content.batches(table, None, self._columns):
            advance(len(batch))
            yield batch

    def _compare_share(self, share: Share, advance: Advance) -> None:
        known = self._load(share, advance)
        seen = torch.zeros(len(known), dtype=torch.bool, device="cpu")
        content, table = self._b
        for batch in self._batches(self._b, advance):
            some = share.of(batch)
            self.result.rows_b += len(some)
            if not len(known):
                self._only(1, some.ids)
                continue
            place = torch.searchsorted(known.ids, some.ids).clamp_(max=len(known) - 1)
            found = known.ids[place] == some.ids
            self._only(1, some.ids[~found])
            place = place[found]
            if bool(seen[place].any()) or len(torch.unique(place)) < len(place):
                raise CorruptCheckpointError(f"an id has two rows in {content.path} {table.label}")
            seen[place] = True
            self._compare_rows(known.some(place), some.some(found))
        self._only(0, known.ids[~seen])

    def _load(self, share: Share, advance: Advance) -> Batch:
        """The rows of A in the order of their ids."""
        content, table = self._a
        some = [share.of(batch) for batch in self._batches(self._a, advance)]
        rows = joined([one for one in some if len(one)], table)
        del some
        rows = rows.some(torch.argsort(rows.ids))
        if bool((rows.ids[1:] == rows.ids[:-1]).any()):
            raise CorruptCheckpointError(f"an id has two rows in {content.path} {table.label}")
        self.result.rows_a += len(rows)
        return rows

    def _only(self, side: int, ids: torch.Tensor) -> None:
        if side == 0:
            self.result.only_a += len(ids)
        else:
            self.result.only_b += len(ids)
        self._few[side].add(ids)

    def _compare_rows(self, one: Batch, other: Batch) -> None:
        """Rows of the same ids, in the same order."""
        result = self.result
        worst = torch.zeros(len(one), device="cpu")
        changed = torch.zeros(len(one), dtype=torch.bool, device="cpu")
        for mine, theirs, distance in (
            (one.embeddings, other.embeddings, result.embeddings),
            (one.state, other.state, result.state),
        ):
            if mine is None or theirs is None or not len(mine):
                continue
            difference = _difference(mine, theirs)
            distance.add(difference)
            worst = torch.maximum(worst, difference.max(1).values)
        changed |= worst > self._tolerance
        if one.scores is not None and other.scores is not None:
            scores = one.scores != other.scores
            if scores.dim() == 2:
                scores = scores.any(1)
            result.scores_changed += int(scores.sum())
            changed |= scores
        count = int(changed.sum())
        result.changed += count
        result.equal += len(one) - count
        self._most.add(one.ids[changed], worst[changed])


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """|one - other|: 0 for the same bits, infinity where that is no number."""
    one, other = one.float(), other.float()
    same = (one == other) | (one.view(torch.int32) == other.view(torch.int32))
    difference = (one - other).abs_().nan_to_num_(nan=float("inf"), posinf=float("inf"))
    return difference.masked_fill_(same, 0.0)


class _Lowest:
    """Some of the ids that were seen: the lowest."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")

    def add(self, ids: torch.Tensor) -> None:
        self._ids = torch.cat([self._ids, ids]).sort().values[: self._count]

    def ids(self) -> list[int]:
        return self._ids.tolist()
