"""Rows through other tools' files and back, bit by bit."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbTableOptions,
    InvalidArgumentError,
    UsageError,
)
from dynamicemb.checkpoint import exchange_formats
from dynamicemb.exchange import Imported, export_table, import_rows, import_table
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.routing import Routing
from dynamicemb.table import Rows, Table
from tables import EXTREME_IDS, STRATEGY, contents, equal_rows, make_table, tensor

SUFFIXES = [".safetensors", ".parquet", ".npz"]


def adam() -> Optimizer:
    return Optimizer(OptimizerKind.ADAM, OptimizerArgs())


def by_id(table: Table) -> Rows:
    rows = contents(table)
    order = rows.ids.argsort()
    return Rows(rows.ids[order], rows.embeddings[order], rows.state[order], rows.scores[order])


def filled(strategy: str = "STEP", dtype: torch.dtype = torch.float32, **changes: Any) -> Table:
    """Random rows, state and scores, with all bits in use, for ids over the full range."""
    table = make_table(
        strategy, optimizer=adam(), max_capacity=1024, embedding_dtype=dtype, **changes
    )
    generator = torch.Generator().manual_seed(5)
    ids = torch.cat(
        [tensor(EXTREME_IDS), torch.randint(-(2**62), 2**62, (300,), generator=generator)]
    )
    words = (len(ids),) if table.score_words == 1 else (len(ids), 2)
    table.insert(
        ids,
        torch.randn(len(ids), 4, generator=generator).to(dtype),
        state=torch.randn(len(ids), 8, generator=generator),
        scores=torch.randint(-(2**62), 2**62, words, generator=generator),
    )
    return table


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["STEP", "TIMESTAMP_LFU"])
def test_round_trip_is_bit_equal(
    tmp_path: Path, suffix: str, dtype: torch.dtype, strategy: str
) -> None:
    table = filled(strategy, dtype)
    path = tmp_path / f"rows{suffix}"
    assert export_table(table, path, batch_size=100) == len(table)
    other = make_table(strategy, optimizer=adam(), max_capacity=1024, embedding_dtype=dtype)
    assert import_table(other, path, batch_size=77) == Imported(len(table), len(table), 0)
    assert equal_rows(by_id(other), by_id(table))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_table_and_one_without_state(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    assert export_table(make_table(), str(path)) == 0
    assert import_table(make_table(), str(path)) == Imported(0, 0, 0)
    table = make_table(max_capacity=64)  # SGD has no state
    table.find_or_insert(tensor(EXTREME_IDS))
    export_table(table, path)
    other = make_table(max_capacity=64)
    import_table(other, path)
    assert equal_rows(by_id(other), by_id(table))


def test_files_are_what_the_tools_read(tmp_path: Path) -> None:
    table = filled(dtype=torch.bfloat16)
    rows = contents(table)
    export_table(table, tmp_path / "a.safetensors")
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(read) == {"ids", "embeddings", "state", "scores"}
    assert torch.equal(read["ids"], rows.ids)
    assert torch.equal(read["embeddings"], rows.embeddings)
    export_table(table, tmp_path / "a.parquet", state=False, scores=False)
    frame = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert frame.column_names == ["ids", "embeddings"]
    assert frame["ids"].to_pylist() == rows.ids.tolist()
    assert frame["embeddings"].to_pylist() == rows.embeddings.tolist()
    export_table(table, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["embeddings"], rows.embeddings.float().numpy())
        assert arrays["scores"].dtype == np.uint64


def test_a_table_that_was_trained_elsewhere() -> None:
    trained = torch.nn.Embedding(100, 8)
    rows = DynamicEmbedding(8)
    import_rows(rows, torch.arange(100), trained.weight)
    ids = torch.tensor([5, 99, 0])
    assert torch.equal(rows(ids), trained(ids))


def test_arrays_of_other_types() -> None:
    table = make_table(max_capacity=64, embedding_dtype=torch.float16)
    vectors = np.random.default_rng(0).normal(size=(10, 4))
    done = import_rows(table, np.arange(10, dtype=np.uint64) + 2**63, vectors)
    assert done == Imported(10, 10, 0)
    found = table.find(tensor(range(2**63, 2**63 + 10)))
    assert torch.equal(found.embeddings, torch.from_numpy(vectors).half())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_other_tools(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"items{suffix}"
    ids, vectors = np.arange(50), np.random.default_rng(1).normal(size=(50, 4)).astype("f4")
    if suffix == ".npz":
        np.savez_compressed(path, item_id=ids, vector=vectors, name=np.array(["x"]))
    elif suffix == ".parquet":  # lists of any length, and a column we do not know
        frame = {"item_id": ids, "vector": list(vectors), "name": ["x"] * 50}
        pyarrow.parquet.write_table(pyarrow.table(frame), path)
    else:
        arrays = {"item_id": torch.from_numpy(ids), "vector": torch.from_numpy(vectors)}
        safetensors.torch.save_file(arrays, path)
    table = make_table(max_capacity=1024)
    import_table(table, path, names={"ids": "item_id", "embeddings": "vector"})
    assert torch.equal(table.find(torch.arange(50)).embeddings, torch.from_numpy(vectors))
    with pytest.raises(InvalidArgumentError, match="names.'ids'. is 'ids'.*item_id"):
        import_table(table, path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_state_and_scores_that_mean_something_else(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    export_table(filled("STEP"), path)
    other = make_table("LFU", max_capacity=1024)
    with pytest.raises(InvalidArgumentError, match="'ADAM'; allowed: 'SGD'.*state=False"):
        import_table(other, path)
    with pytest.raises(InvalidArgumentError, match="'STEP'; allowed: 'LFU'.*scores=False"):
        import_table(other, path, state=False)
    assert len(other) == 0
    import_table(other, path, state=False, scores=False)
    assert len(other) == 310


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    export_table(filled("STEP"), path)
    narrow = make_table("STEP", dim=3, optimizer=adam())
    with pytest.raises(
        InvalidArgumentError, match=r"embeddings of .*\(310, 4\).*allowed: \(310, 3\)"
    ):
        import_table(narrow, path)
    assert len(narrow) == 0


def test_rows_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    export_table(filled("STEP"), path)
    small = make_table("STEP", optimizer=adam(), max_capacity=64)
    with pytest.warns(
        UserWarning, match="246 rows did not fit table 'table', whose capacity is 64"
    ):
        assert import_table(small, path).lost == 246


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    export_table(filled("STEP"), path)
    whole = path.read_bytes()
    for damaged in (b"", b"garbage" * 100, whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        table = make_table("STEP", optimizer=adam(), max_capacity=1024)
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            import_table(table, path)
        assert len(table) == 0
    with pytest.raises(FileNotFoundError):
        import_table(table, tmp_path / f"none{suffix}")


def test_parquet_with_holes(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    frame = pyarrow.table({"ids": [1, None], "embeddings": [[1.0] * 4, [2.0] * 4]})
    pyarrow.parquet.write_table(frame, path)
    with pytest.raises(InvalidArgumentError, match="ids of .* has empty places"):
        import_table(make_table(), path)


def test_a_failed_export_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.safetensors"
    table = filled()
    export_table(table, path)
    before = path.read_bytes()
    monkeypatch.setattr(type(table), "export", lambda *_, **__: iter(()))
    with pytest.raises(InvalidArgumentError, match="changed while it was exported"):
        export_table(table, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_table_of_a_model(tmp_path: Path) -> None:
    options = DynamicEmbTableOptions(dim=4, max_capacity=128)
    module = BatchedDynamicEmbeddingTables([options, options], table_names=["a", "b"], seed=1)
    module(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    path = tmp_path / "b.parquet"
    with pytest.raises(InvalidArgumentError, match="table_name is None.*one table.*a, b"):
        export_table(module, path)
    assert export_table(module, path, table_name="b") == 2
    for wrong in ({"table_name": "c"}, {}):
        with pytest.raises(InvalidArgumentError, match="table_name"):
            import_table(module, path, **wrong)
    import_table(module, path, table_name="a", scores=False)
    assert module.tables[0].contains(torch.tensor([1, 2, 3])).all()


def test_ranks_take_their_own_ids(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    whole = filled()
    export_table(whole, path)
    found = 0
    for rank in range(3):
        options = DynamicEmbTableOptions(dim=4, max_capacity=1024, score_strategy=STRATEGY["STEP"])
        module = BatchedDynamicEmbeddingTables([options], table_names=["t"])
        routing = module.routings = {"t": Routing("hash_roundrobin", 3, rank)}
        done = import_table(module, path, state=False)
        ids = contents(module.tables[0]).ids
        assert done == Imported(len(whole), len(ids), 0)
        assert routing["t"].owned(ids).all()
        found += len(ids)
    assert found == len(whole)


def test_formats_and_paths_that_are_refused(tmp_path: Path) -> None:
    table = filled()
    with pytest.raises(InvalidArgumentError, match=r"ends in .safetensors, .parquet, .npz"):
        export_table(table, tmp_path / "rows.csv")
    with pytest.raises(InvalidArgumentError, match="format is 'csv'"):
        export_table(table, tmp_path / "rows", format="csv")
    assert export_table(table, tmp_path / "rows", format="numpy") == len(table)
    with pytest.raises(TypeError, match="target"):
        export_table("table", tmp_path / "rows.npz")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"ids of the arguments.*int64 or uint64"):
        import_rows(table, torch.zeros(3), torch.zeros(3, 4))
    with pytest.raises(InvalidArgumentError, match=r"embeddings of the arguments"):
        import_rows(table, torch.arange(3), torch.zeros(3, 5))


@pytest.mark.parametrize(
    ("suffix", "package"), [(".safetensors", "safetensors"), (".parquet", "pyarrow")]
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, suffix: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"rows{suffix}"
    export_table(filled(), path)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=f"pip install {package}"):
        import_table(make_table(), path)


# ---- how long a description may be ----


def table() -> Table:
    return make_table(max_capacity=2**15)


def test_parquet_in_many_small_batches_is_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row group has a description; the writer makes few of them."""
    source, target = table(), table()
    source.insert(torch.arange(2000), torch.ones(2000, source.dim))
    monkeypatch.setattr(exchange_formats, "LONGEST_HEADER", 20_000)
    export_table(source, tmp_path / "x.parquet", batch_size=5)
    assert pyarrow.parquet.ParquetFile(tmp_path / "x.parquet").num_row_groups == 1
    assert import_table(target, tmp_path / "x.parquet").read == 2000
    monkeypatch.setattr(exchange_formats, "ROW_GROUP_BYTES", 4000)
    export_table(source, tmp_path / "y.parquet", batch_size=5)
    assert pyarrow.parquet.ParquetFile(tmp_path / "y.parquet").num_row_groups > 5
    assert import_table(table(), tmp_path / "y.parquet").read == 2000


