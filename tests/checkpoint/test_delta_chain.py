"""A chain of deltas: base + deltas is the table, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from chains import Model, change, small, written

from dynamicemb import (
    CheckpointError,
    DynamicEmbTableOptions,
    UsageError,
)
from dynamicemb.checkpoint import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.serving import ServingTable
from models import contents, make_model, train
from tables import STRATEGY, Clock
from tables import contents as rows_of


@pytest.mark.parametrize("strategy", STRATEGY)
def test_base_and_deltas_equal_a_full_dump_bit_for_bit(memory_path: Path, strategy: str) -> None:
    model = small(strategy)
    change(model, 100)
    first = dump_delta(memory_path / "chain", model)
    assert (first.sequence, first.removed) == (0, 0)
    assert first.rows == sum(len(table) for table in model.tables)
    for seed in range(5):
        if strategy == "NO_EVICTION" or seed != 3:  # a delta may also be empty
            change(model, seed)
        delta = dump_delta(memory_path / "chain", model)
        assert delta.sequence == seed + 1
        assert (delta.removed > 0) == (strategy == "NO_EVICTION" or seed != 3)
        DynamicEmbDump(memory_path / f"full{seed}", model, optim=True)
        replica, full = small(strategy, seed=9), small(strategy, seed=9)
        assert apply_delta(memory_path / "chain", replica) == seed + 2
        DynamicEmbLoad(memory_path / f"full{seed}", full, optim=True)
        assert contents(replica) == contents(model)
        if "TIMESTAMP" not in strategy:  # a full load keeps ages, a chain the scores
            assert contents(full) == contents(model)
        for a, b in zip(replica.tables, model.tables, strict=True):
            assert a.progress() == b.progress()


def test_a_replica_follows_delta_by_delta(memory_path: Path) -> None:
    model = small()
    change(model, 100)
    dump_delta(memory_path, model)
    replica = small(seed=9)
    assert apply_delta(memory_path, replica) == 1
    assert apply_delta(memory_path, replica) == 0
    for seed in range(6):
        change(model, seed)
        dump_delta(memory_path, model)
        if seed % 2:
            assert apply_delta(memory_path, replica) == 2
            assert contents(replica) == contents(model)


def test_a_model_that_applied_the_chain_goes_on_with_it(memory_path: Path) -> None:
    written(memory_path, 2)
    successor = small(seed=9)
    with pytest.raises(UsageError, match="'user' stands nowhere on it.*ends with delta 2"):
        dump_delta(memory_path, successor)
    apply_delta(memory_path, successor)
    change(successor, 50)
    assert dump_delta(memory_path, successor).sequence == 3
    replica = small(seed=10)
    apply_delta(memory_path, replica)
    assert contents(replica) == contents(successor)


def test_a_writer_that_was_overtaken_is_refused(memory_path: Path) -> None:
    model = written(memory_path, 1)
    other = small(seed=9)
    apply_delta(memory_path, other)
    change(other, 50)
    dump_delta(memory_path, other)
    change(model, 60)
    with pytest.raises(UsageError, match="stands at delta 1.*ends with delta 2"):
        dump_delta(memory_path, model)


def test_an_update_between_two_deltas_of_an_earlier_lookup(memory_path: Path) -> None:
    model = make_model("STEP", names=("t",))
    ids = torch.tensor([1, 2, 3])
    dump_delta(memory_path, model)
    out = model(ids, torch.tensor([0, 3]))
    assert dump_delta(memory_path, model).rows == 3
    out.sum().backward()
    assert dump_delta(memory_path, model).rows == 3
    assert dump_delta(memory_path, model).rows == 0
    replica = make_model("STEP", names=("t",), seed=9)
    apply_delta(memory_path, replica)
    assert contents(replica) == contents(model)


def test_an_id_that_left_and_came_back_is_not_removed(memory_path: Path) -> None:
    model = make_model("STEP", names=("t",))
    table = model.tables[0]
    table.insert(torch.tensor([1, 2]), torch.zeros(2, 4))
    dump_delta(memory_path, model)
    table.erase(torch.tensor([1, 2]))
    table.insert(torch.tensor([1]), torch.ones(1, 4))
    delta = dump_delta(memory_path, model)
    assert (delta.rows, delta.removed) == (1, 1)
    replica = make_model("STEP", names=("t",), seed=9)
    apply_delta(memory_path, replica)
    assert contents(replica) == contents(model)


def test_a_table_that_was_cleared(memory_path: Path) -> None:
    model = written(memory_path, 1)
    for table in model.tables:
        table.clear()
    dump_delta(memory_path, model)
    replica = small(seed=9)
    apply_delta(memory_path, replica)
    assert contents(replica) == {"user": {}, "item": {}}


def test_rows_of_before_do_not_stay(memory_path: Path) -> None:
    model = written(memory_path, 1)
    replica = small(seed=9)
    train(replica, seed=77)
    apply_delta(memory_path, replica)
    assert contents(replica) == contents(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compact", [False, True])
def test_half_precision_rows(memory_path: Path, dtype: torch.dtype, compact: bool) -> None:
    model = small(embedding_dtype=dtype)
    change(model, 1)
    dump_delta(memory_path, model, compact=compact)
    change(model, 2)
    dump_delta(memory_path, model)
    replica = small(embedding_dtype=dtype, seed=9)
    apply_delta(memory_path, replica)
    assert contents(replica) == contents(model)
    rows = rows_of(model.tables[0])
    assert torch.equal(ServingTable(memory_path, "user")(rows.ids), rows.embeddings)


def test_tables_of_different_types(memory_path: Path) -> None:
    def model_of(seed: int) -> Model:
        options = [
            DynamicEmbTableOptions(dim=4, max_capacity=512, embedding_dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        ]
        return Model(options, table_names=["wide", "half"], optimizer="adam", seed=seed)

    model = model_of(1)
    train(model, 1)
    dump_delta(memory_path, model)
    serving = ServingTable(memory_path, "half")
    train(model, 1, seed=5)
    dump_delta(memory_path, model)
    serving.apply_delta(memory_path)
    rows = rows_of(model.tables[1])
    assert torch.equal(serving(rows.ids), rows.embeddings)
    replica = model_of(2)
    apply_delta(memory_path, replica)
    assert contents(replica) == contents(model)


def test_without_optimizer_state(memory_path: Path) -> None:
    model = small()
    change(model, 1)
    dump_delta(memory_path, model, optim=False)
    change(model, 2)
    dump_delta(memory_path, model)  # the base decides
    assert not list(memory_path.rglob("*opt_values*"))
    replica = small(seed=9)
    apply_delta(memory_path, replica)
    for a, b in zip(replica.tables, model.tables, strict=True):
        assert torch.equal(a.find(rows_of(b).ids).embeddings, rows_of(b).embeddings)


def test_some_of_the_tables(memory_path: Path) -> None:
    model = small()
    change(model, 1)
    dump_delta(memory_path, model, ["item"])
    change(model, 2)
    dump_delta(memory_path, model)
    replica = small(seed=9)
    apply_delta(memory_path, replica)
    assert contents(replica)["item"] == contents(model)["item"]
    assert contents(replica)["user"] == {}


@pytest.mark.parametrize("behind", [False, True])
def test_timestamps_of_a_machine_whose_clock_is_behind(memory_path: Path, behind: bool) -> None:
    clock = Clock(time=10_000, step=10)
    model = small("TIMESTAMP", clock=clock)
    change(model, 1)
    dump_delta(memory_path, model)
    change(model, 2)
    dump_delta(memory_path, model)
    end = clock.time
    now = 5_000 if behind else 50_000
    replica = small("TIMESTAMP", clock=Clock(time=now))
    apply_delta(memory_path, replica)
    for a, b in zip(replica.tables, model.tables, strict=True):
        scores = b.find(rows_of(a).ids).scores - rows_of(a).scores
        assert scores.unique().numel() == 1  # all moved alike
        assert int(rows_of(a).scores.max()) <= now
        assert int(scores[0]) == 0 if not behind else 0 <= end - now - int(scores[0]) < 100


# ---- serving ----


def test_a_serving_table_follows_in_one_call(memory_path: Path) -> None:
    model = small()
    change(model, 100)
    dump_delta(memory_path, model)
    serving = ServingTable(memory_path, "user")
    ids = torch.arange(-600, 600)
    for seed in range(4):
        change(model, seed)
        dump_delta(memory_path, model)
        assert apply_delta(memory_path, serving) == 1
        assert serving.sequence == seed + 1
        for one in (serving, ServingTable(memory_path, "user", verify=True)):
            expected = model.tables[0].find(ids)
            found, embeddings = one.find(ids)
            assert torch.equal(found, expected.found)
            assert torch.equal(embeddings, expected.embeddings)
    assert serving.apply_delta(memory_path) == 0


def test_a_serving_table_of_the_base_alone(memory_path: Path) -> None:
    model = written(memory_path, 2)
    serving = ServingTable(memory_path / "base", "item")
    assert serving.sequence == 0
    assert serving.apply_delta(memory_path) == 2
    rows = rows_of(model.tables[1])
    assert torch.equal(serving(rows.ids), rows.embeddings)
    with pytest.raises(CheckpointError, match="is a delta"):
        ServingTable(memory_path / "delta_00000001", "item")


def test_a_serving_table_of_another_chain(memory_path: Path) -> None:
    written(memory_path / "a", 1)
    written(memory_path / "b", 1)
    serving = ServingTable(memory_path / "a", "user")
    before = serving(torch.arange(-600, 600))
    with pytest.raises(CheckpointError, match="the chain begins with checkpoint"):
        serving.apply_delta(memory_path / "b")
    assert torch.equal(serving(torch.arange(-600, 600)), before)


def test_a_delta_says_where_it_belongs(memory_path: Path) -> None:
    written(memory_path, 2)
    manifests = [
        json.loads((memory_path / name / "dynamicemb_manifest.json").read_text())["manifest"]
        for name in ("base", "delta_00000001", "delta_00000002")
    ]
    base, first, second = manifests
    assert first["extra"]["delta"] == {"base": base["id"], "sequence": 1, "previous": base["id"]}
    assert second["extra"]["delta"]["previous"] == first["id"]


@pytest.mark.parametrize("name", ["../x", "a/b", "x\0y", "*", "[", ".", "n" * 10_000, "наука"])
def test_any_table_name_stays_inside_the_folder(memory_path: Path, name: str) -> None:
    chain = memory_path / "chain"
    model = make_model(names=(name, "other"))
    train(model, 1)
    dump_delta(chain, model)
    train(model, 1, seed=3)
    dump_delta(chain, model)
    assert os.listdir(memory_path) == ["chain"]
    replica = make_model(names=(name, "other"), seed=9)
    apply_delta(chain, replica)
    assert contents(replica) == contents(model)
    rows = rows_of(model.tables[0])
    assert torch.equal(ServingTable(chain, name)(rows.ids), rows.embeddings)
