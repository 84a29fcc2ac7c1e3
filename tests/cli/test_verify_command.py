"""``dynamicemb verify``: damage of every kind is found and named; what is whole is not blamed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from stored import (
    Capture,
    checkpoint,
    file_of,
    flip,
    json_of,
    make_model,
    refused,
    said,
    train,
)

from dynamicemb import DynamicEmbDump, one_embedding
from dynamicemb.cli.app import main
from dynamicemb.exchange import export_table
from dynamicemb.incremental_dump import dump_delta

TRAIN = (
    *("train", "--days", "1", "--examples-per-day", "2000", "--batch-size", "500", "--plain"),
    *("--new-ids", "500", "--capacity", "1024", "--no-report", "--no-baseline", "--dim", "4"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every kind of file."""
    path = tmp_path_factory.mktemp("whole") / "c"
    return checkpoint(path, "TIMESTAMP_LFU", counter=True)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "c"))


def damages(capsys: Capture, *arguments: str | Path) -> list[dict[str, object]]:
    """All that a verification finds."""
    found = json_of(capsys, "verify", *arguments, status=1)
    assert found["ok"] is False
    return [damage for one in found["checkpoints"] for damage in one["damages"]]


def test_what_is_whole(capsys: Capture, whole: Path) -> None:
    found = json_of(capsys, "verify", whole, whole)
    assert found["ok"] is True
    assert len(found["checkpoints"]) == 2
    one = found["checkpoints"][0]
    assert (one["layout"], one["tables"], one["damages"]) == ("checkpoint", 2, [])
    files = [file for file in whole.rglob("*") if file.is_file()]
    manifest = (whole / "dynamicemb_manifest.json").stat().st_size
    assert one["bytes"] == sum(file.stat().st_size for file in files) - manifest
    assert said(capsys, "verify", whole).startswith(f"{whole}: ok, checkpoint, 2 tables, ")


