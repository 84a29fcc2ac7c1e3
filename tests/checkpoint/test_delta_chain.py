"""A chain of deltas: base + deltas is the table, or it is refused before a row changes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FailingSystem

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    CheckpointError,
    CorruptCheckpointError,
    DynamicEmbTableOptions,
    UsageError,
)
from dynamicemb.checkpoint import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint.files import replaced_system
from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.serving import ServingTable
from models import contents, make_model, train
from tables import STRATEGY, Clock
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


# ---- chains that are not as they were written ----


def _drop(chain: Path) -> None:
    shutil.rmtree(chain / "delta_00000002")


def _double(chain: Path) -> None:
    shutil.copytree(chain / "delta_00000004", chain / "delta_00000005")


def _repeat(chain: Path) -> None:
    shutil.rmtree(chain / "delta_00000003")
    shutil.copytree(chain / "delta_00000002", chain / "delta_00000003")


def _swap(chain: Path) -> None:
    (chain / "delta_00000002").rename(chain / "x")
    (chain / "delta_00000003").rename(chain / "delta_00000002")
    (chain / "x").rename(chain / "delta_00000003")


def _close_the_gap(chain: Path) -> None:
    shutil.rmtree(chain / "delta_00000002")
    (chain / "delta_00000003").rename(chain / "delta_00000002")
    (chain / "delta_00000004").rename(chain / "delta_00000003")


def _foreign(chain: Path) -> None:
    other = chain.parent / "other"
    written(other, 4)
    shutil.rmtree(chain / "delta_00000004")
    shutil.copytree(other / "delta_00000004", chain / "delta_00000004")


def _base_as_delta(chain: Path) -> None:
    shutil.rmtree(chain / "delta_00000001")
    shutil.copytree(chain / "base", chain / "delta_00000001")


def _other_base(chain: Path) -> None:
    shutil.rmtree(chain / "base")
    DynamicEmbDump(chain / "base", small(), optim=True)


def _lost_manifest(chain: Path) -> None:
    (chain / "delta_00000003" / "dynamicemb_manifest.json").unlink()


def _link(chain: Path) -> None:
    (chain / "delta_00000004").rename(chain.parent / "elsewhere")
    (chain / "delta_00000004").symlink_to(chain.parent / "elsewhere")


def _lost_file(chain: Path) -> None:
    next((chain / "delta_00000003").rglob("*_emb_removed_keys.*")).unlink()


def _swapped_files(chain: Path) -> None:
    a = next((chain / "delta_00000003").rglob("user_emb_values.*"))
    b = next((chain / "delta_00000002").rglob("user_emb_values.*"))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


DAMAGES = [
    _drop,
    _double,
    _repeat,
    _swap,
    _close_the_gap,
    _foreign,
    _base_as_delta,
    _other_base,
    _lost_manifest,
    _link,
    _lost_file,
    _swapped_files,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__[1:])
def test_a_damaged_chain_is_refused_before_any_row_changes(
    memory_path: Path, damage: Callable[[Path], None]
) -> None:
    chain = memory_path / "chain"
    model = written(chain, 4)
    damage(chain)
    fresh = small(seed=9)
    train(fresh, seed=77)
    before = contents(fresh)
    with pytest.raises(CorruptCheckpointError):
        apply_delta(chain, fresh)
    assert contents(fresh) == before
    with pytest.raises(CheckpointError):
        ServingTable(chain, "user", verify=True)
    if damage not in (_lost_file, _swapped_files):  # the writer sees the order, not the bytes
        change(model, 9)
        with pytest.raises((CheckpointError, UsageError)):
            dump_delta(chain, model)


def test_a_follower_whose_place_is_gone(memory_path: Path) -> None:
    chain = memory_path / "chain"
    written(chain, 3)
    follower = small(seed=9)
    apply_delta(chain, follower)
    serving = ServingTable(chain, "user")
    before, found = contents(follower), serving(torch.arange(-600, 600))
    shutil.rmtree(chain / "delta_00000003")
    with pytest.raises(CheckpointError, match="stands at delta 3"):
        apply_delta(chain, follower)
    with pytest.raises(CheckpointError, match="no delta 3"):
        serving.apply_delta(chain)
    assert contents(follower) == before
    assert torch.equal(serving(torch.arange(-600, 600)), found)


def test_every_bit_counts(memory_path: Path) -> None:
    chain = memory_path / "chain"
    written(chain, 2)
    draw = torch.Generator().manual_seed(4)
    files = sorted(file for file in chain.rglob("*") if file.is_file() and file.stat().st_size)
    assert len(files) > 20
    fresh = small(seed=9)
    for file in files:
        whole = file.read_bytes()
        for _ in range(2):
            bit = int(torch.randint(8 * len(whole), (), generator=draw))
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(CorruptCheckpointError):
                apply_delta(chain, fresh)
        file.write_bytes(whole[: int(torch.randint(len(whole), (), generator=draw))])
        with pytest.raises(CorruptCheckpointError):
            apply_delta(chain, fresh)
        file.write_bytes(whole)
    assert all(len(table) == 0 for table in fresh.tables)
    assert apply_delta(chain, fresh) == 3


# ---- writing that fails ----


@pytest.mark.parametrize("fault", [errno.EIO, "short"])
def test_a_delta_that_cannot_be_written_changes_nothing(
    memory_path: Path, fault: int | str
) -> None:
    """Fail every fifth write, sync, rename, ... (all of them under -m stress)."""
    _fail_operations(memory_path, fault, 5)


@pytest.mark.stress
@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, "short"])
def test_a_delta_that_cannot_be_written_at_any_operation(
    memory_path: Path, fault: int | str
) -> None:
    _fail_operations(memory_path, fault, 1)


def _fail_operations(folder: Path, fault: int | str, every: int) -> None:
    kinds = ["write", "sync", "rename", "mkdir", "open"]
    nth = 1
    while True:
        chain = folder / f"chain{nth}"
        model = small(names=("t",), max_capacity=64)
        change(model, 1)
        dump_delta(chain, model)
        old = contents(model)
        change(model, 2)
        system = FailingSystem(kinds, nth, fault)
        with replaced_system(system):
            try:
                dump_delta(chain, model)
            except CheckpointError:
                assert system.failed
        replica = small(names=("t",), max_capacity=64, seed=9)
        apply_delta(chain, replica)  # whole, old or new
        assert contents(replica) in (old, contents(model))
        change(model, 3)
        dump_delta(chain, model)  # and the chain goes on
        apply_delta(chain, replica)
        assert contents(replica) == contents(model)
        leftovers = [file.name for file in chain.rglob(".*")]
        assert leftovers == []
        shutil.rmtree(chain)
        if not system.failed:
            return
        nth += every


def test_more_removals_than_are_remembered(memory_path: Path) -> None:
    model = make_model("STEP", names=("t",))
    dump_delta(memory_path, model, removal_limit=4)
    for i in range(20):
        model.tables[0].insert(torch.tensor([i]), torch.zeros(1, 4))
        model.tables[0].erase(torch.tensor([i]))
    with pytest.raises(UsageError, match="does not remember all ids"):
        dump_delta(memory_path, model)
    assert os.listdir(memory_path) == ["base"]


def test_a_folder_that_is_no_chain(memory_path: Path) -> None:
    (memory_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty .*'notes.txt'.* and no chain"):
        dump_delta(memory_path, small())
    with pytest.raises(CheckpointError, match="has no base"):
        apply_delta(memory_path, small())
    assert (memory_path / "notes.txt").read_text() == "mine"


def test_a_planted_link_is_not_written_through(memory_path: Path) -> None:
    chain = memory_path / "chain"
    model = written(chain, 0)
    (memory_path / "outside").mkdir()
    (chain / "delta_00000001").symlink_to(memory_path / "outside")
    change(model, 1)
    with pytest.raises(CheckpointError, match="link"):
        dump_delta(chain, model)
    assert list((memory_path / "outside").iterdir()) == []


def test_a_delta_is_no_checkpoint_to_load(memory_path: Path) -> None:
    written(memory_path, 1)
    model = small()
    with pytest.raises(CheckpointError, match="is a delta; allowed"):
        DynamicEmbLoad(memory_path / "delta_00000001", model)
    assert len(model.tables[0]) == 0


def test_a_delta_says_where_it_belongs(memory_path: Path) -> None:
    written(memory_path, 2)
    manifests = [
        json.loads((memory_path / name / "dynamicemb_manifest.json").read_text())["manifest"]
        for name in ("base", "delta_00000001", "delta_00000002")
    ]
    base, first, second = manifests
    assert first["extra"]["delta"] == {"base": base["id"], "sequence": 1, "previous": base["id"]}
    assert second["extra"]["delta"]["previous"] == first["id"]


def test_models_that_do_not_fit(memory_path: Path) -> None:
    written(memory_path, 1)
    with pytest.raises(UsageError, match="no dynamic embedding tables"):
        apply_delta(memory_path, torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="none of the tables"):
        apply_delta(memory_path, make_model(names=("other",)))
    with pytest.raises(ValueError, match="dim"):
        apply_delta(memory_path, small(dim=8))
    with pytest.raises(TypeError, match="model"):
        apply_delta(memory_path, "model")  # type: ignore[arg-type]


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
