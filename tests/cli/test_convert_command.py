"""``dynamicemb convert``: every layout and back with all bits, all or nothing."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed import killed_convert
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

from dynamicemb import DynamicEmbDump, DynamicEmbedding, DynamicEmbLoad, one_embedding
from dynamicemb.checkpoint.reader import CheckpointReader
from dynamicemb.cli.app import main
from dynamicemb.cli.contents.writing import LAYOUTS
from dynamicemb.exchange import import_table
from dynamicemb.incremental_dump import dump_delta
from dynamicemb.serving import ServingTable


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with scores, state and counters."""
    return checkpoint(tmp_path_factory.mktemp("source") / "c", "TIMESTAMP_LFU", counter=True)


def convert(*arguments: str | Path) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def manifest_of(path: Path) -> Any:
    """What a checkpoint says of its tables, without files and what differs from dump to dump."""
    with CheckpointReader.open(path) as reader:
        return [
            (
                (table.name, table.dim, table.dtype, table.value_dtype, table.strategy),
                (table.scores, table.state, table.optimizer, table.routing),
                [(one.rank, one.rows, one.clock, one.progress) for one in table.shards],
            )
            for collection in reader.manifest.collections.values()
            for table in collection.tables.values()
        ]


# ---- there and back ----


@pytest.mark.parametrize("layout", ["checkpoint", "safetensors", "parquet", "numpy"])
@pytest.mark.parametrize("strategy", ["STEP", "TIMESTAMP", "TIMESTAMP_LFU"])
def test_there_and_back_nothing_is_lost(
    capsys: Capture, tmp_path: Path, layout: str, strategy: str
) -> None:
    dtype = {"STEP": torch.bfloat16, "TIMESTAMP": torch.float16}.get(strategy, torch.float32)
    model = make_model(strategy, embedding_dtype=dtype)
    train(model)
    DynamicEmbDump(tmp_path / "a", model, optim=True, compact=strategy == "STEP")
    convert(tmp_path / "a", tmp_path / "there", "--to", layout)
    convert(tmp_path / "there", tmp_path / "back", "--to", "checkpoint")
    assert rows_of(tmp_path / "back") == rows_of(tmp_path / "there") == rows_of(tmp_path / "a")
    assert sorted(manifest_of(tmp_path / "back")) == sorted(manifest_of(tmp_path / "a"))
    for path in ("there", "back"):
        assert json_of(capsys, "diff", tmp_path / "a", tmp_path / path)["equal"] is True
        assert json_of(capsys, "verify", tmp_path / path)["ok"] is True
    again = make_model(strategy, embedding_dtype=dtype)
    report = DynamicEmbLoad(tmp_path / "back", again, optim=True)
    assert report.did_not_fit == 0
    for one, other in zip(model.tables, again.tables, strict=True):
        ids = torch.cat([rows.ids for rows in one.export()])
        assert torch.equal(one.find(ids).embeddings, other.find(ids).embeddings)
        assert torch.equal(one.find(ids).state, other.find(ids).state)


@pytest.mark.parametrize("strategy", ["STEP", "TIMESTAMP", "LFU", "TIMESTAMP_LFU", "CUSTOMIZED"])
def test_upstreams_dump_and_back(capsys: Capture, tmp_path: Path, strategy: str) -> None:
    checkpoint(tmp_path / "a", strategy, counter=True)
    convert(tmp_path / "a", tmp_path / "there", "--to", "upstream")
    assert "model/user: ids -4 to -1 are 4 of its rows" in capsys.readouterr().err
    kept = [
        file.name for file in (tmp_path / "a" / "model").iterdir() if "buckets" not in file.name
    ]
    assert sorted(file.name for file in (tmp_path / "there" / "model").iterdir()) == sorted(kept)
    for name in kept:  # what upstream reads, byte for byte
        there = (tmp_path / "there" / "model" / name).read_bytes()
        assert there == (tmp_path / "a" / "model" / name).read_bytes(), name
    option = ["--score-strategy", strategy.lower()] if strategy == "CUSTOMIZED" else []
    convert(tmp_path / "there", tmp_path / "back", "--to", "checkpoint", *option)
    rows = rows_of(tmp_path / "a")
    for label, found in rows_of(tmp_path / "back").items():
        for id_, (row, state, scores) in found.items():
            assert (row, state) == rows[label][id_][:2]
            if strategy != "TIMESTAMP":  # whose age counts, below
                assert scores == rows[label][id_][2]
    name = file_of(tmp_path / "a", "scores").relative_to(tmp_path / "a")
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    model = make_model(strategy, counter=True)
    with pytest.warns(UserWarning, match="older layout"):
        DynamicEmbLoad(tmp_path / "there", model, optim=True, counter=True)
    assert len(model.tables[0]) == len(rows["model/user"])


