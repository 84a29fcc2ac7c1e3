"""Commands beside a program that replaces or removes what they read, in layouts without a manifest:
one state, or the word that it was replaced."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored import Capture, json_of, said

from dynamicemb import DynamicEmbDump, ReplacedCheckpointError, StoreError, one_embedding
from dynamicemb.cli.contents import find
from dynamicemb.cli.contents.files import FileContent
from dynamicemb.exchange import export_table
from dynamicemb.one_embedding import folders, sources
from models import make_model

NAMES = ("user", "item")


def model_of(value: float) -> Any:
    """Tables whose ten rows are all ``value``."""
    model = make_model(optimizer="sgd", names=NAMES)
    for table in model.tables:
        table.insert(torch.arange(10), torch.full((10, 4), value))
    return model


def values(capsys: Capture, path: Path) -> set[float]:
    """What the rows of all tables are."""
    found = json_of(capsys, "inspect", path, "--id", "3")
    return {one for row in found["rows"] for one in row["embedding"]}


def at_the_first(work: Callable[..., Any], event: Callable[[], object], *, before: bool) -> Any:
    """``work`` that lets something happen at its first call."""
    calls: list[object] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1 and before:
            event()
        result = work(*arguments, **options)
        if len(calls) == 1 and not before:
            event()
        return result

    return interrupted


def export(folder: Path, value: float) -> None:
    folder.mkdir()
    for table in model_of(value).tables:
        export_table(table, folder / f"{table.name}.safetensors")


@pytest.mark.parametrize("kind", ["folder", "files"])
def test_a_folder_of_files_is_replaced_after_the_first_was_opened(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, new = tmp_path / "x", tmp_path / "new"
    export(path, 1.0)
    export(new, 2.0)

    def replace() -> None:
        if kind == "folder":
            path.rename(tmp_path / "old")
            new.rename(path)
        else:
            for file in new.iterdir():
                file.replace(path / file.name)

    monkeypatch.setattr(
        FileContent, "_open", at_the_first(FileContent._open, replace, before=False)
    )
    assert values(capsys, path) == {2.0}


def test_a_dump_of_upstream_is_replaced_by_another_folder(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("x", 1.0), ("new", 2.0)):
        DynamicEmbDump(tmp_path / f"{name}.c", model_of(value))
        said(capsys, "convert", tmp_path / f"{name}.c", tmp_path / name, "--to", "upstream")

    def replace() -> None:
        (tmp_path / "x").rename(tmp_path / "old")
        (tmp_path / "new").rename(tmp_path / "x")
        shutil.rmtree(tmp_path / "old")

    monkeypatch.setattr(find, "find_older", at_the_first(find.find_older, replace, before=False))
    assert values(capsys, tmp_path / "x") == {2.0}


def test_a_checkpoint_comes_while_an_older_layout_is_looked_for(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files would pass for those of the older layout, unchecked."""
    path = tmp_path / "x"
    path.mkdir()

    def dump() -> None:
        DynamicEmbDump(path, model_of(1.0))

    monkeypatch.setattr(find, "find_older", at_the_first(find.find_older, dump, before=True))
    found = json_of(capsys, "inspect", path)
    assert (found["layout"], found["damaged"]) == ("checkpoint", False)


# ---- OneEmbedding: a trainer takes a snapshot of the same name ----


def snapshot(path: Path, value: float, name: str = "s") -> None:
    with one_embedding.make_persistent_table_writer(
        [str(path)], name, torch.int64, torch.float32, 4
    ) as writer:
        writer.write(np.arange(10), np.full((10, 4), value, np.float32))


def read(path: Path) -> set[float]:
    with one_embedding.make_persistent_table_reader(
        [str(path)], "s", torch.int64, torch.float32, 4
    ) as reader:
        return {one for _, rows in reader for one in rows.reshape(-1).tolist()}


