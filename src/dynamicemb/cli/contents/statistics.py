"""What one pass over the rows of a table tells, in bounded memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from dynamicemb.cli.contents.base import Batch, TableInfo

_SIGN = -(2**63)
_BINS = 12
_UNITS = [("s", 10**9), ("min", 60 * 10**9), ("h", 3600 * 10**9), ("d", 86400 * 10**9)]
#: Upper bounds of the bins of ages.
_AGES = [
    *(("0.001 s", 10**6), ("0.01 s", 10**7), ("0.1 s", 10**8), ("1 s", 10**9)),
    *(("10 s", 10**10), ("1 min", 60 * 10**9), ("10 min", 600 * 10**9), ("1 h", 3600 * 10**9)),
    *(("6 h", 6 * 3600 * 10**9), ("1 d", 86400 * 10**9), ("7 d", 7 * 86400 * 10**9)),
    *(("30 d", 30 * 86400 * 10**9), ("365 d", 365 * 86400 * 10**9)),
]


def unsigned(value: int) -> int:
    """The 64 bits of a signed number as an unsigned one."""
    return value % 2**64


def age_text(nanoseconds: int) -> str:
    """A time in words."""
    amount, name = nanoseconds / 10**9, "s"
    for unit, size in _UNITS:
        if abs(nanoseconds) >= size:
            amount, name = nanoseconds / size, unit
    return f"{amount:.3g} {name}"


class Histogram:
    """Counts of unsigned 64-bit numbers, in about a dozen bins that are chosen as numbers come.

    kind "linear": equal bins, as wide as a power of two that makes them fit. "log": one bin for
    each power of two. "age": of ``clock - number``, in bins of time.
    """

    def __init__(self, kind: str, clock: int = 0) -> None:
        self.kind = kind
        self._clock = clock
        self._shift = 0
        self._bins: Counter[int] = Counter()
        self.lowest = self.highest = 0
        self._seen = False

    def add(self, words: torch.Tensor) -> None:
        """Count the numbers of an int64 tensor that holds unsigned bits."""
        if not len(words):
            return
        ordered = words ^ _SIGN  # signed numbers in the unsigned order
        low, high = (unsigned(int(one) ^ _SIGN) for one in torch.aminmax(ordered))
        self.lowest = min(low, self.lowest) if self._seen else low
        self.highest = max(high, self.highest) if self._seen else high
        self._seen = True
        if self.kind == "age":
            self._count(self._age_bins(words))
        elif self.kind == "log":
            self._count(_bit_lengths(words))
        else:
            self._widen()
            self._count((ordered >> self._shift) - (_SIGN >> self._shift))

    def _widen(self) -> None:
        while (self.highest >> self._shift) - (self.lowest >> self._shift) >= _BINS:
            self._shift += 1
            merged: Counter[int] = Counter()
            for place, count in self._bins.items():
                merged[place >> 1] += count
            self._bins = merged

    def _count(self, places: torch.Tensor) -> None:
        values, counts = torch.unique(places, return_counts=True)
        for place, count in zip(values.tolist(), counts.tolist(), strict=True):
            self._bins[place] += count

    def _age_bins(self, words: torch.Tensor) -> torch.Tensor:
        age = (
            torch.tensor(self._clock if self._clock < 2**63 else self._clock - 2**64, device="cpu")
            - words
        )
        edges = torch.tensor([size for _, size in _AGES], device="cpu")
        return torch.bucketize(age, edges)

    def bins(self) -> list[tuple[str, int]]:
        """(label, count), lowest first, without gaps."""
        if not self._bins:
            return []
        first, last = min(self._bins), max(self._bins)
        return [(self._label(place), self._bins[place]) for place in range(first, last + 1)]

    def _label(self, place: int) -> str:
        if self.kind == "age":
            if place == len(_AGES):
                return f"older than {_AGES[-1][0]}"
            return f"up to {_AGES[place][0]} old"
        if self.kind == "log":
            low, high = (0, 0) if place == 0 else (1 << (place - 1), (1 << place) - 1)
        else:
            low = place << self._shift
            high = low + (1 << self._shift) - 1
        low, high = max(low, self.lowest), min(high, self.highest)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _bit_lengths(words: torch.Tensor) -> torch.Tensor:
    """Bits of unsigned numbers: 0 for 0, 64 for the largest."""
    lengths = torch.where(words < 0, 64, 0)
    rest = torch.where(words < 0, 0, words)
    for bit in (32, 16, 8, 4, 2, 1):
        large = rest >= (1 << bit)
        lengths += large * bit
        rest = torch.where(large, rest >> bit, rest)
    return lengths + (rest > 0)


class Highest:
    """The ``count`` ids with the highest number, of all that were seen."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._numbers: torch.Tensor | None = None

    def add(self, ids: torch.Tensor, numbers: torch.Tensor) -> None:
        if self._numbers is not None:
            ids = torch.cat([self._ids, ids])
            numbers = torch.cat([self._numbers, numbers])
        best = torch.topk(numbers, min(self._count, len(ids)))
        self._numbers, self._ids = best.values, ids[best.indices]

    def items(self) -> list[tuple[int, Any]]:
        if self._numbers is None:
            return []
        return list(zip(self._ids.tolist(), self._numbers.tolist(), strict=True))


@dataclass
class Statistics:
    """Of a table: feed it batches with :meth:`add`.

    newest: (id, score as an unsigned number) of the highest scores: of the pair, the later ones.
    largest: (id, Euclidean norm) of the longest rows.
    """

    table: TableInfo
    top: int
    rows: int = 0
    lowest_id: int | None = None
    highest_id: int | None = None
    not_finite: int = 0
    histograms: dict[str, Histogram] = field(init=False)

    def __post_init__(self) -> None:
        kinds = {"TIMESTAMP": "age", "LFU": "log"}
        self.histograms = {
            name: Histogram(kinds.get(name, "linear"), self.table.clock or 0)
            for name in self.table.score_names
        }
        self._newest = Highest(self.top)
        self._largest = Highest(self.top)

    def add(self, batch: Batch) -> None:
        if not len(batch):
            return
        self.rows += len(batch)
        low, high = (int(one) for one in torch.aminmax(batch.ids))
        self.lowest_id = low if self.lowest_id is None else min(low, self.lowest_id)
        self.highest_id = high if self.highest_id is None else max(high, self.highest_id)
        if batch.scores is not None:
            words = batch.scores if batch.scores.dim() == 2 else batch.scores[:, None]
            for place, name in enumerate(self.histograms):
                self.histograms[name].add(words[:, place])
            self._newest.add(batch.ids, words[:, 0] ^ _SIGN)
        if batch.embeddings is not None:
            norms = batch.embeddings.float().norm(dim=1)
            self.not_finite += int((~torch.isfinite(norms)).sum())
            self._largest.add(batch.ids, torch.nan_to_num(norms, nan=float("inf")))

    @property
    def newest(self) -> list[tuple[int, int]]:
        return [(id_, unsigned(word ^ _SIGN)) for id_, word in self._newest.items()]

    @property
    def largest(self) -> list[tuple[int, float]]:
        return self._largest.items()
