"""A sharded TorchRec model: incremental dump, deltas, serving and DCP."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded import Net, batch, configs, dynamic_model, dynamic_tables, even, share

from dynamicemb.dcp import DynamicTables, dense_state_dict
from dynamicemb.incremental_dump import apply_delta, dump_delta, incremental_dump
from dynamicemb.serving import ServingTable
from ranks import Ranks

FUSED = {"learning_rate": 0.1}
SIZE = 12
#: A sorted list of (id, embedding) of one rank's table, by its name.
Content = dict[str, list[tuple[int, list[float]]]]


def model_of(world_size: int, *, static: tuple[str, ...] = ()) -> Any:
    return dynamic_model(Net(configs(True)), FUSED, world_size, static=static)


def train(model: Any, rank: int, world_size: int, step: int) -> None:
    model(share(batch(step, SIZE), even(SIZE, world_size), rank)).backward()


def content(model: Any) -> Content:
    return {
        name: sorted(
            (int(id_), row.tolist())
            for part in table.export()
            for id_, row in zip(part.ids, part.embeddings, strict=True)
        )
        for name, table in dynamic_tables(model).items()
    }


def use(rank: int, world_size: int, *, folder: str) -> Content:
    torch.manual_seed(1)
    model = model_of(world_size)
    train(model, rank, world_size, 0)
    rows, scores = incremental_dump(model, 0)
    assert set(rows) == set(scores) == {"model.collection"}
    mine = {name: {id_ for id_, _ in rows} for name, rows in content(model).items()}
    for name, (ids, _) in rows["model.collection"].items():
        assert ids.unique().numel() == len(ids)
        assert mine[name] < set(ids.tolist())  # also the other rank's
    dump_delta(f"{folder}/chain", model)
    train(model, rank, world_size, 1)
    rows, _ = incremental_dump(model, scores)
    delta = dump_delta(f"{folder}/chain", model)
    assert delta.rows == sum(len(ids) for ids, _ in rows["model.collection"].values())
    dcp.save(
        {"model": dense_state_dict(model), "tables": DynamicTables(model)},
        checkpoint_id=f"{folder}/dcp",
    )
    return content(model)


def follow(rank: int, world_size: int, *, folder: str) -> tuple[Content, Content]:
    torch.manual_seed(2)
    first, second = model_of(world_size), model_of(world_size)
    assert apply_delta(f"{folder}/chain", first) == 2
    dcp.load(
        {"tables": DynamicTables(second, saved_in=f"{folder}/dcp")},
        checkpoint_id=f"{folder}/dcp",
    )
    return content(first), content(second)


def joined(parts: list[Content]) -> Content:
    return {name: sorted(row for part in parts for row in part[name]) for name in parts[0]}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_sharded_model_by_another_number_of_ranks(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = joined(ranks.run(2, use, folder=folder))
        assert all(saved.values())
        results = ranks.run(4, follow, folder=folder)
        assert joined([by_delta for by_delta, _ in results]) == saved
        assert joined([by_dcp for _, by_dcp in results]) == saved
        for name, rows in saved.items():
            serving = ServingTable(Path(folder) / "chain", name)
            ids = torch.tensor([id_ for id_, _ in rows])
            assert serving(ids).tolist() == [row for _, row in rows]


def dense_names(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    model = model_of(world_size, static=("goods",))
    return sorted(model.state_dict()), sorted(dense_state_dict(model))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ordinary_tables_of_a_collection_are_dense(ranks: Ranks) -> None:
    (all_names, dense), _ = ranks.run(2, dense_names)
    assert dense == ["collection.embedding_bags.goods.weight"]
    assert set(dense) <= set(all_names)
