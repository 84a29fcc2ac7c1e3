"""Small helpers that the table tests share: options, tables, ids and their contents as lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.table import Rows, Table, create_table
from reference import U64, ReferenceTable, hash64

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EXTREME_IDS = (-1, -2, -3, -4, INT64_MIN, INT64_MIN + 1, INT64_MAX, INT64_MAX - 1, 0, 1)
DEBUG = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.DEBUG)

STRATEGY = {
    **DynamicEmbScoreStrategy.__members__,
    "TIMESTAMP_LFU": (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU),
}


class Clock:
    """A clock that the test moves: `clock.time = 5`, or `step` ticks at each reading."""

    def __init__(self, time: int = 1, step: int = 0) -> None:
        self.time = time
        self.step = step
        self.readings = 0

    def __call__(self) -> int:
        self.readings += 1
        self.time += self.step
        return self.time


def make_options(strategy: str = "TIMESTAMP", **changes: Any) -> DynamicEmbTableOptions:
    """Options for rows of 4, one bucket of 16, the DEBUG initialiser, with `changes`."""
    fields: dict[str, Any] = {
        "dim": 4,
        "max_capacity": 16,
        "bucket_capacity": 16,
        "initializer_args": DEBUG,
        "score_strategy": STRATEGY[strategy],
    }
    return DynamicEmbTableOptions(**(fields | changes))


def make_table(
    strategy: str = "TIMESTAMP",
    *,
    optimizer: Any = None,
    clock: Any = None,
    seed: int | None = None,
    name: str = "table",
    **changes: Any,
) -> Table:
    """A table of `make_options(...)`; without `clock`, one that ticks at each reading."""
    return create_table(
        make_options(strategy, **changes),
        optimizer=optimizer,
        name=name,
        seed=seed,
        clock=clock or Clock(step=1),
    )


def signed(value: int) -> int:
    """The int64 with the bits of `value`."""
    value &= U64
    return value - 2**64 if value >> 63 else value


def tensor(values: Iterable[int]) -> torch.Tensor:
    """An int64 tensor of any 64-bit numbers, signed or unsigned."""
    return torch.tensor([signed(v) for v in values], dtype=torch.int64)


def debug_value(id_: int) -> float:
    """What the DEBUG initialiser writes into each column."""
    return float((id_ & U64) % 100000)


def score_list(scores: torch.Tensor) -> list[tuple[int, ...]]:
    """Score bits as tuples of unsigned words."""
    words = scores.tolist()
    if scores.dim() == 1:
        return [(w & U64,) for w in words]
    return [tuple(w & U64 for w in row) for row in words]


def score_tensor(scores: Sequence[tuple[int, ...]], words: int = 1) -> torch.Tensor:
    """The inverse of `score_list`: [n] for one word, [n, 2] for the pair."""
    flat = tensor(word for score in scores for word in score)
    return flat if words == 1 else flat.reshape(-1, words)


def contents(table: Table, **options: Any) -> Rows:
    """The whole export in one piece."""
    batches = list(table.export(**options))
    if not batches:
        words = () if not isinstance(table.options.score_strategy, tuple) else (2,)
        return Rows(
            ids=torch.empty(0, dtype=torch.int64),
            embeddings=torch.empty(0, table.dim, dtype=table.dtype),
            state=torch.empty(0, table.state_dim),
            scores=torch.empty(0, *words, dtype=torch.int64),
        )
    return Rows(
        ids=torch.cat([b.ids for b in batches]),
        embeddings=torch.cat([b.embeddings for b in batches]),
        state=torch.cat([b.state for b in batches]),
        scores=torch.cat([b.scores for b in batches]),
    )


def equal_rows(a: Rows, b: Rows) -> bool:
    """Bit-equal in everything (rows of NaN would differ; the tests have none)."""
    return (
        torch.equal(a.ids, b.ids)
        and torch.equal(a.embeddings, b.embeddings)
        and torch.equal(a.state, b.state)
        and torch.equal(a.scores, b.scores)
    )


def scores_of(table: Table, ids: Iterable[int]) -> list[int]:
    """The single-word scores of ids that are all there."""
    found = table.find(tensor(ids))
    assert found.found.all()
    return [s for (s,) in score_list(found.scores)]


def ids_of_bucket(bucket: int, num_buckets: int, count: int, start: int = 0) -> list[int]:
    """The first `count` ids from `start` on that live in `bucket`."""
    found: list[int] = []
    id_ = start
    while len(found) < count:
        if (hash64(id_) >> 32) * num_buckets >> 32 == bucket:
            found.append(id_)
        id_ += 1
    return found


def reference_for(table: Table, strategy: str, clock: Any = None) -> ReferenceTable:
    """A reference with the options of `table`."""
    options = table.options
    assert options.max_capacity is not None
    return ReferenceTable(
        max_capacity=options.max_capacity,
        init_capacity=options.init_capacity,
        bucket_capacity=options.bucket_capacity,
        max_load_factor=options.max_load_factor,
        strategy=strategy,
        clock=clock,
    )
