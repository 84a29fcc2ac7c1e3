"""Examples from Parquet, CSV and TSV files; bad files are named with row and column."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from dynamicemb.cli.app import main
from dynamicemb.cli.training import files
from dynamicemb.cli.training.batch import Batch
from dynamicemb.cli.training.files import DataError, FileSource
from dynamicemb.cli.training.schema import FileSchema, criteo, read_schema
from dynamicemb.errors import DynamicEmbError

YAML = "label: click\ndense: [price]\nsparse: [user]\ntables:\n  goods: [item, seen]\n"


def schema(folder: Path, text: str = YAML) -> FileSchema:
    file = folder / "columns.yaml"
    file.write_text(text)
    return read_schema(str(file))


def table(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "click": pa.array([n % 2 for n in numbers], pa.int8()),
            "price": [None if n % 5 == 0 else float(n) for n in numbers],
            "user": [f"u{n % 7}" if n % 3 else None for n in numbers],
            "item": pa.array([n - 2**63 for n in numbers], pa.int64()),
            "seen": [[n, n + 1][: n % 3] for n in numbers],
            "other": ["x"] * rows,
        }
    )


def text_id(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True
    )


def examples(batches: list[Batch]) -> list[tuple[object, ...]]:
    """(label, dense, ids of each feature) of every example."""
    result = []
    for one in batches:
        features = len(one.lengths) // one.size
        bags = iter(one.ids.split(one.lengths.tolist()))
        columns = [[next(bags).tolist() for _ in range(one.size)] for _ in range(features)]
        for n in range(one.size):
            ids = tuple(tuple(column[n]) for column in columns)
            result.append((one.labels[n].item(), tuple(one.dense[n].tolist()), ids))
    return result


def test_parquet_rows_become_examples(tmp_path: Path) -> None:
    pq.write_table(table(10), tmp_path / "a.parquet", row_group_size=4)
    source = FileSource([str(tmp_path / "a.parquet")], schema(tmp_path))
    assert source.examples == 10
    assert source.schema.features == ("user", "item", "seen")
    found = examples(list(source.batches(0, 4)))
    assert len(found) == 10
    assert found[5] == (1.0, (0.0,), ((text_id("u5"),), (5 - 2**63,), (5, 6)))
    assert found[3] == (1.0, (3.0,), ((), (3 - 2**63,), ()))


def test_files_of_a_glob_follow_each_other_and_reading_begins_anywhere(tmp_path: Path) -> None:
    for n in range(3):
        pq.write_table(table(50, 50 * n), tmp_path / f"part-{n}.parquet", row_group_size=20)
    source = FileSource([str(tmp_path / "part-*.parquet")], schema(tmp_path))
    whole = examples(list(source.batches(0, 64)))
    assert [one[0] for one in whole] == [n % 2 for n in range(150)]
    for skip, size in ((0, 7), (1, 64), (50, 50), (119, 10), (149, 3), (150, 3)):
        assert examples(list(source.batches(skip, size))) == whole[skip:]


def test_csv_and_tsv_give_what_parquet_gives_for_text(tmp_path: Path) -> None:
    text = "label: click\ndense: [price]\nsparse: [user]\n"
    rows = table(40).select(["click", "price", "user"])
    pq.write_table(rows, tmp_path / "a.parquet")
    lines = [
        [str(value) if value is not None else "" for value in row.values()]
        for row in rows.to_pylist()
    ]
    (tmp_path / "a.csv").write_text(
        "click,price,user\n" + "".join(",".join(line) + "\n" for line in lines)
    )
    with gzip.open(tmp_path / "a.tsv.gz", "wt") as file:
        file.write("click\tprice\tuser\n" + "".join("\t".join(line) + "\n" for line in lines))
    (tmp_path / "bare.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    chosen = schema(tmp_path, text)
    expected = examples(list(FileSource([str(tmp_path / "a.parquet")], chosen).batches(0, 16)))
    for name in ("a.csv", "a.tsv.gz"):
        source = FileSource([str(tmp_path / name)], chosen)
        assert source.examples is None
        assert examples(list(source.batches(0, 16))) == expected
        assert examples(list(source.batches(11, 16))) == expected[11:]
    bare = schema(tmp_path, text + "columns: [click, price, user]\n")
    source = FileSource([str(tmp_path / "bare.csv")], bare)
    assert examples(list(source.batches(0, 16))) == expected


def test_criteo_is_known_by_name(tmp_path: Path) -> None:
    line = ["1", *["3"] * 12, "", *["68fd1e64"] * 25, ""]
    (tmp_path / "day_0.tsv").write_text("\t".join(line) + "\n")
    (batch,) = FileSource([str(tmp_path / "day_0.tsv")], criteo()).batches(0, 8)
    assert batch.dense.shape == (1, 13)
    assert batch.dense[0, 0].item() == pytest.approx(math.log(4))
    assert batch.dense[0, 12].item() == 0
    assert batch.lengths.tolist() == [1] * 25 + [0]
    assert batch.ids.tolist() == [text_id("68fd1e64")] * 25


def test_names_that_torchrec_cannot_have_are_changed(tmp_path: Path) -> None:
    chosen = schema(tmp_path, "label: y\nsparse: [items, a.b]\n").columns_of
    assert dict(chosen.tables) == {"items_table": ("items",), "a_b": ("a.b",)}


def csv_file(folder: Path, *lines: str) -> Path:
    path = folder / "bad.csv"
    path.write_text("click,price,user\n" + "".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["1,2,a", "0,cheap,b"], "row 2 column 'price' is 'cheap'; allowed: a finite number"),
        (["1,2,a", "0,nan,b"], "row 2 column 'price' is 'nan'"),
        (["1,2,a", "0,2,b", "2,2,b"], "row 3 column 'click' is '2'; allowed: 0 or 1"),
        (["1,2,a", ",2,b"], "row 2 column 'click' is ''; allowed: 0 or 1"),
        (["1,2,a", "1,2"], "row 2 has 2 columns; the first row has 3"),
        ([], "is empty: it has no rows"),
    ],
)
def test_a_bad_csv_stops_with_file_row_and_column(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    path = csv_file(tmp_path, *lines)
    source = FileSource(
        [str(path)], schema(tmp_path, "label: click\ndense: [price]\nsparse: [user]\n")
    )
    with pytest.raises(DataError) as caught:
        list(source.batches(0, 10))
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_rows_are_counted_over_blocks(tmp_path: Path) -> None:
    path = csv_file(tmp_path, *(["1,2,a"] * 400_000), "1,x,a")
    source = FileSource(
        [str(path)], schema(tmp_path, "label: click\ndense: [price]\nsparse: [user]\n")
    )
    with pytest.raises(DataError, match="row 400,001 column 'price' is 'x'"):
        for _ in source.batches(0, 100_000):
            pass


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_files_are_streamed_whatever_their_size(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 16)
    rows = 1_000_000 if kind == "parquet" else 400_000
    numbers = torch.arange(rows, dtype=torch.int64)
    columns = pa.table(
        {
            "click": (numbers % 2).numpy(),
            "price": (numbers / 7.0).numpy(),
            "user": (numbers * 0x9E3779B97F4A7C1).numpy(),
        }
    )
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":  # one row group, and nothing that makes it small
        pq.write_table(columns, path, row_group_size=rows, compression="none", use_dictionary=False)
    else:
        with pa.output_stream(path) as stream:
            pa.csv.write_csv(columns, stream)
    whole = columns.nbytes
    del columns
    source = FileSource(
        [str(path)], schema(tmp_path, "label: click\ndense: [price]\nsparse: [user]\n")
    )
    before, most, seen = pa.total_allocated_bytes(), 0, 0
    for batch in source.batches(0, 1000):
        seen += batch.size
        most = max(most, pa.total_allocated_bytes() - before)
    assert seen == rows
    assert most < whole / 2, most


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    columns = schema(tmp_path)
    pq.write_table(table(3).drop_columns(["item"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet has no column 'item'; it has click, price"):
        FileSource([str(tmp_path / "a.parquet")], columns)
    with pytest.raises(DataError, match=r"bad.csv has no column 'item'"):
        list(FileSource([str(csv_file(tmp_path, "1,2,a"))], columns).batches(0, 10))


def test_broken_and_empty_parquet_files_are_named(tmp_path: Path) -> None:
    columns, path = schema(tmp_path), tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"a.parquet is no Parquet file, or broken"):
        FileSource([str(path)], columns)
    pq.write_table(table(0), path)
    with pytest.raises(DataError, match=r"a.parquet is empty"):
        FileSource([str(path)], columns)
    pq.write_table(table(1000), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet is broken after row 0"):
        list(FileSource([str(path)], columns).batches(0, 10))


def test_columns_of_wrong_types_are_named(tmp_path: Path) -> None:
    columns, path = schema(tmp_path), tmp_path / "a.parquet"
    pq.write_table(table(3).set_column(3, "item", pa.array([0.5, 1, 2])), path)
    with pytest.raises(DataError, match=r"a.parquet column 'item' has type double"):
        list(FileSource([str(path)], columns).batches(0, 10))
    pq.write_table(table(3).set_column(4, "seen", pa.array([[1], [None], [2]])), path)
    with pytest.raises(DataError, match=r"a.parquet row 2 column 'seen' is \[None\]"):
        list(FileSource([str(path)], columns).batches(0, 10))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dense: [a]\nsparse: [b]\n", "label in .* is None"),
        ("label: y\n", "names no sparse column"),
        ("label: y\nsparse: [y]\n", "'y' is named twice"),
        ("label: y\nsprase: [a]\n", "unknown key 'sprase' in .*; did you mean sparse"),
        ("label: y\nsparse: a\n", "sparse in .* allowed: a list of column names"),
        ("label: y\nsparse: [a]\ndense_transform: sqrt\n", "allowed: none, log1p"),
        ("label: y\nsparse: [a]\nseparator: ab\n", "one character"),
        ("label: y\ntables: [a]\n", "tables in"),
    ],
)
def test_a_wrong_schema_names_the_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DynamicEmbError, match=said):
        schema(tmp_path, text)


def test_files_that_are_not_there_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    columns = schema(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    for name, said in (("no-*.csv", "does not exist"), ("a.json", "unknown kind"), (".", "folder")):
        with pytest.raises(DynamicEmbError, match=said):
            FileSource([str(tmp_path / name)], columns)


def test_training_from_files_and_going_on_gives_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in range(2):
        user = torch.randint(0, 50, (1000,), generator=generator)
        click = (torch.rand(1000, generator=generator) < (user % 5) / 5).long()
        pq.write_table(
            pa.table({"click": click.numpy(), "user": user.numpy()}), tmp_path / f"{n}.parquet"
        )
    (tmp_path / "s.yaml").write_text("label: click\nsparse: [user]\n")
    arguments = [
        *("train", "--data", str(tmp_path / "*.parquet"), "--schema", str(tmp_path / "s.yaml")),
        *("--batch-size", "100", "--log-every", "5", "--window", "500", "--capacity", "256"),
        *("--plain", "--max-examples"),
    ]
    assert main([*arguments, "2000", "--out", str(tmp_path / "a")]) == 0
    assert main([*arguments, "1300", "--out", str(tmp_path / "b")]) == 0
    assert main([*arguments, "2000", "--out", str(tmp_path / "b")]) == 0
    a, b = (json.loads((tmp_path / name / "metrics.json").read_text())[-1] for name in "ab")
    assert a["metrics"] == b["metrics"]
    assert a["metrics"]["dynamic"]["auc"] > 0.7
    assert "ceiling" not in a["metrics"]
    assert main([*arguments, "2000", "--schema", "nothing.yaml"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["train", "--data", "x.csv"]) == 2
    assert "--data needs --schema" in capsys.readouterr().err


def test_rows_of_a_text_column_are_found_again_by_their_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{n % 2},{n % 20 + 150}" for n in range(400)]
    (tmp_path / "a.csv").write_text("click,user\n" + "\n".join(lines) + "\n")
    (tmp_path / "s.yaml").write_text("label: click\nsparse: [user]\n")
    arguments = ["--data", str(tmp_path / "a.csv"), "--schema", str(tmp_path / "s.yaml")]
    arguments += ["--batch-size", "100", "--capacity", "256", "--no-baseline", "--plain"]
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    inspect = ["inspect", str(tmp_path / "run")]
    assert main([*inspect, "--text", "157", "--text", "169", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(one["text"], one["id"], one["found"]) for one in rows] == [
        ("157", text_id("157"), True),
        ("169", text_id("169"), True),
    ]
    assert main([*inspect, "--text", "157", "--text", "9", "--id", str(text_id("157"))]) == 1
    said = capsys.readouterr().out
    assert f"text '157' (id {text_id('157')}) in " in said
    assert f"text '9' (id {text_id('9')}) has no row in " in said
    assert said.startswith(f"id {text_id('157')} in ")
    assert main([*inspect, "--text", "\udc80"]) == 2  # a byte that is not UTF-8
    assert "--text is '\\udc80'; allowed: text in UTF-8" in capsys.readouterr().err
