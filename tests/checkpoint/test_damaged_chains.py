"""Chains that are not as they were written, and writes that fail: refused before a row changes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chains import change, small, written
from faults import FailingSystem

from dynamicemb import (
    CheckpointError,
    CorruptCheckpointError,
    UsageError,
)
from dynamicemb.checkpoint import DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint.files import replaced_system
from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.serving import ServingTable
from models import contents, make_model, train


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
