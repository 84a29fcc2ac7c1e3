"""``build_serving_index`` beside a dump: it never changes the files of another checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from generations import Writer, mapped, verified

from dynamicemb import CheckpointError, CorruptCheckpointError
from dynamicemb.checkpoint import files
from dynamicemb.checkpoint import mapped as mapped_module
from dynamicemb.checkpoint.files import Directory
from dynamicemb.checkpoint.index import HEADER_BYTES, INDEX, IndexHeader, decode_header
from dynamicemb.serving import ServingTable, build_serving_index


def indexes(path: Path) -> list[Path]:
    return sorted(path.rglob("*_emb_index.*"))


def when_the_index_is_made(monkeypatch: pytest.MonkeyPatch, event: Any) -> None:
    """Let ``event`` happen once, after the words were computed."""
    real = mapped_module.build_index

    def late(*arguments: Any) -> torch.Tensor:
        words = real(*arguments)
        monkeypatch.setattr(mapped_module, "build_index", real)
        event()
        return words

    monkeypatch.setattr(mapped_module, "build_index", late)


@pytest.mark.parametrize("listed", [False, True])
def test_a_dump_that_commits_meanwhile_keeps_its_own_index(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    writer = Writer()
    writer.dump(memory_path)
    when_the_index_is_made(monkeypatch, lambda: writer.dump(memory_path, serving_index=listed))
    assert build_serving_index(memory_path) == (0 if listed else 2)
    assert verified(memory_path) == writer.generation == 1
    assert len(indexes(memory_path)) == 2
    assert not list(memory_path.rglob("*.tmp"))


def test_a_dump_that_is_running_is_an_error_and_leaves_no_files(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writer().dump(memory_path)
    monkeypatch.setattr(files, "LOCK_WAIT", 0.01)
    with Directory.open(memory_path) as folder:
        assert folder.lock()
        with pytest.raises(CheckpointError, match="a dump into .* is running"):
            build_serving_index(memory_path)
    assert not indexes(memory_path)
    assert not list(memory_path.rglob("*.tmp"))
    assert build_serving_index(memory_path) == 2


def test_a_dump_waits_for_an_index_that_is_put_in_its_place(memory_path: Path) -> None:
    writer = Writer()
    writer.dump(memory_path)
    with Directory.open(memory_path) as folder:
        assert folder.lock()
        timer = threading.Timer(0.05, folder.unlock)
        timer.start()
        writer.dump(memory_path)
        timer.join()
    assert mapped(memory_path) == 1


def test_a_listed_index_of_another_checkpoint_is_corrupt(memory_path: Path) -> None:
    Writer().dump(memory_path, serving_index=True)
    (file,) = (one for one in indexes(memory_path) if "item" in one.name)
    data = file.read_bytes()
    found = decode_header(data, INDEX, file.name)
    other = IndexHeader(INDEX, found.rows, found.removed, found.slots, "a" * 32)
    file.write_bytes(bytes(other.encode().numpy()) + data[HEADER_BYTES:])
    with pytest.raises(CorruptCheckpointError, match="is an index of checkpoint 'aaaa"):
        ServingTable(memory_path, "item")
