"""A table spread over ranks, as a sharder would do it: every rank holds the ids it owns."""

from __future__ import annotations

from typing import Any

import torch

from dynamicemb import BatchedDynamicEmbeddingTables
from dynamicemb.routing import Routing
from models import make_model
from tables import EXTREME_IDS, tensor

NUM_EMBEDDINGS = 3000
DIST_TYPES = ("roundrobin", "hash_roundrobin", "continuous")


def all_ids() -> torch.Tensor:
    """Ids over the whole 64-bit range, and the small ones that "continuous" spreads in blocks."""
    draw = torch.Generator().manual_seed(3)
    wide = torch.randint(-(2**63), 2**63 - 1, (400,), generator=draw)
    return torch.cat([tensor(EXTREME_IDS), torch.arange(2, NUM_EMBEDDINGS, 7), wide]).unique()


def make_rank_model(
    dist_type: str, size: int, rank: int, *, fill: bool, value: float = 0.0, **changes: Any
) -> BatchedDynamicEmbeddingTables:
    """Two tables of this rank; `fill` with rows that are a function of their id and `value`."""
    model = make_model("LFU", **({"names": ("user", "item")} | changes))
    model.routings = {
        table.name: Routing.of_table(dist_type, NUM_EMBEDDINGS, size, rank)
        for table in model.tables
    }
    for number, table in enumerate(model.tables):
        if fill:
            ids = all_ids()[number:]
            ids = ids[model.routings[table.name].owned(ids)]
            rows = row_of(ids, table.dim, value)
            table.insert(
                ids, rows, state=row_of(ids, table.state_dim, -value), scores=score_of(ids)
            )
            table.iteration = 9
    return model


def row_of(ids: torch.Tensor, dim: int, value: float) -> torch.Tensor:
    return (ids % 9973).float().reshape(-1, 1) + torch.arange(dim) * 0.25 + value


def score_of(ids: torch.Tensor) -> torch.Tensor:
    return ids ^ 0x5555