@pytest.mark.parametrize("before", [False, True])
def test_a_snapshot_is_taken_again_while_it_is_opened(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    path = tmp_path / "0-1"
    real = sources.note_of
    for begin in (1.0, 3.0):
        snapshot(path, begin)
        again = at_the_first(real, lambda: snapshot(path, begin + 1), before=before)  # noqa: B023
        monkeypatch.setattr(sources, "note_of", again)
        found = read(path) if begin == 1.0 else values(capsys, tmp_path)
        assert found == {begin + 1}
    monkeypatch.undo()


def test_a_snapshot_that_goes_between_two_folders_is_not_damaged(tmp_path: Path) -> None:
    paths = [str(tmp_path / "0-2"), str(tmp_path / "1-2")]
    kinds = (torch.int64, torch.float32, 4)
    with one_embedding.make_persistent_table_writer(paths, "s", *kinds) as writer:
        writer.write(np.arange(100), np.ones((100, 4), np.float32))
    reader = one_embedding.make_persistent_table_reader(paths, "s", *kinds)
    assert len(next(reader)[0])
    (stored,) = (name for name in folders.saved_in(paths[1]))
    (stamp,) = folders.saved_in(paths[1])[stored]
    Path(sources.snapshot_file(paths[1], folders.stored_name(stored, stamp))).unlink()
    with pytest.raises(ReplacedCheckpointError, match="was replaced while it was opened"):
        list(reader)


def test_a_snapshot_is_taken_again_between_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / "0-2"), str(tmp_path / "1-2")]
    kinds = (torch.int64, torch.float32, 4)

    def take(value: float) -> None:
        with one_embedding.make_persistent_table_writer(paths, "s", *kinds) as writer:
            writer.write(np.arange(10), np.full((10, 4), value, np.float32))

    take(1.0)
    real = folders.saved_in
    for at in range(1, 6):
        late = at_the(at, real, lambda: take(float(at + 1)))  # noqa: B023
        monkeypatch.setattr(folders, "saved_in", late)
        with one_embedding.make_persistent_table_reader(paths, "s", *kinds) as reader:
            found = {one for _, rows in reader for one in rows.reshape(-1).tolist()}
        assert len(found) == 1
        monkeypatch.setattr(folders, "saved_in", real)


def at_the(number: int, work: Callable[..., Any], event: Callable[[], object]) -> Any:
    """``work`` that lets something happen after its call of this number."""
    calls: list[object] = []

    def interrupted(*arguments: Any) -> Any:
        result = work(*arguments)
        calls.append(arguments)
        if len(calls) == number:
            event()
        return result

    return interrupted


def test_folders_with_snapshots_of_different_times_have_none(tmp_path: Path) -> None:
    paths = [str(tmp_path / "0-1"), str(tmp_path / "1-1")]
    for path in paths:
        snapshot(Path(path), 1.0)
    with pytest.raises(StoreError, match="have snapshots 's' of different times"):
        one_embedding.make_persistent_table_reader(paths, "s", torch.int64, torch.float32, 4)


# ---- a training run removes its old checkpoints ----


def test_a_run_removes_a_checkpoint_while_it_is_verified(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamicemb.cli import verify
    from dynamicemb.cli.training.deltas import Deltas
    from dynamicemb.cli.training.ranks import Ranks
    from dynamicemb.cli.training.saving import Checkpoints
    from dynamicemb.incremental_dump import dump_delta

    model = model_of(1.0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, Ranks())
    checkpoints.write(1, model, {}, {}, counter=False)
    for number in (1, 2):
        dump_delta(tmp_path / "deltas" / f"chain-{number:06d}", model_of(1.0))

    def goes_on() -> None:
        """A newer checkpoint, and a newer chain, after which the old ones go."""
        checkpoints.write(2, model, {}, {}, counter=False)
        Deltas(tmp_path / "deltas", 1, Ranks())._remove_old()

    opened = at_the_first(verify.open_content, goes_on, before=True)
    monkeypatch.setattr(verify, "open_content", opened)
    found = json_of(capsys, "verify", tmp_path)
    assert [Path(one["path"]).name for one in found["checkpoints"]] == ["chain-000002"]
    monkeypatch.undo()
    found = json_of(capsys, "verify", tmp_path)
    names = [Path(one["path"]).name for one in found["checkpoints"]]
    assert names == ["chain-000002", "step-0000000002"]
    assert not list(tmp_path.rglob("*.unfinished"))
