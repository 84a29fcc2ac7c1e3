"""Damage to any byte of any file is seen before a row is inserted."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_models import make_rank_model

from dynamicemb import CorruptCheckpointError, DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint import CheckpointReader
from dynamicemb.checkpoint.manifest import BLOCK_BYTES
from models import make_model, train
from processes import run_ranks


def tiny(path: Path, seed: int = 1) -> None:
    """Two tables of a few rows, with every kind of file."""
    model = make_model(optimizer="exact_adagrad", seed=seed)
    for number, table in enumerate(model.tables):
        ids = torch.tensor([5, -1, 2**62]) + number + 10 * seed
        rows = torch.randn(3, 4)
        table.insert(ids, rows, state=rows + 1, scores=torch.tensor([1, 2, 3]) * (number + seed))
    DynamicEmbDump(path, model, optim=True)


def files(path: Path) -> list[Path]:
    found = sorted(one for one in path.rglob("*") if one.is_file())
    assert len(found) == 13  # keys, values, scores, state, buckets and JSON of two tables; manifest
    return found


def must_be_refused(path: Path) -> None:
    """By the part of loading that comes before the first row."""
    try:
        with CheckpointReader.open(path) as reader:
            reader.verify()
    except CorruptCheckpointError:
        return
    raise AssertionError("the damage was not seen")


def places(size: int, every: bool) -> Iterator[tuple[int, int]]:
    """(byte, bit) to flip: one bit of each byte, or every bit."""
    draw = random.Random(size)
    for byte in range(size):
        yield from ((byte, bit) for bit in (range(8) if every else [draw.randrange(8)]))


def flip_each(path: Path, every: bool) -> None:
    tiny(path)
    for file in files(path):
        good = file.read_bytes()
        with file.open("r+b") as handle:
            for byte, bit in places(len(good), every):
                handle.seek(byte)
                handle.write(bytes([good[byte] ^ 1 << bit]))
                handle.flush()
                must_be_refused(path)
                handle.seek(byte)
                handle.write(good[byte : byte + 1])
                handle.flush()
    with CheckpointReader.open(path) as reader:
        reader.verify()


def test_one_bit_of_each_byte(memory_path: Path) -> None:
    flip_each(memory_path, every=False)


@pytest.mark.stress
def test_every_bit(memory_path: Path) -> None:
    flip_each(memory_path, every=True)


def test_every_length(memory_path: Path) -> None:
    """Cut at any byte, and longer than it was."""
    tiny(memory_path)
    for file in files(memory_path):
        good = file.read_bytes()
        step = 1 if len(good) < 500 else 37
        for length in range(0, len(good), step):
            file.write_bytes(good[:length])
            must_be_refused(memory_path)
        file.write_bytes(good + b"\0")
        must_be_refused(memory_path)
        file.unlink()
        if file.parent != memory_path:  # a manifest that is gone is no checkpoint
            must_be_refused(memory_path)
        file.write_bytes(good)


def test_nothing_is_inserted(memory_path: Path) -> None:
    tiny(memory_path)
    for file in files(memory_path):
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        model = make_model(optimizer="exact_adagrad")
        with pytest.raises(CorruptCheckpointError, match=file.name.partition(".")[0]):
            DynamicEmbLoad(memory_path, model, optim=True)
        assert [len(table) for table in model.tables] == [0, 0]
        file.write_bytes(good)


def test_damage_found_while_loading_leaves_empty_tables_empty(memory_path: Path) -> None:
    tiny(memory_path)
    for file in files(memory_path):
        if file.name.endswith(".json") or "_emb_buckets" in file.name:  # not read here
            continue
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        model = make_model(optimizer="exact_adagrad")
        with pytest.raises(CorruptCheckpointError, match=file.name.partition(".")[0]):
            DynamicEmbLoad(memory_path, model, optim=True, verify_first=False)
        assert [len(table) for table in model.tables] == [0, 0]
        file.write_bytes(good)
    model = make_model(optimizer="exact_adagrad")
    DynamicEmbLoad(memory_path, model, optim=True, verify_first=False)
    assert [len(table) for table in model.tables] == [3, 3]


def test_only_the_tables_that_are_loaded_are_read(memory_path: Path) -> None:
    tiny(memory_path)
    damaged = memory_path / "model" / "item_emb_values.rank_0.world_size_1"
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    DynamicEmbLoad(memory_path, make_model(), {"model": ["user"]})
    with pytest.raises(CorruptCheckpointError, match="item_emb_values.*checksum"):
        DynamicEmbLoad(memory_path, make_model(), {"model": ["item"]})


def test_files_of_two_checkpoints_are_swapped(memory_path: Path) -> None:
    one, two = memory_path / "one", memory_path / "two"
    tiny(one, seed=1)
    tiny(two, seed=2)
    for file in files(one):
        good = file.read_bytes()
        other = two / file.relative_to(one)
        if other.read_bytes() == good:  # the hyper-parameters are the same
            continue
        shutil.copyfile(other, file)
        if file.parent == one:
            with CheckpointReader.open(one) as reader, pytest.raises(CorruptCheckpointError):
                reader.verify()
        else:
            must_be_refused(one)
        file.write_bytes(good)


def test_files_of_two_tables_are_swapped(memory_path: Path) -> None:
    tiny(memory_path)
    folder = memory_path / "model"
    for role in ("emb_keys", "emb_values", "emb_scores", "emb_opt_values"):
        one = folder / f"user_{role}.rank_0.world_size_1"
        two = folder / f"item_{role}.rank_0.world_size_1"
        swap(one, two)
        must_be_refused(memory_path)
        swap(one, two)
    with CheckpointReader.open(memory_path) as reader:
        reader.verify()


def swap(one: Path, two: Path) -> None:
    one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_bytes)
    two.write_bytes(one_bytes)


def dump_rank(rank: int, path: str) -> None:
    DynamicEmbDump(path, make_rank_model("roundrobin", 2, rank, fill=True), optim=True)


def load_damaged(rank: int, path: str) -> list[int]:
    """Both ranks refuse, although only one reads the damaged file."""
    model = make_rank_model("roundrobin", 2, rank, fill=False)
    try:
        DynamicEmbLoad(path, model, optim=True)
    except RuntimeError:
        return [len(table) for table in model.tables]
    raise AssertionError("the damage was not seen")


def test_files_of_two_ranks_are_swapped(memory_path: Path) -> None:
    run_ranks(2, dump_rank, str(memory_path))
    for role in ("emb_keys", "emb_values", "emb_scores", "emb_opt_values"):
        one, two = sorted((memory_path / "model").glob(f"user_{role}.*"))
        swap(one, two)
        must_be_refused(memory_path)
        swap(one, two)
    one, two = sorted((memory_path / "model").glob("user_emb_values.*"))
    data = two.read_bytes()
    two.write_bytes(data[:-1] + bytes([data[-1] ^ 64]))
    assert run_ranks(2, load_damaged, str(memory_path)) == [[0, 0], [0, 0]]


def test_damage_in_a_later_block(memory_path: Path) -> None:
    """Files of several blocks are read back, and a flip in any of them is found."""
    rows = 3 * BLOCK_BYTES // 16 // 2
    model = make_model(names=("t",), max_capacity=2 * rows, init_capacity=2 * rows)
    ids = torch.arange(rows)
    for part in ids.split(2**16):
        model.tables[0].insert(part, torch.randn(len(part), 4), scores=part)
    DynamicEmbDump(memory_path, model)
    file = memory_path / "model" / "t_emb_values.rank_0.world_size_1"
    assert file.stat().st_size == 16 * rows > BLOCK_BYTES
    other = make_model(names=("t",), max_capacity=2 * rows)
    DynamicEmbLoad(memory_path, other)
    assert torch.equal(other.tables[0].find(ids).embeddings, model.tables[0].find(ids).embeddings)
    assert torch.equal(other.tables[0].find(ids).scores, ids)
    for offset in (0, BLOCK_BYTES - 1, BLOCK_BYTES, file.stat().st_size - 1):
        with file.open("r+b") as handle:
            handle.seek(offset)
            byte = handle.read(1)[0]
            handle.seek(offset)
            handle.write(bytes([byte ^ 128]))
            handle.flush()
            start = offset // BLOCK_BYTES * BLOCK_BYTES
            with (
                CheckpointReader.open(memory_path) as reader,
                pytest.raises(CorruptCheckpointError, match=f"in the bytes {start} to"),
            ):
                reader.verify()
            handle.seek(offset)
            handle.write(bytes([byte]))


def test_a_file_that_goes_bad_after_it_was_verified(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    train(model)
    DynamicEmbDump(memory_path, model)
    file = memory_path / "model" / "item_emb_values.rank_0.world_size_1"
    verify = CheckpointReader.verify

    def verify_and_damage(self: CheckpointReader, tables: object = None, **more: object) -> None:
        verify(self, tables, **more)  # type: ignore[arg-type]
        with file.open("r+b") as handle:
            handle.write(b"\x55")

    monkeypatch.setattr(CheckpointReader, "verify", verify_and_damage)
    other = make_model()
    with pytest.raises(CorruptCheckpointError, match="item_emb_values"):
        DynamicEmbLoad(memory_path, other)
    assert [len(table) for table in other.tables] == [0, 0]