def test_a_long_description_is_read_if_the_file_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide files of other tools, with many row groups; a sparse file is not large."""
    count, columns = 20_000, 60
    more = {f"c{i}": pyarrow.array(np.random.default_rng(i).random(count)) for i in range(columns)}
    rows = pyarrow.FixedSizeListArray.from_arrays(np.ones(4 * count, np.float32), 4)
    wide = pyarrow.table({"ids": pyarrow.array(range(count)), "embeddings": rows, **more})
    path = tmp_path / "wide.parquet"
    pyarrow.parquet.write_table(wide, path, row_group_size=2000)
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little")
    monkeypatch.setattr(exchange_formats, "LONGEST_HEADER", footer // 2)
    monkeypatch.setattr(exchange_formats, "BYTES_PER_HEADER_BYTE", 64)
    assert import_table(table(), path).read == count
    monkeypatch.setattr(exchange_formats, "BYTES_PER_HEADER_BYTE", 2**30)
    with pytest.raises(InvalidArgumentError, match="its header has .* allowed: at most"):
        import_table(table(), path)


def test_parquet_that_is_nested_too_deep_is_refused_with_the_reason(tmp_path: Path) -> None:
    kind = pyarrow.int64()
    for _ in range(400):
        kind = pyarrow.list_(kind)
    schema = pyarrow.schema([("ids", pyarrow.int64()), ("embeddings", kind)])
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "x.parquet")
    with pytest.raises(InvalidArgumentError, match="cannot be read: .*nested"):
        import_table(table(), tmp_path / "x.parquet")


def test_an_array_of_numpy_with_a_long_header_is_no_column(tmp_path: Path) -> None:
    odd = np.zeros(3, dtype=[(f"field{i}", np.int64) for i in range(100)])
    rows = np.ones((5, 4), np.float32)
    np.savez(tmp_path / "x.npz", odd=odd, ids=np.arange(5), embeddings=rows)
    assert import_table(table(), tmp_path / "x.npz").read == 5
