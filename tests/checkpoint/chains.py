"""Models that change and evict, and the chains of deltas that they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamicemb import BatchedDynamicEmbeddingTables
from dynamicemb.incremental_dump import dump_delta
from models import make_model, train
from tables import contents as rows_of

Model = BatchedDynamicEmbeddingTables


def small(strategy: str = "STEP", **changes: Any) -> Model:
    """Tables that evict: 256 rows for about 1000 ids."""
    if strategy != "NO_EVICTION":
        changes = {"max_capacity": 256, "bucket_capacity": 16} | changes
    return make_model(strategy, init_capacity=None, **changes)


def change(model: Model, seed: int) -> None:
    """Train, which evicts, and erase some of what is there."""
    train(model, 2, seed=seed)
    for table in model.tables:
        ids = rows_of(table).ids
        table.erase(ids[seed % 7 :: 13])


def written(path: Path, deltas: int = 4, strategy: str = "STEP", **changes: Any) -> Model:
    model = small(strategy, **changes)
    change(model, 100)
    dump_delta(path, model)
    for seed in range(deltas):
        change(model, seed)
        dump_delta(path, model)
    return model
