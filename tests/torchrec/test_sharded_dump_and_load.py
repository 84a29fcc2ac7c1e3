"""A sharded TorchRec model through DynamicEmbDump and DynamicEmbLoad, on other numbers of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import Net, batch, configs, dynamic_model, dynamic_tables, even, share

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, EmbOptimType
from ranks import Ranks

FUSED = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
SIZE = 12
#: Sorted (id, embedding, state) of one rank's table, by its name.
Content = dict[str, list[tuple[int, list[float], list[float]]]]


def content(model: Any) -> Content:
    return {
        name: sorted(
            (int(id_), row.tolist(), state.tolist())
            for part in table.export()
            for id_, row, state in zip(part.ids, part.embeddings, part.state, strict=True)
        )
        for name, table in dynamic_tables(model).items()
    }


def write(rank: int, world_size: int, *, folder: str) -> Content:
    torch.manual_seed(1)
    model = dynamic_model(Net(configs(True)), FUSED, world_size)
    for step in range(2):
        model(share(batch(step, SIZE), even(SIZE, world_size), rank)).backward()
    DynamicEmbDump(folder, model, optim=True)
    return content(model)


def read(rank: int, world_size: int, *, folder: str) -> tuple[Content, Any]:
    torch.manual_seed(2)
    model = dynamic_model(Net(configs(True)), FUSED, world_size)
    report = DynamicEmbLoad(folder, model, optim=True)
    iterations = {table.iteration for table in dynamic_tables(model).values()}
    return content(model), (list(report.tables), report.did_not_fit, iterations)


def joined(parts: list[Content]) -> Content:
    return {name: sorted(row for part in parts for row in part[name]) for name in parts[0]}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (2, 4), (4, 1)])
def test_any_number_of_ranks_to_any_other(ranks: Ranks, writers: int, readers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = joined(ranks.run(writers, write, folder=folder))
        assert all(saved.values())
        keys = list((Path(folder) / "model.collection").glob("*_emb_keys.rank_*.world_size_*"))
        assert len(keys) == writers * len(saved)
        results = ranks.run(readers, read, folder=folder)
        assert joined([rows for rows, _ in results]) == saved
        for _, report in results:
            assert report == (["model.collection"], 0, {2})
