"""Dynamic tables through torch.distributed.checkpoint."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from dynamicemb import (
    CheckpointError,
    CorruptCheckpointError,
    DynamicEmbedding,
    InvalidArgumentError,
    UsageError,
)
from dynamicemb.dcp import DynamicTables, dense_state_dict
from dynamicemb.routing import Routing
from dynamicemb.table.content import merge, whole
from models import Content, content, contents, make_model, train
from processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


class Net(nn.Module):
    def __init__(self, strategy: str = "STEP", seed: int = 1) -> None:
        super().__init__()
        self.emb = make_model(strategy, seed=seed)
        torch.manual_seed(seed)
        self.dense = nn.Linear(8, 1)


def test_a_model_is_saved_and_loaded(memory_path: Path) -> None:
    model = Net()
    train(model.emb)
    assert isinstance(DynamicTables(model), Stateful)
    dcp.save(
        {"model": dense_state_dict(model), "tables": DynamicTables(model)},
        checkpoint_id=memory_path,
    )
    other = Net(seed=5)
    train(other.emb, seed=7)
    dcp.load(
        {"model": dense_state_dict(other), "tables": DynamicTables(other)},
        checkpoint_id=memory_path,
    )
    assert contents(other.emb) == contents(model.emb)
    assert torch.equal(other.dense.weight, model.dense.weight)
    for a, b in zip(other.emb.tables, model.emb.tables, strict=True):
        assert a.progress() == b.progress()


def test_the_dense_part_has_its_usual_names() -> None:
    assert set(dense_state_dict(Net())) == {"dense.weight", "dense.bias"}
    assert set(dense_state_dict(nn.DataParallel(Net()))) == {
        "module.dense.weight",
        "module.dense.bias",
    }
    assert dense_state_dict(DynamicEmbedding(4)) == {}


def table_of(rank: int, world_size: int, dist_type: str) -> Any:
    model = make_model("STEP", names=("t",))
    block = 50 if dist_type == "continuous" else None
    model.routings = {"t": Routing(dist_type, world_size, rank, block)}
    return model


def save(rank: int, world_size: int, path: str, dist_type: str) -> None:
    model = table_of(rank, world_size, dist_type)
    ids = torch.arange(-300, 300)
    mine = ids[model.routings["t"].owned(ids)]
    model(mine, torch.tensor([0, len(mine)])).sum().backward()
    dcp.save({"tables": DynamicTables(model)}, checkpoint_id=path)


def load(rank: int, world_size: int, path: str, dist_type: str, known: bool) -> Content | str:
    model = table_of(rank, world_size, dist_type)
    try:
        tables = DynamicTables(model, saved_in=path if known else None)
        dcp.load({"tables": tables}, checkpoint_id=path)
    except Exception as error:
        assert len(model.tables[0]) == 0
        return f"{type(error).__name__}: {error}"
    assert model.routings["t"].owned(torch.tensor(list(content(model.tables[0])))).all()
    return content(model.tables[0])


def joined(parts: list[Any]) -> Content:
    whole: Content = {}
    for part in parts:
        assert isinstance(part, dict), part
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


def test_any_number_of_ranks_to_any_other(memory_path: Path) -> None:
    path = str(memory_path)
    run_ranks(2, save, 2, path, "roundrobin")
    same = joined(run_ranks(2, load, 2, path, "roundrobin", False))
    assert sorted(same) == list(range(-300, 300))
    assert all(state != (0.0,) * 8 for _, state, _ in same.values())
    assert joined(run_ranks(3, load, 3, path, "continuous", True)) == same
    assert joined(run_ranks(1, load, 1, path, "roundrobin", True)) == same
    (refused, _) = run_ranks(2, load, 2, path, "hash_roundrobin", False)
    assert "saved_in" in refused


def test_merged_contents_count_their_rows() -> None:
    """So that what is cut off later is noticed."""
    contents = []
    for first in (0, 100):
        table = table_of(0, 1, "roundrobin").tables[0]
        table.insert(torch.arange(first, first + 5), torch.ones(5, table.dim, dtype=table.dtype))
        contents.append(whole(table, table.state_dict(), table.optimizer.kind))
    table = table_of(0, 1, "roundrobin").tables[0]
    merged = merge(contents)
    table.load_state_dict(merged)
    assert sorted(content(table)) == [*range(5), *range(100, 105)]
    cut = {name: one if name == "meta" else one[:-1] for name, one in merged.items()}
    with pytest.raises(InvalidArgumentError, match="has 9 ids; allowed: 10"):
        table.load_state_dict(cut)


def test_another_number_of_ranks_without_a_hint_is_refused(memory_path: Path) -> None:
    path = str(memory_path)
    run_ranks(2, save, 2, path, "roundrobin")
    (refused,) = run_ranks(1, load, 1, path, "roundrobin", False)
    assert "was saved by 2 ranks, and 1 load it" in refused
    assert "saved_in" in refused


def test_what_does_not_fit_changes_nothing(memory_path: Path) -> None:
    model = Net()
    train(model.emb)
    dcp.save({"tables": DynamicTables(model)}, checkpoint_id=memory_path)
    other = Net()
    train(other.emb, seed=3)
    other.emb.tables[1].name = "another"
    before = contents(other.emb)
    with pytest.raises(Exception, match="'another' of 'model.emb' was not saved"):
        dcp.load({"tables": DynamicTables(other)}, checkpoint_id=memory_path)
    assert contents(other.emb) == before


def test_damaged_entries() -> None:
    model = Net()
    train(model.emb)
    tables = DynamicTables(model)
    state = tables.state_dict()
    before = contents(model.emb)
    with pytest.raises(CheckpointError, match="rank_0 was not loaded"):
        tables.load_state_dict({"rank_0": b""})
    with pytest.raises(CorruptCheckpointError, match="rank_0 cannot be read"):
        tables.load_state_dict({"rank_0": state["rank_0"][:-500]})
    with pytest.raises(CorruptCheckpointError, match="rank_0 cannot be read"):
        tables.load_state_dict({"rank_0": b"garbage"})
    assert contents(model.emb) == before


@pytest.mark.parametrize("name", ["ids", "embeddings", "scores", "meta"])
@pytest.mark.parametrize("change", ["missing", "number", "short"])
def test_an_entry_that_is_not_what_was_saved_is_corrupt(name: str, change: str) -> None:
    model = Net()
    train(model.emb)
    tables = DynamicTables(model)
    before = contents(model.emb)
    payload = torch.load(io.BytesIO(tables.state_dict()["rank_0"]), weights_only=True)
    content = payload["tables"][1]["content"]
    if change == "missing":
        del content[name]
    elif change == "number":
        content[name] = 5
    elif name in ("ids", "meta"):
        content[name] = content[name][:-1]
    else:
        pytest.skip("the table's own check of lengths")
    data = io.BytesIO()
    torch.save(payload, data)
    with pytest.raises(CorruptCheckpointError):
        tables.load_state_dict({"rank_0": data.getvalue()})
    assert contents(model.emb) == before


def test_objects_that_are_refused(memory_path: Path) -> None:
    with pytest.raises(TypeError, match="model"):
        DynamicTables("model")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no dynamic embedding tables"):
        DynamicTables(nn.Linear(1, 1)).state_dict()
    dcp.save({"x": torch.zeros(1)}, checkpoint_id=memory_path)
    with pytest.raises(CheckpointError, match=r"ranks \[\] under 'tables'"):
        DynamicTables(Net(), saved_in=memory_path)
