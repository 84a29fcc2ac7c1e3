"""Why the two kinds of tables differ: what ids of the window share a row of the hashed tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dynamicemb.cli.training.hashed import hashed_rows
from dynamicemb.cli.training.metrics import auc
from dynamicemb.cli.training.tables import hashed_capacity

if TYPE_CHECKING:
    from dynamicemb.cli.training.run import Run


@dataclass(frozen=True)
class Sharing:
    """One table in the window: distinct ids, rows of the hashed table they fall into, the share of
    ids that share their row with another, and how often ids occurred."""

    ids: int
    rows: int
    shared: float
    frequencies: np.ndarray


@dataclass(frozen=True)
class Group:
    """Examples of the window, and the AUC of each predictor on them."""

    name: str
    examples: int
    auc: dict[str, float]


def ids_of(run: Run) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """For every table, per feature of the window: (ids, the example each belongs to)."""
    schema = run.source.schema
    features = {feature: table for table, some in schema.tables.items() for feature in some}
    result: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in schema.tables}
    first = 0
    for batch in run.recent:
        lengths = batch.lengths.view(len(features), -1)
        size = lengths.shape[1]
        pieces = batch.ids.split(lengths.sum(1).tolist())
        for (_, table), ids, length in zip(features.items(), pieces, lengths, strict=True):
            examples = torch.repeat_interleave(
                torch.arange(first, first + size, device="cpu"), length
            )
            result[table].append((ids.numpy(), examples.numpy()))
        first += size
    return result


def sharing(run: Run) -> dict[str, Sharing]:
    """Who shares a row with whom, table by table."""
    rows = hashed_capacity(run.options)
    result = {}
    for table, pieces in ids_of(run).items():
        every = np.concatenate([ids for ids, _ in pieces])
        distinct, frequencies = np.unique(every, return_counts=True)
        where = hashed_rows(torch.from_numpy(distinct), rows).numpy()
        _, inverse, taken = np.unique(where, return_inverse=True, return_counts=True)
        shared = float((taken[inverse] > 1).mean()) if len(distinct) else 0.0
        result[table] = Sharing(len(distinct), len(taken), shared, frequencies)
    return result


def by_frequency(run: Run) -> list[Group]:
    """The window's examples in three parts by their rarest single id: how often it occurred."""
    assert run.window is not None
    labels = run.window.labels()
    rarest = np.full(len(labels), np.iinfo(np.int64).max)
    for pieces in ids_of(run).values():
        every = np.concatenate([ids for ids, _ in pieces])
        examples = np.concatenate([of for _, of in pieces])
        _, inverse, counts = np.unique(every, return_inverse=True, return_counts=True)
        np.minimum.at(rarest, examples, counts[inverse])
    low, high = np.floor(np.quantile(rarest, [1 / 3, 2 / 3])).astype(int)
    parts = (
        (f"rarest id occurred {_times(1, low)}", rarest <= low),
        (f"rarest id occurred {_times(low + 1, high)}", (rarest > low) & (rarest <= high)),
        (f"all ids occurred more than {_times(high, high)}", rarest > high),
    )
    return [
        Group(
            name,
            int(chosen.sum()),
            {one: auc(labels[chosen], run.window.logits(one)[chosen]) for one in run.window.names},
        )
        for name, chosen in parts
        if chosen.any()
    ]


def _times(first: int, last: int) -> str:
    """A number of times, or a range of them."""
    if first < last:
        return f"{first:,} to {last:,} times"
    return "once" if last == 1 else f"{last:,} times"
