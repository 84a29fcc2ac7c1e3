"""``dynamicemb inspect``: tables, rows of ids, damage, and every layout that can be read."""

from __future__ import annotations

import json
import shutil
from collections import Counter
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
    rows_of,
    said,
    train,
)

from dynamicemb import DynamicEmbDump, one_embedding
from dynamicemb.cli.app import main
from dynamicemb.exchange import export_table
from dynamicemb.incremental_dump import dump_delta


def test_the_tables_of_a_checkpoint(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("STEP", counter=True)
    train(model)
    DynamicEmbDump(tmp_path, model, optim=True, counter=True)
    facts = json_of(capsys, "inspect", tmp_path)
    assert (facts["layout"], facts["verified"], facts["damaged"]) == ("checkpoint", True, False)
    assert facts["ranks"] == 1
    user, item = facts["tables"]
    table = model.tables[0]
    assert (user["collection"], user["name"], item["name"]) == ("model", "user", "item")
    assert user["rows"] == len(table)
    assert (user["dim"], user["dtype"], user["state_dim"]) == (4, "float32", 8)
    assert user["optimizer"]["kind"] == "ADAM"
    assert user["optimizer"]["args"]["learning_rate"] == 0.1
    assert user["score_strategy"] == ["STEP"]
    counter = table.export_counter()
    assert counter is not None
    assert user["counted_ids"] == len(counter[0])
    files = sum(file.stat().st_size for file in (tmp_path / "model").glob("user_*"))
    assert user["bytes"] == files
    rows = rows_of(tmp_path)["model/user"]
    assert (user["lowest_id"], user["highest_id"]) == (min(rows), max(rows))
    steps = Counter(scores[0] for _, _, scores in rows.values())
    assert user["scores"]["STEP"]["histogram"] == [
        {"bin": str(step), "rows": steps[step]} for step in sorted(steps)
    ]
    assert [one["score"] for one in user["newest"]] == [3] * 5
    norms = {id_: float(np.linalg.norm(row)) for id_, (row, _, _) in rows.items()}
    largest = sorted(norms, key=lambda id_: -norms[id_])[:5]
    assert [one["id"] for one in user["largest"]] == largest
    text = said(capsys, "inspect", tmp_path)
    assert "model/user" in text
    assert "largest (norm)" in text
    assert text.endswith("checksums: all compared, all right\n")


@pytest.mark.parametrize("strategy", ["TIMESTAMP", "LFU", "TIMESTAMP_LFU", "NO_EVICTION"])
def test_scores_of_every_strategy(capsys: Capture, tmp_path: Path, strategy: str) -> None:
    checkpoint(tmp_path, strategy)
    rows = rows_of(tmp_path)["model/user"]
    (user,) = json_of(capsys, "inspect", tmp_path, "--table", "user")["tables"]
    for place, name in enumerate(user["scores"]):
        found = user["scores"][name]
        words = [scores[place] for _, _, scores in rows.values()]
        assert (found["lowest"], found["highest"]) == (min(words), max(words))
        assert sum(one["rows"] for one in found["histogram"]) == len(rows)
    assert user["newest"][0]["score"] == max(scores[0] for _, _, scores in rows.values())
    text = said(capsys, "inspect", tmp_path)
    assert ("old" in text) is strategy.startswith("TIMESTAMP")


def test_wide_scores_have_few_bins(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("CUSTOMIZED")
    ids = torch.arange(1000)
    scores = torch.arange(1000) * 2**54  # over the whole range of unsigned numbers
    model.tables[0].insert(ids, torch.randn(1000, 4), scores=scores)
    DynamicEmbDump(tmp_path, model)
    found = json_of(capsys, "inspect", tmp_path)["tables"][0]
    histogram = found["scores"]["CUSTOMIZED"]["histogram"]
    assert 6 <= len(histogram) <= 12
    assert sum(one["rows"] for one in histogram) == 1000
    assert found["newest"][0] == {"id": 999, "score": 999 * 2**54}
    assert found["optimizer"]["kind"] == "ADAM"
    assert found["state_dim"] == 0


def test_rows_of_ids(capsys: Capture, tmp_path: Path) -> None:
    checkpoint(tmp_path / "c")
    rows = rows_of(tmp_path / "c")["model/user"]
    ids = ["--id", "-1", "--id", str(2**64 - 2), "--id", "0x1ffff", "--table", "user"]
    found = json_of(capsys, "inspect", tmp_path / "c", *ids, status=1)["rows"]
    assert [(one["id"], one["found"]) for one in found] == [(-1, True), (-2, True), (131071, False)]
    row, state, scores = rows[-1]
    assert found[0]["embedding"] == list(row)
    assert found[0]["state"] == list(state)
    assert found[0]["scores"] == {"STEP": scores[0]}
    text = said(capsys, "inspect", tmp_path / "c", "--id", "-1")
    assert "id -1 in model/user\n  embedding  " in text
    assert "id -1 has no row in model/item" in text
    assert "--id is 'x'" in refused(capsys, "inspect", tmp_path / "c", "--id", "x")
    assert "--id is " in refused(capsys, "inspect", tmp_path / "c", "--id", str(2**64))


def test_a_row_after_the_first_block(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("NO_EVICTION", dim=700, max_capacity=2**13)
    ids = torch.arange(4000)
    model.tables[0].insert(ids, ids[:, None].float().expand(-1, 700).contiguous())
    DynamicEmbDump(tmp_path, model)
    assert file_of(tmp_path, "values").stat().st_size > 2 * 4 * 2**20
    for id_ in (0, 1777, 3999):
        (row,) = json_of(capsys, "inspect", tmp_path, "--id", str(id_), "--table", "user")["rows"]
        assert row["embedding"] == [float(id_)] * 700


def test_less_is_read_when_asked(capsys: Capture, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    whole = json_of(capsys, "inspect", tmp_path)
    flip(file_of(tmp_path, "values"), 5)
    fast = json_of(capsys, "inspect", tmp_path, "--no-verify")
    assert fast["verified"] is False
    assert fast["tables"][0]["scores"] == whole["tables"][0]["scores"]
    assert fast["tables"][0]["largest"] == []
    flip(file_of(tmp_path, "keys"), 5)
    quick = json_of(capsys, "inspect", tmp_path, "--quick")
    assert [one["rows"] for one in quick["tables"]] == [one["rows"] for one in whole["tables"]]
    assert "newest" not in quick["tables"][0]


@pytest.mark.parametrize("role", ["keys", "values", "scores", "opt_values", "buckets"])
def test_damage_is_named(capsys: Capture, tmp_path: Path, role: str) -> None:
    checkpoint(tmp_path)
    flip(file_of(tmp_path, role), 9)
    facts = json_of(capsys, "inspect", tmp_path, status=1)
    assert facts["damaged"] is True
    (damage,) = facts["tables"][0]["damages"]
    assert damage["file"] == str(file_of(tmp_path, role))
    assert (damage["table"], damage["offset"]) == ("model/user", 0)
    assert facts["tables"][1]["damages"] == []
    assert facts["tables"][1]["newest"]
    assert f"damaged: {file_of(tmp_path, role)} is corrupt" in said(
        capsys, "inspect", tmp_path, status=1
    )


def test_files_that_are_short_or_missing(capsys: Capture, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    file = file_of(tmp_path, "values")
    file.write_bytes(file.read_bytes()[:-1])
    assert "bytes; the manifest says" in said(capsys, "inspect", tmp_path, status=1)
    file.unlink()
    assert "is missing" in said(capsys, "inspect", tmp_path, status=1)
    flip(tmp_path / "dynamicemb_manifest.json", 200)
    assert "is corrupt" in refused(capsys, "inspect", tmp_path)


def test_a_chain_of_deltas(capsys: Capture, tmp_path: Path) -> None:
    model = make_model()
    train(model)
    dump_delta(tmp_path, model)
    model.tables[0].erase(torch.tensor([-1]))
    train(model, 1, seed=5)
    model.tables[0].erase(torch.tensor([-2]))
    dump_delta(tmp_path, model)
    facts = json_of(capsys, "inspect", tmp_path)
    assert facts["layout"] == "chain of deltas"
    assert [one["sequence"] for one in facts["deltas"]] == [1]
    assert facts["deltas"][0]["removed"] >= 1
    assert [one["rows"] for one in facts["tables"]] == [len(table) for table in model.tables]
    assert facts["tables"][0]["scores"]["STEP"]["highest"] == 4
    found = json_of(capsys, "inspect", tmp_path, "--id=-1", "--id=-2", "--table=user", status=1)
    assert [one["found"] for one in found["rows"]] == [True, False]
    kept = model.tables[0].find(torch.tensor([-1]))
    assert found["rows"][0]["embedding"] == kept.embeddings[0].tolist()
    assert found["rows"][0]["state"] == kept.state[0].tolist()
    assert "delta  created" in said(capsys, "inspect", tmp_path)
    delta = json_of(capsys, "inspect", tmp_path / "delta_00000001")
    assert delta["layout"] == "delta"
    flip(file_of(tmp_path / "delta_00000001", "values"), 0)
    (damage,) = json_of(capsys, "inspect", tmp_path, status=1)["tables"][0]["damages"]
    assert "delta_00000001" in damage["file"]


def test_the_newest_checkpoint_of_a_run(capsys: Capture, tmp_path: Path) -> None:
    for step in (5, 30):
        model = make_model()
        train(model, step // 5)
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:010d}"
        folder.mkdir(parents=True)
        DynamicEmbDump(folder / "tables", model)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", folder):
        facts = json_of(capsys, "inspect", path)
        assert "step-0000000030" in facts["notes"][0]
        assert [one["rows"] for one in facts["tables"]] == [len(table) for table in model.tables]


def test_upstreams_files(capsys: Capture, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    expected = json_of(capsys, "inspect", tmp_path)["tables"][0]
    (tmp_path / "dynamicemb_manifest.json").unlink()
    facts = json_of(capsys, "inspect", tmp_path)
    assert (facts["layout"], facts["verified"]) == ("upstream", False)
    assert "taken for those of STEP" in facts["notes"][0]
    item, user = facts["tables"]
    assert (item["name"], user["name"]) == ("item", "user")
    for name in ("rows", "dim", "state_dim", "scores", "newest", "largest", "lowest_id"):
        assert user[name] == expected[name], name
    inside = json_of(capsys, "inspect", tmp_path / "model", "--score-strategy", "customized")
    assert inside["tables"][1]["score_strategy"] == ["CUSTOMIZED"]
    assert "checksums: there are none" in said(capsys, "inspect", tmp_path)
    file = file_of(tmp_path, "values")
    file.write_bytes(file.read_bytes()[:-4])
    assert "do not belong together" in refused(capsys, "inspect", tmp_path)


def test_upstreams_single_files(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    np.array([5, -3], "<i8").tofile(folder / "t_keys")
    rows = np.arange(24, dtype="<f4").reshape(2, 12)
    rows.tofile(folder / "t_values")
    (folder / "t_opt_args.json").write_text(json.dumps({"opt_type": "adam", "lr": 0.1}))
    (table,) = json_of(capsys, "inspect", tmp_path)["tables"]
    assert (table["dim"], table["state_dim"], table["rows"]) == (4, 8, 2)
    (row,) = json_of(capsys, "inspect", tmp_path, "--id=-3")["rows"]
    assert row["embedding"] == rows[1, :4].tolist()
    assert row["state"] == rows[1, 4:].tolist()


def test_upstreams_files_whose_ids_are_relative_to_blocks(capsys: Capture, tmp_path: Path) -> None:
    """ "continuous" over 2 ranks with blocks of 10: id 13 is 3 of rank 1, id 21 is 10 of rank 1."""
    folder = tmp_path / "model"
    folder.mkdir()
    for rank, ids in enumerate(([3, 9], [3, 10])):
        end = f".rank_{rank}.world_size_2"
        np.array(ids, "<i8").tofile(folder / f"t_emb_keys{end}")
        np.full((2, 4), rank, "<f4").tofile(folder / f"t_emb_values{end}")
    about = {"opt_type": "sgd", "lr": 0.1, "dist_type": "continuous"}
    (folder / "t_opt_args.json").write_text(json.dumps(about))
    assert "without its block of ids; num_embeddings (--num-embeddings)" in refused(
        capsys, "inspect", tmp_path
    )
    found = json_of(
        capsys,
        *("inspect", tmp_path, "--num-embeddings", "20", "--id", "13", "--id", "21", "--id", "9"),
    )["rows"]
    assert [one["found"] for one in found] == [True] * 3
    assert [one["embedding"][0] for one in found] == [1.0, 1.0, 0.0]


def test_tables_of_oneflow(capsys: Capture, tmp_path: Path) -> None:
    for rank, keys in enumerate(([1, 2**32 - 1], [7])):
        folder = tmp_path / f"{rank}-2"
        for name in ("keys", "values", "snapshots/a"):
            (folder / name).mkdir(parents=True)
        for name, number in (
            ("KEY_SIZE", 4),
            ("VALUE_SIZE", 16),
            ("PHYSICAL_BLOCK_SIZE", 512),
            ("NUM_LOGICAL_BLOCKS_PER_CHUNK", 8),
        ):
            (folder / name).write_text(f"{number}\n")
        np.array([*keys, *[0] * (32 - len(keys))], "<u4").tofile(folder / "keys/key-000000000000")
        np.arange(128, dtype="<f4").tofile(folder / "values/value-000000000000")
        (folder / "snapshots/a/LIST").write_text("index-000000000000\n")
        np.arange(len(keys), dtype="<u8").tofile(folder / "snapshots/a/index-000000000000")
    facts = json_of(capsys, "inspect", tmp_path)
    (table,) = facts["tables"]
    assert (facts["layout"], facts["snapshot"]) == ("oneembedding", "a")
    assert (table["rows_of_ranks"], table["dim"], table["highest_id"]) == ([2, 1], 4, 2**32 - 1)
    assert any("--dim says otherwise" in note for note in facts["notes"])
    signed = json_of(capsys, "inspect", tmp_path, "--key-type", "int32", "--dim", "2")["tables"][0]
    assert (signed["lowest_id"], signed["dim"], signed["state_dim"]) == (-1, 2, 0)
    (row,) = json_of(capsys, "inspect", tmp_path, "--key-type", "int32", "--id=-1")["rows"]
    assert row["embedding"] == [4.0, 5.0, 6.0, 7.0]
    one = json_of(capsys, "inspect", tmp_path / "1-2")
    assert one["tables"][0]["rows"] == 1
    index = tmp_path / "1-2" / "snapshots" / "a" / "index-000000000000"
    np.array([999], "<u8").tofile(index)
    assert "names row 999" in said(capsys, "verify", tmp_path, status=1)


def test_one_embeddings_folders(capsys: Capture, tmp_path: Path) -> None:
    options = one_embedding.make_device_mem_store_options(str(tmp_path), 1000, size_factor=3)
    embedding = one_embedding.MultiTableEmbedding(
        "inspected", 4, torch.float, torch.int64, None, options
    )
    adam = torch.optim.Adam(embedding.parameters())
    embedding(torch.arange(10)).sum().backward()
    adam.step()
    embedding.save_snapshot("first")
    embedding(torch.arange(20)).sum().backward()
    embedding.save_snapshot("second")
    facts = json_of(capsys, "inspect", tmp_path)
    assert (facts["layout"], facts["snapshot"]) == ("oneembedding", "second")
    (table,) = facts["tables"]
    assert (table["name"], table["rows"], table["dim"]) == ("inspected", 20, 4)
    assert (table["optimizer"]["kind"], table["state_dim"]) == ("ADAM", 8)
    first = json_of(capsys, "inspect", tmp_path, "--snapshot", "first")
    assert first["tables"][0]["rows"] == 10
    (row,) = json_of(capsys, "inspect", tmp_path, "--id", "7")["rows"]
    kept = embedding.tables[0].find(torch.tensor([7]))
    assert row["embedding"] == kept.embeddings[0].tolist()
    assert row["state"] == kept.state[0].tolist()
    assert "no snapshot 'third'; it has first, second" in refused(
        capsys, "inspect", tmp_path, "--snapshot", "third"
    )
    embedding.close()
    (segment,) = (tmp_path / "0-1" / "rows" / "segments").iterdir()
    flip(segment, segment.read_bytes().index(kept.embeddings[0].numpy().tobytes()))
    assert "damaged: " in said(capsys, "inspect", tmp_path, status=1)


@pytest.mark.parametrize("suffix", ["safetensors", "parquet", "npz"])
def test_files_of_rows(capsys: Capture, tmp_path: Path, suffix: str) -> None:
    model = make_model("LFU")
    train(model)
    file = tmp_path / f"user.{suffix}"
    export_table(model.tables[0], file)
    for path in (file, tmp_path):
        (table,) = json_of(capsys, "inspect", path)["tables"]
        assert (table["name"], table["rows"], table["dim"]) == ("user", len(model.tables[0]), 4)
        assert (table["optimizer"]["kind"], table["score_strategy"]) == ("ADAM", ["LFU"])
    (row,) = json_of(capsys, "inspect", file, "--id=-1")["rows"]
    kept = model.tables[0].find(torch.tensor([-1]))
    assert row["embedding"] == kept.embeddings[0].tolist()
    file.write_bytes(file.read_bytes()[:100])
    assert "cannot be read" in refused(capsys, "inspect", file)


def test_files_of_other_tools(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "vectors.npz"
    np.savez(file, item=np.arange(5), vector=np.ones((5, 3), dtype=np.float16))
    assert "no column 'ids' for ids; it has item, vector" in refused(capsys, "inspect", file)
    columns = ["--column", "ids=item", "--column", "embeddings=vector"]
    (table,) = json_of(capsys, "inspect", file, *columns)["tables"]
    assert (table["name"], table["rows"], table["dim"], table["dtype"]) == (
        "vectors",
        5,
        3,
        "float16",
    )
    assert "--column is 'key=item'" in refused(capsys, "inspect", file, "--column", "key=item")


def test_wrong_paths_and_names(capsys: Capture, tmp_path: Path) -> None:
    assert "does not exist" in refused(capsys, "inspect", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has nothing that can be read" in refused(capsys, "inspect", tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("rows")
    assert "is a file; allowed" in refused(capsys, "inspect", tmp_path / "notes.txt")
    assert "are required: CHECKPOINT" in refused(capsys, "inspect")
    checkpoint(tmp_path / "c")
    assert "no table 'users'; it has model/item, model/user" in refused(
        capsys, "inspect", tmp_path / "c", "--table", "users"
    )
    assert "did you mean --table?" in refused(capsys, "inspect", tmp_path / "c", "--tabel", "user")
    assert main(["inspect", str(tmp_path / "c"), "--table", "model/user", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tables"]) == 1
    staging = tmp_path / "unfinished" / ".dynamicemb-0123"
    staging.mkdir(parents=True)
    assert "not finished" in refused(capsys, "inspect", tmp_path / "unfinished")
    shutil.rmtree(tmp_path / "unfinished")
