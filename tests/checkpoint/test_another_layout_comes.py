"""A path whose layout changes while it is opened: a checkpoint, a chain or an older layout takes
the place of another one. The reader has one of them, or raises ``ReplacedCheckpointError``; it
reports neither damage nor a missing base."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generations import (
    Interrupted,
    Writer,
    command,
    converted,
    inspected,
    loaded,
    mapped,
    operations_of,
    served,
    verified,
)

from dynamicemb import CheckpointError, CorruptCheckpointError, DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint import legacy
from dynamicemb.checkpoint import replaced as replaced_module
from dynamicemb.checkpoint.chain import read_chain
from dynamicemb.checkpoint.files import replaced_system
from dynamicemb.checkpoint.manifest_json import decode
from dynamicemb.incremental_dump import dump_delta
from models import make_model

READERS: dict[str, Callable[[Path], int]] = {
    "ServingTable": mapped,
    "serve": served,
    "inspect": inspected,
    "verify": verified,
    "convert": converted,
}


def emptied(path: Path) -> None:
    """As ``rm -r path/*`` does: the folder itself stays."""
    for one in path.iterdir():
        if one.is_dir():
            shutil.rmtree(one)
        else:
            one.unlink()


def checkpoint_in_place(writer: Writer, path: Path) -> None:
    emptied(path)
    writer.dump(path)


def chain_in_place(writer: Writer, path: Path) -> None:
    emptied(path)
    writer.fill()
    dump_delta(path, writer.model, progress=False)


KINDS = {"checkpoint": checkpoint_in_place, "chain": chain_in_place}


@pytest.mark.parametrize("name", list(READERS))
@pytest.mark.parametrize("after", list(KINDS))
def test_a_folder_is_emptied_and_filled_with_another_layout(
    memory_path: Path, name: str, after: str
) -> None:
    read, path = READERS[name], memory_path / "x"
    path.mkdir()
    before = next(kind for kind in KINDS if kind != after)
    writer = Writer()
    KINDS[before](writer, path)
    steps = operations_of(lambda: read(path))
    for at in range(1, steps + 1, 1 + steps // 12):
        KINDS[before](writer, path)
        generation = writer.generation
        system = Interrupted(at, lambda: KINDS[after](writer, path))
        with replaced_system(system):
            found = read(path)
        assert found in (generation, writer.generation), f"operation {at}"


@pytest.mark.parametrize("name", ["ServingTable", "inspect", "serve"])
def test_a_chain_whose_base_was_never_committed_is_not_called_replaced(
    memory_path: Path, name: str
) -> None:
    (memory_path / "base" / ".dynamicemb-1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no base|there is no .*checkpoint in"):
        READERS[name](memory_path)


def upstream(path: Path, value: float) -> None:
    model = make_model(optimizer="sgd", names=("t",))
    model.tables[0].insert(torch.arange(10), torch.full((10, 4), value))
    DynamicEmbDump(path.with_suffix(".c"), model, progress=False)
    command("convert", str(path.with_suffix(".c")), str(path), "--to", "upstream")


@pytest.mark.filterwarnings("ignore:the checkpoint in .* is of an older layout")
@pytest.mark.parametrize("gone", [False, True], ids=["renamed", "removed"])
def test_a_load_of_an_older_layout_whose_folder_is_exchanged(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    for name, value in (("x", 1.0), ("new", 2.0)):
        upstream(memory_path / name, value)
    real = legacy._find

    def late(*arguments: object) -> object:
        monkeypatch.setattr(legacy, "_find", real)
        (memory_path / "x").rename(memory_path / "old")
        (memory_path / "new").rename(memory_path / "x")
        if gone:
            shutil.rmtree(memory_path / "old")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(legacy, "_find", late)
    model = make_model(optimizer="sgd", names=("t",))
    DynamicEmbLoad(memory_path / "x", model, progress=False)
    (rows,) = model.tables[0].export(batch_size=100)
    assert set(rows.embeddings.reshape(-1).tolist()) == {2.0 if gone else 1.0}


# ---- a missing file ----


@pytest.mark.parametrize("reader", ["serve", "load"])
def test_a_missing_file_is_reported_without_reading_the_manifest_again(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    from dynamicemb.checkpoint import target

    Writer().dump(memory_path)
    next(memory_path.rglob("item_emb_values*")).unlink()
    read = []

    def counted(*arguments: object) -> object:
        read.append(arguments)
        return decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "decode", counted)
    with pytest.raises(CorruptCheckpointError, match="item_emb_values.* is missing") as raised:
        (mapped if reader == "serve" else loaded)(memory_path)
    assert type(raised.value) is CorruptCheckpointError
    assert len(read) == 1


def test_many_missing_files_are_waited_for_once(memory_path: Path) -> None:
    Writer().dump(memory_path)
    for file in memory_path.rglob("*_emb_*"):
        file.unlink()
    began = time.monotonic()
    with pytest.raises(AssertionError, match="is missing"):
        verified(memory_path)
    waited = sum(replaced_module.FIRST_PAUSE * 2**n for n in range(replaced_module.ATTEMPTS - 1))
    assert time.monotonic() - began < 4 * waited + 5


def test_a_missing_delta_is_reported_with_two_looks_at_the_manifests(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamicemb.checkpoint import target

    writer = Writer()
    writer.chain_anew(memory_path)
    shutil.rmtree(memory_path / "delta_00000001")
    read = []

    def counted(*arguments: object) -> object:
        read.append(arguments)
        return decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "decode", counted)
    with pytest.raises(CorruptCheckpointError, match="no delta_00000001 before it"):
        read_chain(str(memory_path))
    assert len(read) <= 5  # the base, and the delta that is there twice
