"""What goes into tables and comes out of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from dynamicemb.errors import InvalidArgumentError
from dynamicemb.options import DynamicEmbPoolingMode


@dataclass
class Rows:
    """Whole rows: ids [n] int64, embeddings [n, dim], state [n, state_dim] float32, and scores:
    int64 tensors that hold 64 unsigned bits, [n], or [n, 2] (timestamp, count) for the pair
    strategy."""

    ids: torch.Tensor
    embeddings: torch.Tensor
    state: torch.Tensor
    scores: torch.Tensor

    def __len__(self) -> int:
        return int(self.ids.shape[0])


@dataclass
class Found:
    """What :meth:`Table.find` saw; where ``found`` is False, embeddings hold the constant of
    ``eval_initializer_args``, state and scores 0."""

    found: torch.Tensor
    embeddings: torch.Tensor
    state: torch.Tensor
    scores: torch.Tensor


@dataclass
class Inserted:
    """Rows in the order of the ids, their slots (-1: could not be inserted, reads 0.0; -2: not
    admitted), and the evicted rows if they were asked for."""

    embeddings: torch.Tensor
    slots: torch.Tensor
    evicted: Rows | None


@dataclass
class Written:
    """Which ids are stored now, and the evicted rows if they were asked for."""

    written: torch.Tensor
    evicted: Rows | None


@dataclass(frozen=True)
class Progress:
    """The numbers of a table that go on counting, so that a saved table continues as it was.

    step: the STEP score of the next training batch. custom_score: of ``set_score``, if any.
    iteration: optimizer updates so far. next_row_number: NO_EVICTION's. admission_calls: how often
    a probability strategy was asked. seed: of new rows.
    """

    step: int
    custom_score: int | None
    iteration: int
    next_row_number: int
    admission_calls: int
    seed: int

    def to_bytes(self) -> bytes:
        """For :meth:`from_bytes`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Progress:
        """What :meth:`to_bytes` made."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(f"this is no progress of a table: {text!r}") from error


@dataclass(frozen=True)
class TableStats:
    """Counts since the table was made (or ``reset_stats``), and its size now.

    hits, misses: distinct ids of training batches that were or were not there.
    inserts, evictions: rows that came and went.
    failures: ids that found no slot. rejections: ids that were not admitted.
    dropped_gradients: gradients of rows that were gone when backward came.
    bytes: memory in use.
    """

    hits: int
    misses: int
    inserts: int
    evictions: int
    failures: int
    rejections: int
    dropped_gradients: int
    size: int
    capacity: int
    load_factor: float
    bytes: int


class Pooling(NamedTuple):
    """How the ids of a call become output rows.

    mode NONE: output [n, dim], row i for id i. SUM, MEAN: output [batch_size, sum of the features'
    dims]; ``offsets`` (int64, features * batch_size + 1, feature-major) bounds the bags.
    ``features`` says how many features each table has. ``weights`` (float32, [n]) scale the rows.
    ``dtype`` is the output's and its gradient's.
    """

    mode: DynamicEmbPoolingMode
    dtype: torch.dtype
    features: tuple[int, ...]
    batch_size: int = 0
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    @property
    def pooled(self) -> bool:
        """Whether rows are added up to bags."""
        return self.mode is not DynamicEmbPoolingMode.NONE


#: Every id has a row of float32 of its own.
UNPOOLED = Pooling(DynamicEmbPoolingMode.NONE, torch.float32, (1,))

#: Where the ids of each table begin and end: numbers, or int64 on the tables' device.
Bounds = Sequence[int] | torch.Tensor


#: Per table: distinct ids int64 [n] and their summed gradients float32 [n, dim].
SummedGradients = list[tuple[torch.Tensor, torch.Tensor]]


class Lookup:
    """The ids of one training step and where their rows are; made by a :class:`TableGroup`.

    It holds no pin: rows may move or be evicted before the update, which then finds them again or
    drops the gradient and counts it.
    """


@dataclass
class Kept:
    """A training batch, the rows that each table evicted for it, and how many of its distinct ids
    found no slot (0 where ``safe_check_mode`` is IGNORE)."""

    lookup: Lookup
    evicted: list[Rows]
    failures: list[int]
