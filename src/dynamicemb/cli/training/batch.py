"""Examples as the models take them, and what a source of examples is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torchrec import KeyedJaggedTensor


@dataclass(frozen=True)
class Schema:
    """The columns of a source: names of dense features, and the sparse features of every table."""

    dense: tuple[str, ...]
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """The sparse features, table by table."""
        return tuple(feature for features in self.tables.values() for feature in features)


@dataclass
class Batch:
    """Examples: dense [size, columns] float32, ids int64 in feature-major bags, lengths
    [features * size] int64, labels [size] float32; odds [size]: the true log odds where known."""

    dense: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    odds: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """The same on a device; odds, which no model sees, stay where they are."""
        return Batch(
            self.dense.to(device),
            self.ids.to(device),
            self.lengths.to(device),
            self.labels.to(device),
            self.odds,
        )

    def share(self, rank: int, size: int) -> Batch:
        """The examples of one of ``size`` ranks; all shares together are the batch."""
        begin, end = (self.size * one // size for one in (rank, rank + 1))
        lengths = self.lengths.view(-1, self.size)
        starts = nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        pieces = [
            self.ids[starts[first + begin] : starts[first + end]]
            for first in range(0, len(self.lengths), self.size)
        ]
        return Batch(
            self.dense[begin:end],
            torch.cat(pieces),
            lengths[:, begin:end].reshape(-1),
            self.labels[begin:end],
        )

    def keyed(self, features: tuple[str, ...]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys=list(features), values=self.ids, lengths=self.lengths)


class Source(ABC):
    """A stream of examples that can be taken up again after any number of them."""

    schema: Schema
    #: Examples in all; ``None`` if that is only known at the end.
    examples: int | None
    description: str

    @abstractmethod
    def batches(self, skip: int, size: int) -> Iterator[Batch]:
        """The examples after the first ``skip``, in batches of ``size`` (the last may be smaller).

        A batch depends on the source, ``skip`` and ``size`` alone.
        """

    def day_of(self, examples: int) -> float | None:
        """The day in the stream after so many examples, where a source has days."""
        return None
