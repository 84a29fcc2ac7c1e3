"""Small models for the checkpoint tests, and their contents as plain data."""

from __future__ import annotations

from typing import Any

import torch

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbTableOptions
from dynamicemb.table import Table
from tables import EXTREME_IDS, STRATEGY, tensor

Content = dict[int, tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]]


def make_model(
    strategy: str = "STEP",
    *,
    names: tuple[str, ...] = ("user", "item"),
    optimizer: str = "adam",
    learning_rate: float = 0.1,
    clock: Any = None,
    seed: int = 1,
    **changes: Any,
) -> BatchedDynamicEmbeddingTables:
    """Tables of dim 4 with room for 4096 rows; `clock` replaces the tables' clocks."""
    fields = {"dim": 4, "max_capacity": 4096, "init_capacity": 128} | changes
    options = [DynamicEmbTableOptions(score_strategy=STRATEGY[strategy], **fields) for _ in names]
    model = BatchedDynamicEmbeddingTables(
        options,
        table_names=list(names),
        optimizer=optimizer,
        learning_rate=learning_rate,
        seed=seed,
    )
    if clock is not None:
        for table in model.tables:
            table._clock_function = clock
    return model


def train(model: BatchedDynamicEmbeddingTables, steps: int = 3, *, seed: int = 0) -> None:
    """Steps on random ids, the extreme ones among them."""
    draw = torch.Generator().manual_seed(seed)
    tables = len(model.tables)
    for _ in range(steps):
        ids = torch.randint(-500, 500, (tables * 60,), generator=draw)
        ids[: len(EXTREME_IDS)] = tensor(EXTREME_IDS)
        for table in model.tables:
            if table.options.score_strategy is STRATEGY["CUSTOMIZED"]:
                table.set_score((table.custom_score or 0) + 1)
        out = model(ids, torch.arange(0, len(ids) + 1, 6))
        out.backward(torch.randn(out.shape, generator=draw))


def content(table: Table) -> Content:
    """Every row, bit by bit, by id."""
    found: Content = {}
    for rows in table.export():
        for i, id_ in enumerate(rows.ids.tolist()):
            scores = rows.scores[i].reshape(-1).tolist()
            found[id_] = (
                tuple(rows.embeddings[i].float().tolist()),
                tuple(rows.state[i].tolist()),
                tuple(scores),
            )
    return found


def contents(model: BatchedDynamicEmbeddingTables) -> dict[str, Content]:
    return {table.name: content(table) for table in model.tables}
