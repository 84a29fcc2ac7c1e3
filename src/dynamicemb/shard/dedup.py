"""Send every id of a table once: distinct ids before they travel, and how to undo it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb import _engine


@dataclass(frozen=True)
class Distinct:
    """The distinct ids of each table, in order of first occurrence, one table after the other.

    ids, counts: int64 [m], counts: how often each occurred. places: int64 [n], where each id of the
    batch is in ``ids``. sizes: how many of ``ids`` each table has.
    """

    ids: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    sizes: list[int]


def distinct_per_table(ids: torch.Tensor, bounds: Sequence[int]) -> Distinct:
    """Table t has the ids (int64) from ``bounds[t]`` to ``bounds[t + 1]``."""
    find = _distinct_on_cpu if ids.device.type == "cpu" else _distinct
    found: list[torch.Tensor] = []
    counts: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    sizes: list[int] = []
    before = 0
    for begin, end in pairwise(bounds):
        one, place, count = find(ids[begin:end].contiguous())
        found.append(one)
        counts.append(count)
        places.append(place.add_(before) if before else place)
        sizes.append(len(one))
        before += len(one)
    return Distinct(_joined(found), _joined(places), _joined(counts), sizes)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _distinct_on_cpu(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    distinct, places, counts = (torch.empty_like(ids) for _ in range(3))
    size = _engine.distinct_ids(
        ids.data_ptr(), len(ids), distinct.data_ptr(), places.data_ptr(), counts.data_ptr()
    )
    return distinct[:size], places, counts[:size]


def _distinct(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with torch alone, on any device."""
    distinct, places, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    # torch sorts by value; what a table does must not depend on the device.
    positions = torch.arange(len(ids), device=ids.device)
    first = positions.new_full((len(distinct),), len(ids))
    order = first.scatter_reduce_(0, places, positions, "amin").argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=ids.device)
    return distinct[order], rank[places], counts[order]


def dedup(
    features: KeyedJaggedTensor, features_per_table: Sequence[int], *, counted: bool
) -> tuple[KeyedJaggedTensor, Distinct]:
    """``features`` with every id of a table once, and what became of them.

    Keys and batch size stay; the ids of a table are spread evenly over its cells, whose order is
    all that a later step relies on. With ``counted`` the counts travel as weights: their 64 bits in
    the shape of float64, because TorchRec moves no integer weights.
    """
    per_feature = features.offset_per_key()
    bounds = [0]
    feature = 0
    for number in features_per_table:
        feature += number
        bounds.append(per_feature[feature])
    distinct = distinct_per_table(features.values().to(torch.int64), bounds)
    stride = features.stride()
    lengths = torch.empty(
        stride * len(features.keys()), dtype=torch.int64, device=features.values().device
    )
    cell = 0
    for number, size in zip(features_per_table, distinct.sizes, strict=True):
        cells = number * stride
        if cells:
            lengths[cell : cell + cells] = size // cells
            lengths[cell : cell + size % cells] += 1
        cell += cells
    sent = KeyedJaggedTensor(
        keys=features.keys(),
        values=distinct.ids,
        weights=distinct.counts.view(torch.float64) if counted else None,
        lengths=lengths,
        stride=stride,
    )
    return sent, distinct


def counts_of(features: KeyedJaggedTensor) -> torch.Tensor:
    """The counts that :func:`dedup` sent along, int64 [n]."""
    counts: torch.Tensor = features.weights().view(torch.int64)
    return counts