def test_one_embedding_and_back(capsys: Capture, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "there", "--to", "oneembedding", "--table", "user")
    said_first = capsys.readouterr()
    assert said_first.err == (
        "dynamicemb: warning: model/user: oneembedding has no place for scores, the admission "
        "counter\n"
    )
    convert(tmp_path / "there", tmp_path / "back", "--to", "checkpoint")
    expected = {id_: row[:2] for id_, row in rows_of(source)["model/user"].items()}
    for path in ("there", "back"):
        found = rows_of(tmp_path / path)["model/user"]
        assert {id_: row[:2] for id_, row in found.items()} == expected
    assert manifest_of(tmp_path / "back")[0][1][2] == manifest_of(source)[0][1][2]
    options = one_embedding.make_device_mem_store_options(
        str(tmp_path / "there"), 10_000, size_factor=3
    )
    embedding = one_embedding.MultiTableEmbedding(
        "converted", 4, torch.float, torch.int64, None, options, resume=True
    )
    assert embedding.snapshots() == ["converted"]
    kept = embedding.tables[0].find(torch.tensor([-1]))
    assert (tuple(kept.embeddings[0].tolist()), tuple(kept.state[0].tolist())) == expected[-1]
    assert embedding.tables[0].optimizer.kind.name == "ADAM"
    embedding.close()


def test_layouts_of_several_hands(capsys: Capture, source: Path, tmp_path: Path) -> None:
    """Each into the next, in a ring: the rows are still the same."""
    ring = ["numpy", "oneembedding", "safetensors", "upstream", "parquet", "checkpoint"]
    path = source
    expected = rows_of(source)["model/item"]
    for number, layout in enumerate(ring):
        target = tmp_path / f"{number}"
        convert(path, target, "--to", layout, *(["--table=item"] if path is source else []))
        path = target
        found = rows_of(path)["model/item"]
        assert {id_: row[:2] for id_, row in found.items()} == {
            id_: row[:2] for id_, row in expected.items()
        }
    assert json_of(capsys, "diff", source, path, "--table=item", "--no-scores")["equal"] is True


# ---- parts ----


@pytest.mark.parametrize("layout", ["checkpoint", "upstream", "oneembedding"])
@pytest.mark.parametrize("kind", ["roundrobin", "hash_roundrobin"])
def test_parts_of_other_numbers_of_ranks(
    capsys: Capture, source: Path, tmp_path: Path, layout: str, kind: str
) -> None:
    only = ["--table", "user", "--to", layout]
    convert(source, tmp_path / "3", *only, "--world-size", "3", "--dist-type", kind)
    convert(tmp_path / "3", tmp_path / "2", *only, "--world-size", "2", "--dist-type", kind)
    capsys.readouterr()
    expected = {id_: row[:2] for id_, row in rows_of(source)["model/user"].items()}
    for size in (3, 2):
        path = tmp_path / str(size)
        (table,) = json_of(capsys, "inspect", path)["tables"]
        assert len(table["rows_of_ranks"]) == size
        assert min(table["rows_of_ranks"]) > 0
        assert sum(table["rows_of_ranks"]) == len(expected)
        found = rows_of(path)["model/user"]
        assert {id_: row[:2] for id_, row in found.items()} == expected
        assert json_of(capsys, "verify", path)["ok"] is True
    convert(tmp_path / "2", tmp_path / "1", *only, "--world-size", "1")
    assert {i: row[:2] for i, row in rows_of(tmp_path / "1")["model/user"].items()} == expected
    if layout == "checkpoint":
        counted = json_of(capsys, "diff", source, tmp_path / "3", "--table=user")
        assert counted["equal"] is True  # scores and counters too
        model = make_model("TIMESTAMP_LFU", counter=True)
        DynamicEmbLoad(tmp_path / "3", model, ["user"], optim=True, counter=True)
        assert len(model.tables[0]) == len(expected)


def test_a_copy_keeps_its_parts_and_buckets(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "3", "--to", "checkpoint", "--world-size", "3")
    convert(tmp_path / "3", tmp_path / "copy", "--to", "checkpoint")
    for path, copied in ((tmp_path / "3", tmp_path / "copy"), (source, None)):
        if copied is None:
            copied = tmp_path / "whole"
            convert(source, copied, "--to", "checkpoint")
        names = sorted(file.name for file in (path / "model").iterdir())
        assert sorted(file.name for file in (copied / "model").iterdir()) == names
        for name in names:
            there = (copied / "model" / name).read_bytes()
            assert there == (path / "model" / name).read_bytes(), name


