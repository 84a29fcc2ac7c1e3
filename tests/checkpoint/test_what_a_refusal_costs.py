"""A file that is too long, too deep or too full is refused before it costs much; one that a dump
wrote is read, however large the checkpoint is."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from costs import costs
from generations import Writer, dump_and_die, mapped, operations_after_commit

from dynamicemb import CheckpointError, CorruptCheckpointError, DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint import manifest, target
from dynamicemb.checkpoint.manifest import FREE_BYTES, MANIFEST_NAME
from dynamicemb.checkpoint.manifest_json import checksum
from models import make_model

#: What the promise says. It takes half of that, on a machine that is busy too.
MOST_MIB = 64.0
MOST_SECONDS = 2.0
LARGE = 85 * 2**20
MEDIUM = 20 * 2**20


def sealed(body: bytes) -> bytes:
    return b'{"checksum": "%016x",\n"manifest": ' % checksum(body) + body + b"}\n"


def many(part: bytes, size: int) -> bytes:
    return b"[" + part * (size // len(part)) + b"0]"


BODIES: dict[str, Callable[[int], bytes]] = {
    "lists": lambda size: many(b"[],", size),
    "objects": lambda size: many(b"{},", size),
    "small objects": lambda size: many(b'{"a":1},', size),
    "numbers": lambda size: many(b"1000,", size),
    "fractions": lambda size: many(b"1.5,", size),
    "strings": lambda size: many(b'"ab",', size),
    "names": lambda size: b"{%s}" % b",".join(b'"%07x":1' % i for i in range(size // 12)),
    "padded names": lambda size: b"{%s}" % b",".join(b'"%07x":1 ' % i for i in range(size // 13)),
    "a string": lambda size: b'"%s"' % (b"x" * size),
    "escapes": lambda size: b'"%s"' % (b"\\u00e9" * (size // 6)),
    "a number": lambda size: b"1" * size,
    "an exponent": lambda size: b"1e" + b"9" * size,
    "deep lists": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep objects": lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "no end": lambda size: b"[" * size,
    "spaces": lambda size: b"[" + b" " * size + b"]",
}


#: Bytes: as many as are free, and for some the length that was once allowed.
AT_LENGTH = ("lists",)
SIZES = {False: (FREE_BYTES - 200,), True: (FREE_BYTES - 200, LARGE)}


@pytest.fixture(scope="module")
def refused() -> dict[str, Any]:
    """The costs of all hostile files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        return _costs_of_all(Path(place))


def _costs_of_all(place: Path) -> dict[str, Any]:
    paths: dict[str, Path] = {}
    for name, body in BODIES.items():
        for size in SIZES[name in AT_LENGTH]:
            folder = place / f"{name} {size}"
            (folder / "model").mkdir(parents=True)
            (folder / MANIFEST_NAME).write_bytes(sealed(body(size)))
            paths[f"checkpoint {name} {size}"] = folder
    for name, fill in CHEAP_FOLDERS.items():
        for size in (LARGE, *SIZES_BESIDE_EMPTY_FILES):
            folder = place / f"{name} {size}"
            (folder / "model").mkdir(parents=True)
            fill(folder / "model")
            (folder / MANIFEST_NAME).write_bytes(sealed(BODIES["padded names"](size)))
            paths[f"checkpoint {name} {size}"] = folder
    for name, write in OTHERS.items():
        paths[name] = write(place)
    return costs(paths)


# ---- folders that are cheap to make ----

EMPTY_FILES = 10_000
#: As long as these files allow, or nearly.
SIZES_BESIDE_EMPTY_FILES = (FREE_BYTES + EMPTY_FILES * manifest.BYTES_PER_EMPTY_FILE - 1000,)


def a_sparse_file(folder: Path) -> None:
    with (folder / "large").open("wb") as file:
        file.truncate(2**40)


def empty_files(folder: Path) -> None:
    for number in range(EMPTY_FILES):
        (folder / str(number)).touch()


