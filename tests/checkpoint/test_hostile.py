"""Names that are paths, manifests that lie, links in the way: nothing outside is touched."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynamicemb import (
    CheckpointError,
    CorruptCheckpointError,
    DynamicEmbDump,
    DynamicEmbLoad,
)
from dynamicemb.checkpoint.manifest import MANIFEST_NAME
from dynamicemb.checkpoint.manifest_json import checksum
from dynamicemb.checkpoint.names import distinct_stems, escape
from models import contents, make_model, train

HOSTILE = [
    "../x",
    "..",
    ".",
    "a/b",
    "/etc/passwd",
    "x\0",
    "*",
    "[",
    "?",
    "~",
    " ",
    "\n",
    "a" * 10_000,
    "a" * 9_999 + "b",
    "größe-表-🙂",
    "\ud800",
    "%2E%2E",
    "C:\\x",
    ".hidden",
    "user",
    "User",
    "USER",
    "user_emb_keys.rank_0.world_size_1",
    "dynamicemb_manifest.json",
]


class Net(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.tables = make_model(names=tuple(names))


def everything(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*")}


def test_names_of_tables(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    one, two = make_model(names=tuple(HOSTILE)), make_model(names=tuple(HOSTILE))
    train(one)
    DynamicEmbDump(inside, one, optim=True)
    assert all(path.startswith("inside") for path in everything(tmp_path))
    names = [path.name for path in (inside / "model").iterdir()]
    assert len(names) == 6 * len(HOSTILE)
    assert len({name.lower() for name in names}) == len(names)
    assert all(len(name) <= 255 and not name.startswith(".") for name in names)
    DynamicEmbLoad(inside, two, optim=True)
    assert contents(two) == contents(one)


def test_names_of_collections(tmp_path: Path) -> None:
    children = [name for name in HOSTILE if name and "." not in name]

    def model() -> nn.Module:
        net = nn.Module()
        for name in children:
            net.add_module(name, make_model(names=("t",)))
        return net

    one, two = model(), model()
    for name in children:
        train(one.get_submodule(name))
    DynamicEmbDump(tmp_path / "inside", one, optim=True)
    assert all(path.startswith("inside") for path in everything(tmp_path))
    assert len(list((tmp_path / "inside").iterdir())) == len(children) + 1
    DynamicEmbLoad(tmp_path / "inside", two, optim=True)
    for name in children:
        assert contents(two.get_submodule(name)) == contents(one.get_submodule(name))


def test_escaping() -> None:
    assert escape("user_1-a.b") == "user_1-a.b"
    assert escape("../x") == "%2E.%2Fx"
    assert escape("") == "%"
    assert escape("é%") == "%C3%A9%25"
    escaped = [escape(name) for name in HOSTILE]
    assert len(set(escaped)) == len(HOSTILE)
    assert distinct_stems(["a", "b"]) == {"a": "a", "b": "b"}
    stems = distinct_stems(["User", "user"])
    assert len({stem.lower() for stem in stems.values()}) == 2


# ---- manifests that lie ----


def sealed(content: Any) -> bytes:
    """A manifest whose checksum is right."""
    return sealed_bytes(json.dumps(content).encode())


def sealed_bytes(body: bytes) -> bytes:
    return b'{"checksum": "%016x",\n"manifest": ' % checksum(bytearray(body)) + body + b"}\n"


def table_of(content: Any) -> Any:
    return content["collections"][0]["tables"][0]


def shard_of(content: Any) -> Any:
    return table_of(content)["shards"][0]


def rows_2_60(content: Any) -> None:
    table_of(content)["rows"] = shard_of(content)["rows"] = 2**60


def rows_2_39(content: Any) -> None:
    """Within the limits of numbers, with files as long as that needs, on paper."""
    table, shard = table_of(content), shard_of(content)
    table["rows"] = shard["rows"] = 2**39
    for role, width in (("keys", 8), ("values", 16), ("scores", 8), ("opt_values", 32)):
        size = width * 2**39
        blocks = size // content["block_bytes"]
        shard["files"][role] = {"bytes": size, "xxh64": "0" * 16 * (blocks if blocks < 10 else 1)}


def member(path: str, value: Any) -> Any:
    def change(content: Any) -> None:
        where, *rest = path.split(".")
        target = {"top": content, "table": table_of(content), "shard": shard_of(content)}[where]
        for key in rest[:-1]:
            target = target[key]
        target[rest[-1]] = value

    return change


def without(path: str) -> Any:
    def change(content: Any) -> None:
        where, name = path.split(".")
        target = {"top": content, "table": table_of(content), "shard": shard_of(content)}[where]
        del target[name]

    return change


def one_file_for_two_tables(content: Any) -> None:
    tables = content["collections"][0]["tables"]
    tables[1]["stem"] = tables[0]["stem"]


def two_collections_in_one_folder(content: Any) -> None:
    content["collections"].append(dict(content["collections"][0], path="model.other"))


def shard_twice(content: Any) -> None:
    table_of(content)["shards"].append(shard_of(content))


def role_that_is_a_path(content: Any) -> None:
    shard_of(content)["files"]["../../x"] = {"bytes": 0, "xxh64": ""}


def deep(content: Any) -> None:
    nested: Any = 1
    for _ in range(900):
        nested = [nested]
    content["id"] = nested


LIES = {
    "2^60 rows": rows_2_60,
    "2^39 rows": rows_2_39,
    "dim -1": member("table.dim", -1),
    "dim 2^40": member("table.dim", 2**40),
    "dim 1.5": member("table.dim", 1.5),
    "dim true": member("table.dim", True),
    "other dim": member("table.dim", 5),
    "rows -1": member("shard.rows", -1),
    "rows text": member("shard.rows", "many"),
    "other rows": member("table.rows", 1),
    "block 0": member("top.block_bytes", 0),
    "block 2^50": member("top.block_bytes", 2**50),
    "version 2": member("top.version", 2),
    "version 0": member("top.version", 0),
    "format": member("top.format", "other"),
    "id": member("top.id", "../../x"),
    "id of a shard": member("shard.checkpoint", "0" * 32),
    "world_size": member("top.world_size", 2),
    "world_size 2^60": member("top.world_size", 2**60),
    "dtype": member("table.dtype", "object"),
    "value_dtype": member("table.value_dtype", "float16"),
    "stem": member("table.stem", "../x"),
    "stem hidden": member("table.stem", ".x"),
    "stem NUL": member("table.stem", "x\0"),
    "overlapping tables": one_file_for_two_tables,
    "overlapping collections": two_collections_in_one_folder,
    "shard twice": shard_twice,
    "no shards": member("table.shards", []),
    "no keys": without("shard.files"),
    "no dim": without("table.dim"),
    "strategy": member("table.score_strategy", ["SECRET"]),
    "no strategy": member("table.score_strategy", []),
    "scores": member("table.scores", ["value", "value"]),
    "optimizer": member("table.optimizer.kind", "EVIL"),
    "optimizer args": member("table.optimizer.args", {"learning_rate": -1.0}),
    "optimizer unknown": member("table.optimizer.args", {"__class__": 1}),
    "routing": member("table.routing", {"dist_type": "x", "world_size": 1, "block": None}),
    "routing 0": member("table.routing", {"dist_type": "roundrobin", "world_size": 0, "block": 1}),
    "checksums": member("shard.files.keys", {"bytes": 24, "xxh64": ""}),
    "checksum text": member("shard.files.keys", {"bytes": 24, "xxh64": "g" * 16}),
    "bytes": member("shard.files.keys", {"bytes": 2**61, "xxh64": "0" * 16}),
    "role": role_that_is_a_path,
    "step": member("shard.progress.step", -1),
    "collections": member("top.collections", {}),
    "nested": deep,
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("honest")
    model = make_model()
    for table in model.tables:
        table.insert(torch.arange(3), torch.randn(3, 4))
    DynamicEmbDump(path, model, optim=True)
    return path


@pytest.mark.parametrize("lie", list(LIES))
def test_a_manifest_that_lies(honest: Path, lie: str) -> None:
    file = honest / MANIFEST_NAME
    good = file.read_bytes()
    content = json.loads(good)["manifest"]
    LIES[lie](content)
    file.write_bytes(sealed(content))
    model = make_model()
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with pytest.raises(CorruptCheckpointError):
            DynamicEmbLoad(honest, model, optim=True)
    finally:
        file.write_bytes(good)
    assert [len(table) for table in model.tables] == [0, 0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024  # KiB
    assert time.process_time() - start < 60


def test_the_honest_one_loads(honest: Path) -> None:
    content = json.loads((honest / MANIFEST_NAME).read_bytes())["manifest"]
    (honest / MANIFEST_NAME).write_bytes(sealed(content))
    DynamicEmbLoad(honest, make_model(), optim=True)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"[" * 100_000, b'{"checksum": "', b"\xff" * 100], ids=repr
)
def test_a_manifest_that_is_none(honest: Path, data: bytes) -> None:
    file = honest / MANIFEST_NAME
    good = file.read_bytes()
    try:
        for content in (data, sealed_bytes(data)):
            file.write_bytes(content)
            with pytest.raises(CorruptCheckpointError, match=MANIFEST_NAME):
                DynamicEmbLoad(honest, make_model())
    finally:
        file.write_bytes(good)


def test_a_manifest_that_is_too_long(honest: Path) -> None:
    file = honest / MANIFEST_NAME
    good = file.read_bytes()
    try:
        os.truncate(file, 2**40)  # takes no space
        with pytest.raises(CorruptCheckpointError, match="at most"):
            DynamicEmbLoad(honest, make_model())
    finally:
        os.truncate(file, 0)
        file.write_bytes(good)


# ---- links ----


def test_links_in_the_target_of_a_dump(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    target = tmp_path / "target"
    target.mkdir()
    model = make_model()
    (target / "model").symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a file or a link"):
        DynamicEmbDump(target, model, allow_overwrite=True)
    (target / "model").unlink()
    (target / "model").mkdir()
    (target / "model" / "user_emb_keys.rank_0.world_size_1").symlink_to(outside / "precious")
    (target / MANIFEST_NAME).symlink_to(outside / "manifest")
    (target / ".dynamicemb-0").symlink_to(outside)
    DynamicEmbDump(target, model, allow_overwrite=True)
    assert sorted(os.listdir(outside)) == ["precious"]
    assert (outside / "precious").read_bytes() == b"precious"
    assert not any(one.is_symlink() for one in target.rglob("*"))
    DynamicEmbLoad(target, make_model())


@pytest.mark.parametrize(
    "name", ["model", "model/user_emb_keys.rank_0.world_size_1", MANIFEST_NAME]
)
def test_links_in_a_checkpoint_are_not_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    DynamicEmbDump(target, make_model())
    moved = tmp_path / "moved"
    (target / name).rename(moved)
    (target / name).symlink_to(moved)
    with pytest.raises(CorruptCheckpointError, match="link"):
        DynamicEmbLoad(target, make_model())


def test_the_path_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    DynamicEmbDump(tmp_path / "latest", make_model())
    DynamicEmbLoad(tmp_path / "latest", make_model())
    assert (tmp_path / "latest").is_symlink()