def test_a_changed_byte_of_any_file(capsys: Capture, copy: Path) -> None:
    for file in sorted((copy / "model").iterdir()):
        flip(file, file.stat().st_size // 2)
        (damage,) = damages(capsys, copy)
        assert damage["file"] == str(file)
        assert damage["table"] == f"model/{file.name.partition('_')[0]}"
        assert damage["offset"] == 0
        flip(file, file.stat().st_size // 2)
    assert main(["verify", str(copy)]) == 0


def test_every_damaged_block_is_named(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("NO_EVICTION", dim=1024, max_capacity=2**13)
    ids = torch.arange(3000)
    model.tables[0].insert(ids, torch.ones(3000, 1024))
    DynamicEmbDump(tmp_path, model)
    block = 4 * 2**20
    for place in (10, 2 * block + 5):
        flip(file_of(tmp_path, "values"), place)
    found = damages(capsys, tmp_path)
    assert [one["offset"] for one in found] == [0, 2 * block]
    text = said(capsys, "verify", tmp_path, status=1)
    assert f"corrupt in the bytes {2 * block} to " in text


def test_short_long_and_missing_files(capsys: Capture, copy: Path) -> None:
    file = file_of(copy, "values")
    data = file.read_bytes()
    file.write_bytes(data[:-3])
    assert "bytes; the manifest says" in str(damages(capsys, copy)[0]["problem"])
    file.write_bytes(data + b"0")
    assert "bytes; the manifest says" in str(damages(capsys, copy)[0]["problem"])
    file.unlink()
    (damage,) = damages(capsys, copy)
    assert damage["file"] == str(file)
    assert "is missing" in str(damage["problem"])
    flip(copy / "dynamicemb_manifest.json", 300)
    assert "its checksum is not that of its content" in str(damages(capsys, copy)[0]["problem"])


def test_one_bad_path_of_several(capsys: Capture, whole: Path, copy: Path) -> None:
    flip(file_of(copy, "keys"), 0)
    found = json_of(capsys, "verify", whole, copy, status=1)
    assert [one["ok"] for one in found["checkpoints"]] == [True, False]
    lines = said(capsys, "verify", whole, copy, status=1).splitlines()
    assert lines[0].startswith(f"{whole}: ok")
    assert lines[1].startswith(f"{copy}: damaged")
    assert lines[2].startswith(f"  table model/user: {file_of(copy, 'keys')} is corrupt in")


def write_with(path: Path, ids: list[int], **changes: object) -> None:
    """A checkpoint of one table whose writer did not look at what it wrote."""
    from sources import source_of

    from dynamicemb.checkpoint.ranks import Ranks
    from dynamicemb.checkpoint.writer import write_checkpoint
    from dynamicemb.table import Rows

    rows = Rows(
        torch.tensor(ids),
        torch.ones(len(ids), 4),
        torch.empty(len(ids), 0),
        torch.ones(len(ids), dtype=torch.int64),
    )
    write_checkpoint(path, [source_of(rows, **changes)], Ranks(), progress=False)


def test_an_id_that_has_two_rows(capsys: Capture, tmp_path: Path) -> None:
    write_with(tmp_path / "c", [1, 2, 3, 2])
    for memory in ((), ("--memory-mb", "1")):
        (damage,) = damages(capsys, tmp_path / "c", *memory)
        assert damage["problem"] == "1 ids have more than one row, such as 2"
        assert damage["table"] == "model/t"


def test_an_index_that_does_not_find_rows(capsys: Capture, tmp_path: Path) -> None:
    def no_words() -> list[torch.Tensor]:
        from dynamicemb.checkpoint.index import INDEX, IndexHeader

        return [IndexHeader(INDEX, 3, 0, 5, "").encode(), torch.zeros(5, dtype=torch.int64)]

    write_with(tmp_path / "c", [1, 2, 3], extra={"index": no_words})
    (damage,) = damages(capsys, tmp_path / "c")
    assert damage["problem"] == "3 rows are not found by the index for serving"


def test_files_that_do_not_belong_there(capsys: Capture, copy: Path) -> None:
    (copy / "model" / "notes.txt").write_text("mine")
    (copy / ".dynamicemb-0123").mkdir()
    (one,) = json_of(capsys, "verify", copy)["checkpoints"]
    assert one["notes"] == [
        ".dynamicemb-0123 is not of the checkpoint",
        "model/notes.txt is not of the checkpoint",
    ]


def test_a_chain(capsys: Capture, tmp_path: Path) -> None:
    model = make_model()
    for seed in range(3):
        train(model, 1, seed=seed)
        model.tables[0].erase(torch.tensor([-1]))
        dump_delta(tmp_path / "chain", model)
    (one,) = json_of(capsys, "verify", tmp_path / "chain")["checkpoints"]
    assert one["layout"] == "chain of deltas"
    flip(file_of(tmp_path / "chain" / "delta_00000002", "index"), 80)
    (damage,) = damages(capsys, tmp_path / "chain")
    assert "delta_00000002" in str(damage["file"])
    shutil.rmtree(tmp_path / "chain" / "delta_00000001")
    assert "no delta_00000001 before it" in str(damages(capsys, tmp_path / "chain")[0]["problem"])


def test_a_training_run(capsys: Capture, tmp_path: Path) -> None:
    often = ["--checkpoint-steps", "2", "--delta-steps", "2"]
    assert main([*TRAIN, "--out", str(tmp_path / "run"), *often]) == 0
    chain, newest, step = json_of(capsys, "verify", tmp_path / "run")["checkpoints"]
    assert chain["layout"] == "chain of deltas"
    assert chain["path"] == str(tmp_path / "run" / "deltas" / "chain-000001")
    assert newest["path"] > step["path"] > str(tmp_path / "run" / "checkpoints" / "step-")
    run_chain = json_of(capsys, "inspect", tmp_path / "run" / "deltas")
    assert run_chain["layout"] == "chain of deltas"
    for name in ("run.pt", "rank-0.pt"):
        flip(Path(newest["path"]) / name, 100)
        (damage,) = damages(capsys, tmp_path / "run")
        assert damage["file"] == newest["path"]
        assert f"{name} is not what was written" in str(damage["problem"])
        flip(Path(newest["path"]) / name, 100)
    flip(file_of(Path(chain["path"]) / "delta_00000001", "values", "*"), 9)
    assert "delta_00000001" in str(damages(capsys, tmp_path / "run")[0]["file"])


def test_other_layouts(capsys: Capture, copy: Path, tmp_path: Path) -> None:
    (copy / "dynamicemb_manifest.json").unlink()
    assert json_of(capsys, "verify", copy)["checkpoints"][0]["layout"] == "upstream"
    np.array([1, 1], "<i8").tofile(copy / "model" / "user_emb_keys.rank_0.world_size_1")
    assert "do not belong together" in str(damages(capsys, copy)[0]["problem"])
    path = tmp_path / "embedding"
    with one_embedding.make_persistent_table_writer(
        [f"{path}/0-1"], "a", torch.int64, torch.float, 4
    ) as writer:
        writer.write(np.arange(10), np.full((10, 4), 0.25, dtype=np.float32))
    assert json_of(capsys, "verify", path)["checkpoints"][0]["rows"] == 10
    (segment,) = (path / "0-1" / "rows" / "segments").iterdir()
    flip(segment, segment.read_bytes().index(np.full(4, 0.25, dtype=np.float32).tobytes()))
    assert "0-1" in str(damages(capsys, path)[0]["file"])


@pytest.mark.parametrize("suffix", ["safetensors", "parquet", "npz"])
def test_files_of_rows(capsys: Capture, tmp_path: Path, suffix: str) -> None:
    model = make_model()
    train(model)
    file = tmp_path / f"user.{suffix}"
    export_table(model.tables[0], file)
    assert json_of(capsys, "verify", file)["ok"] is True
    data = file.read_bytes()
    if suffix == "npz":  # the others have no checksums
        row = model.tables[0].find(torch.tensor([-1])).embeddings.numpy().tobytes()
        flip(file, data.index(row))
        assert "CRC" in str(damages(capsys, file)[0]["problem"])
    file.write_bytes(data[: len(data) // 2])
    assert "cannot be read" in str(damages(capsys, file)[0]["problem"])


def test_wrong_paths_are_no_damage(capsys: Capture, tmp_path: Path, whole: Path) -> None:
    assert "does not exist" in refused(capsys, "verify", whole, tmp_path / "nowhere")
    assert "nothing that can be read" in refused(capsys, "verify", tmp_path)
    assert "no table 'users'" in refused(capsys, "verify", whole, "--table", "users")
    assert "are required: PATH" in refused(capsys, "verify")