def test_an_index_for_serving(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "c", "--to=checkpoint", "--world-size=2", "--serving-index")
    assert len(list((tmp_path / "c" / "model").glob("*_emb_index*"))) == 4
    rows = rows_of(source)["model/user"]
    with ServingTable(tmp_path / "c", "user") as table:
        found, values = table.find(torch.tensor(sorted(rows)))
        assert bool(found.all())
        assert [tuple(one) for one in values.double().tolist()] == [
            rows[id_][0] for id_ in sorted(rows)
        ]


def test_a_chain_becomes_one_checkpoint(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("TIMESTAMP")
    for seed in range(3):
        train(model, 1, seed=seed)
        model.tables[0].erase(torch.tensor([-1]))
        dump_delta(tmp_path / "chain", model)
    convert(tmp_path / "chain", tmp_path / "c", "--to", "checkpoint")
    convert(tmp_path / "chain", tmp_path / "files", "--to", "safetensors")
    DynamicEmbDump(tmp_path / "direct", model, optim=True)
    for path in ("c", "files"):
        assert json_of(capsys, "diff", tmp_path / path, tmp_path / "direct")["equal"] is True


# ---- what is chosen, and what is said ----


def test_one_table_to_one_file(capsys: Capture, source: Path, tmp_path: Path) -> None:
    for name in ("user.safetensors", "user.parquet", "user.npz"):
        file = tmp_path / name
        text = said(capsys, "convert", source, file, "--table", "user", "--no-counter")
        assert text.startswith(f"{file}: ")
        assert file.is_file()
        model = make_model("TIMESTAMP_LFU", counter=True)
        done = import_table(model.tables[0], file)
        assert (done.read, done.lost) == (len(rows_of(source)["model/user"]), 0)
    assert "is a file for one table" in refused(capsys, "convert", source, tmp_path / "x.npz")
    assert "ends as numpy does" in refused(
        capsys, "convert", source, tmp_path / "x.npz", "--to", "parquet"
    )
    assert "--to is missing" in refused(capsys, "convert", source, tmp_path / "x")


def test_less_than_everything(capsys: Capture, source: Path, tmp_path: Path) -> None:
    less = ["--no-state", "--no-scores", "--no-counter"]
    for layout in LAYOUTS:
        convert(source, tmp_path / layout, "--to", layout, "--table", "user", *less)
        assert "warning: model/user: oneembedding has no place" not in capsys.readouterr().err
        for row, state, scores in rows_of(tmp_path / layout)["model/user"].values():
            assert len(row) == 4
            assert state is None
            assert scores is None


def test_rows_of_another_tool_into_a_model(capsys: Capture, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    np.savez(tmp_path / "vectors.npz", item=np.arange(50) * 10**15, vector=values)
    convert(
        *(tmp_path / "vectors.npz", tmp_path / "c", "--to", "checkpoint"),
        *("--column", "ids=item", "--column", "embeddings=vector"),
        *("--collection", "model.words", "--name", "rows"),
    )
    assert "the optimizer is not known; SGD is written" in capsys.readouterr().err
    model = torch.nn.ModuleDict({"words": DynamicEmbedding(8)})
    DynamicEmbLoad(tmp_path / "c", model)
    with torch.no_grad():
        found = model["words"](torch.arange(50) * 10**15)
    assert np.array_equal(found.numpy(), values)


def test_a_table_without_rows(tmp_path: Path) -> None:
    model = make_model("STEP", optimizer="sgd")
    DynamicEmbDump(tmp_path / "a", model, optim=True)
    for layout in ("checkpoint", "safetensors", "parquet", "numpy"):
        convert(tmp_path / "a", tmp_path / layout, "--to", layout)
        assert rows_of(tmp_path / layout) == {"model/user": {}, "model/item": {}}
    convert(tmp_path / "parquet", tmp_path / "back", "--to", "checkpoint")
    assert sorted(manifest_of(tmp_path / "back")) == sorted(manifest_of(tmp_path / "a"))


def test_tables_that_every_rank_had_for_itself(
    capsys: Capture, source: Path, tmp_path: Path
) -> None:
    from sources import source_of

    from dynamicemb.checkpoint.writer import write_shards
    from dynamicemb.table import Rows

    def rows(value: float) -> Rows:
        words = torch.ones(2, dtype=torch.int64)
        return Rows(torch.tensor([1, 2]), torch.full((2, 4), value), torch.empty(2, 0), words)

    write_shards(tmp_path / "a", [[source_of(rows(0.0))], [source_of(rows(1.0))]], progress=False)
    found = rows_of(tmp_path / "a")
    assert (found["model/t@0"][1][0][0], found["model/t@1"][1][0][0]) == (0.0, 1.0)
    assert "--rank says whose" in refused(
        capsys, "convert", tmp_path / "a", tmp_path / "b", "--to=checkpoint"
    )
    convert(tmp_path / "a", tmp_path / "b", "--to=checkpoint", "--rank=1")
    assert rows_of(tmp_path / "b")["model/t"][2][0] == (1.0,) * 4


# ---- all or nothing ----


def test_what_is_there_is_kept_unless_told(capsys: Capture, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "c"
    checkpoint(target, "STEP")
    before = rows_of(target)
    arguments = ["convert", source, target, "--to", "numpy"]
    assert "exists; --overwrite replaces it" in refused(capsys, *arguments)
    assert rows_of(target) == before
    convert(*arguments[1:], "--overwrite")
    assert sorted(file.name for file in target.iterdir()) == ["model.item.npz", "model.user.npz"]
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
    capsys.readouterr()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("words")
    assert "is not replaced, since it is no checkpoint" in refused(
        capsys, "convert", source, mine, "--to", "numpy", "--overwrite"
    )
    assert "would be replaced" in refused(
        capsys, "convert", target / "model.user.npz", target, "--to=checkpoint", "--overwrite"
    )
    assert (mine / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", "--to", "checkpoint")
    assert rows_of(tmp_path / "empty") == rows_of(source)


def test_a_checkpoint_into_its_own_place(source: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(source, tmp_path / "c"))
    convert(path, path, "--to", "checkpoint", "--world-size", "4", "--overwrite")
    assert rows_of(path) == rows_of(source)
    assert len(manifest_of(path)[0][2]) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_ends_it_with_nothing_made(
    capsys: Capture, source: Path, tmp_path: Path, layout: str
) -> None:
    path = Path(shutil.copytree(source, tmp_path / "c"))
    flip(file_of(path, "values"), 11)
    arguments = ["convert", path, tmp_path / "t", "--to", layout, "--table=user", "--no-counter"]
    assert main([*map(str, arguments), "--no-scores"]) == 2
    assert "is corrupt in the bytes" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("layout", "where", "overwrite"),
    [
        ("checkpoint", "rows", False),
        ("checkpoint", "before", True),
        ("numpy", "rows", True),
        ("oneembedding", "before", False),
        ("checkpoint", "after", True),
    ],
)
def test_a_kill_leaves_the_old_or_the_new(
    source: Path, tmp_path: Path, layout: str, where: str, overwrite: bool
) -> None:
    target = tmp_path / "t"
    before = None
    if overwrite:
        checkpoint(target, "STEP")
        before = rows_of(target)
    arguments = ["convert", str(source), str(target), "--to", layout, "--table", "user"]
    arguments += ["--overwrite"] if overwrite else []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "dynamicemb"])
    process = context.Process(target=killed_convert, args=(where, arguments))
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    if where == "after":
        assert rows_of(target) == {"model/user": rows_of(source)["model/user"]}
    elif overwrite:
        assert rows_of(target) == before
    else:
        assert not target.exists()
    assert len(list(tmp_path.glob(".t.*.unfinished"))) == 1
    if where != "after" and not overwrite:
        convert(*arguments[1:])
    else:
        convert(*arguments[1:], "--overwrite")
    assert [one.name for one in tmp_path.iterdir()] == ["t"]
    assert rows_of(target).keys() == {"model/user"}


def test_wrong_paths_and_options(capsys: Capture, source: Path, tmp_path: Path) -> None:
    to = ["--to", "checkpoint"]
    assert "does not exist" in refused(capsys, "convert", tmp_path / "nowhere", tmp_path / "t", *to)
    assert "does not exist" in refused(capsys, "convert", source, tmp_path / "no" / "t", *to)
    assert "did you mean numpy?" in refused(capsys, "convert", source, tmp_path / "t", "--to=nunpy")
    assert "--table chooses" in refused(
        capsys, "convert", source, tmp_path / "t", "--to=oneembedding"
    )
    assert "--world-size is about" in refused(
        capsys, "convert", source, tmp_path / "t", "--to=numpy", "--world-size=2"
    )
    assert "--name are for one table" in refused(
        capsys, "convert", source, tmp_path / "t", *to, "--name=x"
    )
    assert "already, whose number" in refused(
        capsys, "convert", source, tmp_path / "t", *to, "--world-size=2", "--dist-type=continuous"
    )
    assert list(tmp_path.iterdir()) == []
