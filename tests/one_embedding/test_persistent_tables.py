"""Tables on the disk: the reader and the writer, and tables in OneFlow's layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import DIM, STORES, make, rows_of, store_options, train, uniform_tables

from dynamicemb import one_embedding
from dynamicemb.errors import (
    ArgumentTypeError,
    CorruptStoreError,
    InvalidArgumentError,
    StoreError,
    UsageError,
)

reader = one_embedding.make_persistent_table_reader
writer = one_embedding.make_persistent_table_writer


def write_oneflow_table(
    folder: Path,
    puts: list[tuple[np.ndarray, np.ndarray]],
    snapshots: dict[str, int],
    *,
    physical_block: int = 4096,
    blocks_per_chunk: int | None = None,
) -> None:
    """A table as OneFlow writes it, byte by byte from the description of its layout.

    Every put begins a new block; ``snapshots`` says how many puts each of them has seen.
    """
    key_type, value_size = puts[0][0].dtype, puts[0][1].shape[1] * 4
    block = physical_block
    while block < value_size:
        block += physical_block
    per_block = block // value_size
    per_chunk = blocks_per_chunk or 4 * 2**30 // block
    for sub in ("keys", "values", "snapshots"):
        (folder / sub).mkdir(parents=True)
    (folder / "LOCK").touch()
    for name, number in (
        ("KEY_SIZE", key_type.itemsize),
        ("VALUE_SIZE", value_size),
        ("PHYSICAL_BLOCK_SIZE", physical_block),
        ("NUM_LOGICAL_BLOCKS_PER_CHUNK", per_chunk),
    ):
        (folder / name).write_text(f"{number}\n")
    keys: dict[int, bytearray] = {}
    values: dict[int, bytearray] = {}
    newest: dict[int, int] = {}  # key -> row
    next_block = 0
    for number, (put_keys, put_values) in enumerate(puts, 1):
        for begin in range(0, len(put_keys), per_block):
            chunk = next_block // per_chunk
            of_keys, of_values = (d.setdefault(chunk, bytearray()) for d in (keys, values))
            room = bytearray(block)
            names = bytearray(per_block * key_type.itemsize)
            for i in range(min(per_block, len(put_keys) - begin)):
                row = next_block * per_block + i
                newest[int(put_keys[begin + i])] = row
                size = key_type.itemsize
                names[i * size : (i + 1) * size] = put_keys[begin + i].tobytes()
                room[i * value_size : (i + 1) * value_size] = put_values[begin + i].tobytes()
            of_keys += names
            of_values += room
            next_block += 1
        for name in [name for name, seen in snapshots.items() if seen == number]:
            where = folder / "snapshots" / name
            where.mkdir()
            rows: dict[int, list[int]] = {}
            for row in newest.values():
                rows.setdefault(row // (per_chunk * per_block), []).append(row)
            (where / "LIST").write_text("".join(f"index-{c:012d}\n" for c in sorted(rows)))
            for c, here in rows.items():
                np.array(here[::-1], dtype="<u8").tofile(where / f"index-{c:012d}")
    for chunk, content in keys.items():
        (folder / "keys" / f"key-{chunk:012d}").write_bytes(content)
    for chunk, content in values.items():
        (folder / "values" / f"value-{chunk:012d}").write_bytes(content)


def read_all(paths: Any, name: str, key_type: Any, dim: int, **more: Any) -> dict[int, np.ndarray]:
    rows: dict[int, np.ndarray] = {}
    with reader(paths, name, key_type, torch.float, dim, **more) as batches:
        for keys, values in batches:
            assert keys.shape == (len(values),)
            assert values.dtype == np.float32
            assert values.shape[1] == dim
            assert 0 < len(keys) <= 65536
            for key, value in zip(keys.tolist(), values, strict=True):
                assert key not in rows
                rows[key] = value
    return rows


def assert_rows(rows: dict[int, np.ndarray], keys: Any, values: np.ndarray) -> None:
    assert set(rows) == {int(key) for key in keys}
    for key, value in zip(keys, values, strict=True):
        np.testing.assert_array_equal(rows[int(key)], value)


def puts_of(key_type: Any, dim: int, sizes: list[int], keys: int) -> list[Any]:
    draw = np.random.default_rng(1)
    limits = np.iinfo(key_type)
    pool = draw.integers(limits.min, limits.max, keys, dtype=key_type, endpoint=True)
    pool[:3] = limits.min, limits.max, 0
    return [
        (draw.permutation(pool)[:size], draw.standard_normal((size, dim), dtype=np.float32))
        for size in sizes
    ]


def newest_of(puts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    rows = {int(key): value for one in puts for key, value in zip(*one, strict=True)}
    dtype = puts[0][0].dtype
    return np.array(list(rows), dtype=dtype), np.stack(list(rows.values()))


# ---- OneFlow's tables ----


@pytest.mark.parametrize("dim", [1, 17, 96, 1536])  # many in a block, a rest, two blocks each
@pytest.mark.parametrize("physical_block", [512, 4096])
@pytest.mark.parametrize("key_type", [np.int64, np.uint64, np.int32, np.uint32])
def test_a_table_of_oneflow_is_read(
    tmp_path: Path, key_type: Any, physical_block: int, dim: int
) -> None:
    puts = puts_of(key_type, dim, [40, 1, 25], keys=50)
    write_oneflow_table(
        tmp_path / "t",
        puts,
        {"early": 2, "late": 3},
        physical_block=physical_block,
        blocks_per_chunk=7,
    )
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for name, seen in (("early", 2), ("late", 3)):
        rows = read_all(
            [str(tmp_path / "t")], name, key_type, dim, physical_block_size=physical_block
        )
        assert_rows(rows, *newest_of(puts[:seen]))
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert after == before  # and left as it was


def test_bytes_of_a_table_of_oneflow(tmp_path: Path) -> None:
    """One by hand: 128 floats, SGD: eight values to a block, and the second put in a new one."""
    puts = [
        (np.arange(9, dtype=np.int64), np.arange(9 * 128, dtype=np.float32).reshape(9, 128)),
        (np.array([3], dtype=np.int64), np.full((1, 128), -1, dtype=np.float32)),
    ]
    write_oneflow_table(tmp_path / "t", puts, {"s": 2})
    assert (tmp_path / "t/NUM_LOGICAL_BLOCKS_PER_CHUNK").read_text() == "1048576\n"
    index = np.fromfile(tmp_path / "t/snapshots/s/index-000000000000", dtype="<u8")
    assert sorted(index) == [0, 1, 2, 4, 5, 6, 7, 8, 16]  # 9 to 15 and 17 to 23 are empty
    assert (tmp_path / "t/values/value-000000000000").stat().st_size == 3 * 4096
    assert (tmp_path / "t/keys/key-000000000000").stat().st_size == 24 * 8
    rows = read_all(str(tmp_path / "t"), "s", torch.int64, 128)
    assert rows[3].tolist() == [-1] * 128
    assert rows[8][0] == 8 * 128


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_embedding_takes_the_table_of_oneflow(
    tmp_path: Path, store: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys = np.arange(-500, 500, dtype=np.int64)
    values = np.random.default_rng(0).standard_normal((1000, 3 * DIM), dtype=np.float32)
    values = np.abs(values)
    for rank in range(ranks):
        part = np.arange(rank, 1000, ranks)
        write_oneflow_table(
            tmp_path / f"{rank}-{ranks}", [(keys[part], values[part])], {"trained": 1}
        )
    embedding = make(tmp_path, store, size_factor=3)
    assert len(embedding.tables[0]) == 0
    embedding.load_snapshot("trained", optimizer="adam", step=1000)
    assert not caplog.records
    found = embedding.tables[0].find(torch.from_numpy(keys))
    assert found.found.all()
    assert torch.equal(found.embeddings, torch.from_numpy(values[:, :DIM]))
    assert torch.equal(found.state, torch.from_numpy(values[:, DIM:]))
    assert embedding.tables[0].iteration == 1000
    # The next step is Adam's 1001st.
    adam = torch.optim.Adam(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([5])).backward(torch.ones(1, DIM))
    adam.step()
    w, m, v = np.split(values[505].astype(np.float64), 3)
    m, v = 0.9 * m + 0.1, 0.999 * v + 0.001
    w = w - 0.1 * (m / (1 - 0.9**1001)) / (np.sqrt(v / (1 - 0.999**1001)) + 1e-8)
    np.testing.assert_allclose(rows_of(embedding, [5])[0].numpy(), w, rtol=1e-5)
    # Its own snapshots lie beside OneFlow's.
    embedding.save_snapshot("mine")
    embedding.load_snapshot("trained")
    assert "does not say which optimizer" in caplog.text
    assert torch.equal(rows_of(embedding, [5])[0], torch.from_numpy(values[505, :DIM]))
    embedding.load_snapshot("mine")
    np.testing.assert_allclose(rows_of(embedding, [5])[0].numpy(), w, rtol=1e-5)


def test_a_smart_decay_adam_table_of_oneflow(tmp_path: Path) -> None:
    """Its rows carry their last step as an int64 behind the moments."""
    values = np.zeros((2, 3 * 5 + 3), dtype=np.float32)  # an odd width: one float of padding
    values[:, :5], values[:, 5:10], values[:, 10:15] = 1.0, 0.5, 0.25
    values[:, 16:] = np.array([[40], [50]], dtype=np.int64).view(np.float32)
    write_oneflow_table(tmp_path / "0-1", [(np.arange(2, dtype=np.int64), values)], {"s": 1})
    options = store_options("device_mem", tmp_path, storage_dim=18)
    embedding = make(tmp_path, options=options, dim=5)
    embedding.load_snapshot("s", optimizer="smart_decay_adam", step=50)
    embedding(torch.tensor([0, 1])).backward(torch.zeros(2, 5))
    one_embedding.SmartDecayAdam(embedding.parameters(), lr=0.1).step()
    for row, last in ((0, 40), (1, 50)):
        passed = 51 - last
        moved = 0.5 * sum(0.9**k for k in range(1, passed + 1))
        expected = 1.0 - 0.1 * moved / (np.sqrt(0.25 * 0.999**passed) + 1e-8)
        np.testing.assert_allclose(rows_of(embedding, [row])[0].numpy(), expected, rtol=1e-5)


def test_oneflow_tables_do_not_say_which_table_an_id_is_of(tmp_path: Path) -> None:
    keys, values = np.arange(4, dtype=np.int64), np.zeros((4, DIM), dtype=np.float32)
    write_oneflow_table(tmp_path / "0-1", [(keys, values)], {"s": 1})
    embedding = make(tmp_path, tables=uniform_tables(0.1, 0.2), share_ids=False)
    with pytest.raises(InvalidArgumentError, match="does not say which table.*share_ids=True"):
        embedding.load_snapshot("s")


def _damage(folder: Path, what: str) -> None:
    if what == "keys":
        (folder / "keys/key-000000000000").write_bytes(b"\0" * 8)
    elif what == "values":
        (folder / "values/value-000000000000").write_bytes(b"\0" * 100)
    elif what == "no values":
        (folder / "values/value-000000000000").unlink()
    elif what == "rows":
        np.array([2**63], dtype="<u8").tofile(folder / "snapshots/s/index-000000000000")
    elif what == "index":
        (folder / "snapshots/s/index-000000000000").write_bytes(b"123")
    elif what == "list":
        (folder / "snapshots/s/LIST").write_text("../../../../etc/passwd\n")
    elif what == "number":
        (folder / "NUM_LOGICAL_BLOCKS_PER_CHUNK").write_text("many")
    else:
        (folder / "VALUE_SIZE").write_text("99999\n")


@pytest.mark.parametrize(
    "what", ["keys", "values", "no values", "rows", "index", "list", "number", "size"]
)
def test_a_damaged_table_of_oneflow_is_refused(tmp_path: Path, what: str) -> None:
    keys, values = np.arange(40, dtype=np.int64), np.ones((40, DIM), dtype=np.float32)
    write_oneflow_table(tmp_path / "0-1", [(keys, values)], {"s": 1})
    _damage(tmp_path / "0-1", what)
    embedding = make(tmp_path)
    embedding(torch.arange(3))
    with pytest.raises((CorruptStoreError, StoreError, InvalidArgumentError)):
        embedding.load_snapshot("s")
    assert len(embedding.tables[0]) == 3
    with pytest.raises((CorruptStoreError, StoreError, InvalidArgumentError)):
        read_all(str(tmp_path / "0-1"), "s", torch.int64, DIM)


def test_an_empty_table_of_oneflow(tmp_path: Path) -> None:
    keys, values = np.arange(4, dtype=np.int64), np.zeros((4, DIM), dtype=np.float32)
    write_oneflow_table(tmp_path / "0-1", [(keys, values)], {"s": 1})
    (tmp_path / "0-1/snapshots/s/LIST").write_text("")
    assert read_all(str(tmp_path / "0-1"), "s", torch.int64, DIM) == {}


# ---- reader and writer ----


@pytest.mark.parametrize("key_type", [torch.int64, np.uint64, torch.int32, "uint32"])
@pytest.mark.parametrize("folders", [1, 3])
def test_what_is_written_is_read(tmp_path: Path, key_type: Any, folders: int) -> None:
    plain = (
        np.dtype(str(key_type).removeprefix("torch."))
        if not isinstance(key_type, type)
        else np.dtype(key_type)
    )
    puts = puts_of(plain, 12, [700, 10, 500], keys=800)
    paths = [str(tmp_path / f"{rank}-{folders}") for rank in range(folders)]
    with writer(paths, "s", key_type, np.float32, 12) as table:
        for keys, values in puts:
            table.write(keys, values)
    keys, values = newest_of(puts)
    rows = read_all(paths, "s", key_type, 12)
    assert_rows(rows, keys, values)
    with reader(paths, "s", key_type, np.float32, 12) as batches:
        assert next(batches)[0].dtype == plain


def test_batches_have_at_most_65536_rows(tmp_path: Path) -> None:
    paths = [str(tmp_path / "0-2"), str(tmp_path / "1-2")]
    keys = np.arange(150_000, dtype=np.int64)
    with writer(paths, "s", torch.int64, torch.float, 2) as table:
        table.write(keys, np.stack([keys, -keys], 1).astype(np.float32))
    with reader(paths, "s", torch.int64, torch.float, 2) as batches:
        parts = list(batches)
    assert max(len(part) for part, _ in parts) == 65536
    read = np.concatenate([part for part, _ in parts])
    np.testing.assert_array_equal(np.sort(read), keys)
    np.testing.assert_array_equal(np.concatenate([v for _, v in parts])[:, 1], -read)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("folders", [1, 2])
def test_an_embedding_loads_what_is_written(tmp_path: Path, store: str, folders: int) -> None:
    paths = [str(tmp_path / f"{rank}-{folders}") for rank in range(folders)]
    keys = np.arange(1000, dtype=np.int64)
    values = np.random.default_rng(0).standard_normal((1000, DIM), dtype=np.float32)
    with writer(paths, "s", torch.int64, torch.float, DIM) as table:
        table.write(keys, values)
    embedding = make(tmp_path, store)
    embedding.load_snapshot("s")
    assert torch.equal(rows_of(embedding, torch.arange(1000)), torch.from_numpy(values))
    train(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1), steps=2)
    embedding.save_snapshot("trained")
    trained = rows_of(embedding, torch.arange(1000))
    embedding.close()
    rows = read_all(str(tmp_path / "0-1"), "trained", torch.int64, DIM)
    np.testing.assert_array_equal(np.stack([rows[k] for k in range(1000)]), trained.numpy())


def test_rows_are_read_with_their_state(tmp_path: Path) -> None:
    embedding = make(tmp_path, size_factor=3)
    train(embedding, torch.optim.Adam(embedding.parameters()), steps=2)
    embedding.save_snapshot("s")
    ids = next(iter(embedding.tables[0].export())).ids
    found = embedding.tables[0].find(ids)
    embedding.close()
    rows = read_all(str(tmp_path / "0-1"), "s", torch.int64, 3 * DIM)
    expected = torch.cat([found.embeddings, found.state], 1).numpy()
    assert_rows(rows, ids.tolist(), expected)


def test_a_new_writer_starts_empty_and_replaces_its_snapshot(tmp_path: Path) -> None:
    path = str(tmp_path / "0-1")
    for begin in (0, 100):
        with writer(path, "s", torch.int64, torch.float, 2) as table:
            keys = np.arange(begin, begin + 10, dtype=np.int64)
            table.write(keys, np.full((10, 2), begin, dtype=np.float32))
    assert set(read_all(path, "s", torch.int64, 2)) == set(range(100, 110))


def test_an_error_leaves_no_snapshot(tmp_path: Path) -> None:
    path = str(tmp_path / "0-1")
    one = np.ones((1, 2), dtype=np.float32)
    table = writer(path, "s", torch.int64, torch.float, 2)

    def fail() -> None:
        with table:
            table.write(np.array([1]), one)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(StoreError, match="there is no snapshot 's' in .*; there is: none"):
        reader(path, "s", torch.int64, torch.float, 2)
    with pytest.raises(UsageError, match="the writer is closed"):
        table.write(np.array([1]), one)


def test_the_order_of_the_folders_counts_for_an_embedding(tmp_path: Path) -> None:
    with writer(str(tmp_path / "0-1"), "s", torch.int64, torch.float, DIM) as table:
        table.write(np.arange(9), np.zeros((9, DIM), dtype=np.float32))
    (tmp_path / "other").mkdir()
    paths = [str(tmp_path / "other/1-2"), str(tmp_path / "other/0-2")]
    with writer(paths, "s", torch.int64, torch.float, DIM) as table:
        table.write(np.arange(9), np.zeros((9, DIM), dtype=np.float32))
    shutil.rmtree(tmp_path / "0-1")
    shutil.copytree(tmp_path / "other/1-2", tmp_path / "0-1")
    with pytest.raises(InvalidArgumentError, match="is that of rank 0 of 2; allowed: rank 0 of 1"):
        make(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("keys", "values", "problem"),
    [
        (np.arange(3, dtype=np.int32), np.zeros((3, 2), np.float32), "keys is .*int32"),
        (np.zeros((3, 1), np.int64), np.zeros((3, 2), np.float32), "keys is .*one axis"),
        ([1, 2], np.zeros((2, 2), np.float32), "keys is 'list'"),
        (np.arange(3), np.zeros((3, 2)), "values is .*float64"),
        (np.arange(3), np.zeros((3, 3), np.float32), "values.shape is \\(3, 3\\).*\\(3, 2\\)"),
        (np.arange(3), np.zeros(3, np.float32), "values.shape is \\(3,\\)"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, keys: Any, values: Any, problem: str) -> None:
    table = writer(str(tmp_path / "0-1"), "s", torch.int64, torch.float, 2)
    with pytest.raises((ArgumentTypeError, InvalidArgumentError), match=problem):
        table.write(keys, values)
    table.close()
    assert read_all(str(tmp_path / "0-1"), "s", torch.int64, 2) == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"paths": []}, "paths is \\[\\]"),
        ({"paths": [3]}, "paths is 3"),
        ({"snapshot_name": "../s"}, "the name of a snapshot is '../s'"),
        ({"key_type": torch.int16}, "key_type is torch.int16"),
        ({"key_type": "words"}, "key_type is 'words'"),
        ({"value_type": np.float64}, "value_type is"),
        ({"storage_dim": 0}, "storage_dim is 0"),
        ({"physical_block_size": 1024}, "physical_block_size is 1024"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    arguments = {
        "paths": [str(tmp_path / "0-1")],
        "snapshot_name": "s",
        "key_type": torch.int64,
        "value_type": torch.float,
        "storage_dim": 2,
    }
    for make_one in (reader, writer):
        with pytest.raises((ArgumentTypeError, InvalidArgumentError), match=problem):
            make_one(**arguments | change)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("store", STORES)
def test_snapshots_are_read_while_an_embedding_is_trained(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store)
    sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
    train(embedding, sgd, steps=3, seed=1)
    embedding.save_snapshot("s")
    ids = torch.sort(torch.cat([rows.ids for rows in embedding.tables[0].export()])).values
    then = rows_of(embedding, ids).numpy().copy()
    batches = reader(str(tmp_path / "0-1"), "s", torch.int64, torch.float, DIM)
    train(embedding, sgd, steps=3, seed=2)
    keys, values = next(batches)
    embedding.save_snapshot("s")  # the one that is being read goes
    embedding.save_snapshot("t")
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys[order], ids.numpy())
    np.testing.assert_array_equal(values[order], then)
    batches.close()
    with pytest.raises(UsageError, match="the reader is closed"):
        next(batches)
    later = read_all(str(tmp_path / "0-1"), "t", torch.int64, DIM)
    for id_, row in zip(later, rows_of(embedding, list(later)), strict=True):
        np.testing.assert_array_equal(later[id_], row.numpy())


def test_a_writer_needs_the_folder_for_itself(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    with pytest.raises(StoreError, match="another process or store has it open"):
        writer(str(tmp_path / "0-1"), "s", torch.int64, torch.float, DIM)
    embedding.close()