CHEAP_FOLDERS: dict[str, Callable[[Path], None]] = {
    "beside a sparse file": a_sparse_file,
    "beside empty files": empty_files,
}


# ---- other files that say something of themselves ----


def safetensors(place: Path, header: bytes, name: str) -> Path:
    path = place / f"{name}.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def names_of_safetensors(place: Path) -> Path:
    header = b'{"__metadata__":{%s}}' % b",".join(b'"%x":""' % i for i in range(MEDIUM // 11))
    return safetensors(place, header, "names")


def metadata_of_safetensors(place: Path) -> Path:
    arrays = {
        "ids": {"dtype": "I64", "shape": [0], "data_offsets": [0, 0]},
        "embeddings": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]},
    }
    text = "[" + "[]," * (2**20 // 3) + "[]]"
    header = json.dumps({"__metadata__": {"dynamicemb": text}, **arrays}).encode()
    return safetensors(place, header, "metadata")


def members_of_a_zip(place: Path) -> Path:
    """A central directory of many members, as a file with 64-bit places has it."""
    path, count = place / "members.npz", 300_000
    head = struct.Struct("<4s4B4HL2L5H2L")
    with path.open("wb") as file:
        for number in range(count):
            name = b"%x" % number
            fields = (20, 3, 20, 0, 0, 0, 0, 0x21, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
            file.write(head.pack(b"PK\1\2", *fields) + name)
        size = file.tell()
        file.write(
            struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, 0)
            + struct.pack("<4sLQL", b"PK\6\7", 0, size, 1)
            + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
        )
    return path


def columns_of_parquet(place: Path) -> Path:
    pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path, count = place / "columns.parquet", 30_000
    schema = arrow.schema([arrow.field(f"c{i}", arrow.int64()) for i in range(count)])
    arrays = [arrow.array([], arrow.int64())] * count
    arrow.parquet.write_table(arrow.Table.from_arrays(arrays, schema=schema), path)
    return path


def metadata_of_parquet(place: Path) -> Path:
    pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path = place / "metadata.parquet"
    fields = [("ids", arrow.int64()), ("embeddings", arrow.list_(arrow.float32(), 4))]
    text = "[" + "[]," * (MEDIUM // 3) + "[]]"
    schema = arrow.schema(fields, metadata={"dynamicemb": text})
    arrow.parquet.write_table(schema.empty_table(), path)
    return path


def header_of_numpy(place: Path) -> Path:
    path = place / "header.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("ids.npy", "w") as file:
        text = b"{'descr': '<i8', 'shape': (" + b"1," * (MEDIUM // 2) + b")}"
        file.write(b"\x93NUMPY\2\0" + struct.pack("<L", len(text)) + text)
    return path


def headers_of_numpy(place: Path, name: str, text: bytes, count: int) -> Path:
    path = place / f"{name}.npz"
    head = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(count):
            archive.writestr(f"{number:x}.npy", head)
    return path


def long_headers_of_numpy(place: Path) -> Path:
    shape = b"0," * 4800
    text = b"{'descr': '<i8', 'fortran_order': False, 'shape': (%s)}" % shape
    return headers_of_numpy(place, "long headers", text, 1000)


def many_headers_of_numpy(place: Path) -> Path:
    text = b"{'descr': '<i8', 'fortran_order': False, 'shape': (0,)}"
    return headers_of_numpy(place, "many headers", text, 20_000)


def sparse_safetensors(place: Path) -> Path:
    header = b'{"__metadata__":{%s}}' % b",".join(b'"%x":""' % i for i in range(MEDIUM // 11))
    path = safetensors(place, header, "sparse")
    os.truncate(path, 2**40)
    return path


def opt_args_of_an_older_layout(place: Path) -> Path:
    path = place / "older"
    (path / "model").mkdir(parents=True)
    for role, size in (("keys", 8), ("values", 16)):
        (path / "model" / f"t_emb_{role}.rank_0.world_size_1").write_bytes(b"\0" * size)
    (path / "model" / "t_opt_args.json").write_bytes(many(b"[],", MEDIUM))
    return path


def snapshot_of_one_embedding(place: Path) -> Path:
    path = place / "embedding"
    snapshots = path / "0-1" / "rows" / "snapshots"
    snapshots.mkdir(parents=True)
    note = many(b"[],", MEDIUM // 2).hex()
    stored = snapshots / f"s.{1:020d}"
    stored.write_text(f"dynamicemb-ssd 1\nrows 24 4096 10\nnext 0\nnote {note}\nxxh64 0\n")
    return path


def manifest_of_a_store(place: Path) -> Path:
    path = place / "store"
    path.mkdir()
    (path / "MANIFEST").write_bytes(b"segment 1 1\n" * (MEDIUM // 12))
    return path


OTHERS: dict[str, Callable[[Path], Path]] = {
    "content safetensors with names": names_of_safetensors,
    "content safetensors with metadata": metadata_of_safetensors,
    "content zip with members": members_of_a_zip,
    "content parquet with columns": columns_of_parquet,
    "content parquet with metadata": metadata_of_parquet,
    "content numpy with a header": header_of_numpy,
    "content numpy with long headers": long_headers_of_numpy,
    "content numpy with many headers": many_headers_of_numpy,
    "content sparse safetensors": sparse_safetensors,
    "content older layout": opt_args_of_an_older_layout,
    "content one_embedding": snapshot_of_one_embedding,
    "store MANIFEST": manifest_of_a_store,
}


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in BODIES for size in SIZES[name in AT_LENGTH]]
)
def test_a_hostile_manifest(refused: dict[str, Any], name: str, size: int) -> None:
    cost = refused[f"checkpoint {name} {size}"]
    assert cost.error.startswith("CorruptCheckpointError: "), cost
    assert MANIFEST_NAME in cost.error
    assert cost.memory < MOST_MIB, cost
    assert cost.seconds < MOST_SECONDS, cost


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in CHEAP_FOLDERS for size in (LARGE, *SIZES_BESIDE_EMPTY_FILES)],
)
def test_a_hostile_manifest_in_a_folder_that_is_cheap_to_make(
    refused: dict[str, Any], name: str, size: int
) -> None:
    test_a_hostile_manifest(refused, name, size)


@pytest.mark.parametrize("name", list(OTHERS))
def test_another_hostile_file(refused: dict[str, Any], name: str) -> None:
    cost = refused[name]
    if "metadata" not in name or "parquet" in name:  # those of safetensors are passed over
        assert cost.error.partition(":")[0] in (
            "CorruptCheckpointError",
            "CorruptStoreError",
            "InvalidArgumentError",
        ), cost
    assert cost.memory < MOST_MIB, cost
    assert cost.seconds < MOST_SECONDS, cost


# ---- what a dump writes is read ----


def test_a_long_manifest_with_more_values_than_a_dump_writes(memory_path: Path) -> None:
    """Nothing else is wrong with it, and its files would allow it."""
    model = tables(450)
    for table in model.tables:
        table.insert(torch.tensor([5]), torch.full((1, 4), 3.0))
    DynamicEmbDump(memory_path, model)
    file = memory_path / MANIFEST_NAME
    content = json.loads(file.read_bytes())["manifest"]
    compact = json.dumps(content, separators=(",", ":"))  # as another writer may have it
    content["extra"] = {"x": [0] * 300_000}
    for text, allowed in ((compact + " " * FREE_BYTES, True), (json.dumps(content), False)):
        file.write_bytes(sealed(text.encode()))
        if allowed:
            DynamicEmbLoad(memory_path, tables(450))
        else:
            with pytest.raises(CorruptCheckpointError, match="allowed: one for each 12 bytes"):
                DynamicEmbLoad(memory_path, tables(450))


def test_a_dump_whose_manifest_is_too_dense_is_an_error(memory_path: Path) -> None:
    model = make_model(names=("," * (FREE_BYTES - 3000), "t"))
    with pytest.raises(CheckpointError, match="allowed: one for each 12 bytes"):
        DynamicEmbDump(memory_path, model)
    assert not list(memory_path.iterdir())


def test_many_tables_without_rows_are_dumped_and_read(memory_path: Path) -> None:
    """Their files are empty, and count little."""
    model = make_model(optimizer="adam", names=tuple(f"t{i}" for i in range(450)), max_capacity=256)
    DynamicEmbDump(memory_path, model, optim=True)
    assert (memory_path / MANIFEST_NAME).stat().st_size > FREE_BYTES
    DynamicEmbLoad(memory_path, model)


def tables(count: int) -> Any:
    return make_model(optimizer="sgd", names=tuple(f"t{i}" for i in range(count)), max_capacity=256)


def test_a_manifest_of_many_tables_is_read(memory_path: Path) -> None:
    """Longer than one may be beside no files."""
    model = tables(450)
    for table in model.tables:
        table.insert(torch.tensor([5]), torch.full((1, 4), 3.0))
    DynamicEmbDump(memory_path, model)
    assert (memory_path / MANIFEST_NAME).stat().st_size > 1.2 * FREE_BYTES
    again = tables(450)
    DynamicEmbLoad(memory_path, again)
    assert all(len(table) == 1 for table in again.tables)


def test_a_manifest_is_as_long_as_its_files_allow_however_far_a_commit_came(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that wait in the hidden folder count too."""
    monkeypatch.setattr(target, "FREE_BYTES", 0)
    writer = Writer()
    writer.dump(memory_path)
    for nth in range(operations_after_commit(writer, memory_path) + 1):
        dump_and_die(writer, memory_path, nth)
        assert mapped(memory_path) == writer.generation


def test_large_files_allow_their_checksums(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen digits for each 4 MiB."""
    model = make_model(optimizer="sgd", names=("t",), max_capacity=2**20, init_capacity=2**18)
    model.tables[0].insert(torch.arange(2**18), torch.zeros(2**18, 4))
    DynamicEmbDump(memory_path, model)
    size = (memory_path / MANIFEST_NAME).stat().st_size
    monkeypatch.setattr(target, "FREE_BYTES", 0)
    monkeypatch.setattr(target, "BYTES_PER_FILE", 1)
    with target.open_folder(str(memory_path)) as folder:
        longest = target.longest_manifest(folder, size)
    blocks = 2**18 * (8 + 16 + 8) // manifest.BLOCK_BYTES
    assert longest >= blocks * manifest.BYTES_PER_BLOCK


def test_a_dump_whose_manifest_nobody_would_read_is_an_error(memory_path: Path) -> None:
    writer = Writer()
    writer.dump(memory_path)
    model = make_model(names=("a" * (2 * FREE_BYTES),))
    with pytest.raises(CheckpointError, match="the manifest would have .* allowed: at most"):
        DynamicEmbDump(memory_path, model, allow_overwrite=True)
    assert not list(memory_path.glob(".dynamicemb-*"))
    assert mapped(memory_path) == 0


def test_a_manifest_that_is_longer_than_its_files_allow(memory_path: Path) -> None:
    """With everything right in it, but for spaces."""
    Writer().dump(memory_path)
    file = memory_path / MANIFEST_NAME
    body = json.dumps(json.loads(file.read_bytes())["manifest"]).encode()
    file.write_bytes(sealed(body + b" " * FREE_BYTES))
    assert mapped(memory_path) == 0  # a few files allow a little more
    file.write_bytes(sealed(body + b" " * (FREE_BYTES + 2**17)))
    with pytest.raises(CorruptCheckpointError, match="allowed: at most"):
        mapped(memory_path)


def test_numbers_of_a_zip_with_few_members_are_read(tmp_path: Path) -> None:
    from dynamicemb.exchange import import_table

    np.savez(tmp_path / "x.npz", ids=np.arange(5), embeddings=np.ones((5, 4), np.float32))
    model = make_model(names=("t",))
    assert import_table(model, tmp_path / "x.npz").read == 5
