"""``scheme://...`` is an error wherever a path is taken: it names the argument, no folder of that
name is made, and what the URL holds is not shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dynamicemb
from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbLoad,
    DynamicEmbTableOptions,
    InvalidArgumentError,
    dcp,
    dump_async,
    one_embedding,
)
from dynamicemb.checkpoint import CheckpointReader
from dynamicemb.cli.app import main
from dynamicemb.exchange import export_table, import_table
from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.serving import ServingTable, build_serving_index
from dynamicemb.table import create_table
from dynamicemb.tiers import SsdStore
from dynamicemb.tiers.remote.plugin import register_io
from models import make_model

SECRET = "hunter2"
URLS = (
    f"s3://user:{SECRET}@bucket/x",
    f"redis://:{SECRET}@127.0.0.1:6379/x",
    f"hdfs+x://{SECRET}/x",
    f"file:///tmp/{SECRET}",
    f"memory://{SECRET}",
    f"s3:/{SECRET}",  # as pathlib shortens it
    f"my_io://{SECRET}/x",  # what a plug-in may be called
    f"my_io:/{SECRET}/x",
)
OPTIONS = DynamicEmbTableOptions(dim=4, max_capacity=128)
SGD = Optimizer(OptimizerKind.SGD, OptimizerArgs())
KINDS = (torch.int64, torch.float32, 4)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a test, where a folder of the URL's name would be made."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def embedding(path: Any) -> one_embedding.MultiTableEmbedding:
    options = one_embedding.make_cached_ssd_store_options(1, "x")
    options["kv_store"]["persistent_table"]["path"] = path
    return one_embedding.MultiTableEmbedding(
        "e",
        4,
        torch.float,
        torch.int64,
        [one_embedding.make_table_options(one_embedding.make_uniform_initializer(0.0, 1.0))],
        options,
    )


CALLS: dict[str, Callable[[str], object]] = {
    "DynamicEmbDump": lambda url: DynamicEmbDump(url, make_model()),
    "DynamicEmbDump(Path)": lambda url: DynamicEmbDump(Path(url), make_model()),
    "dump_async": lambda url: dump_async(url, make_model()).wait(),
    "DynamicEmbLoad": lambda url: DynamicEmbLoad(url, make_model()),
    "dump_delta": lambda url: dump_delta(url, make_model()),
    "apply_delta": lambda url: apply_delta(url, make_model()),
    "CheckpointReader": CheckpointReader.open,
    "ServingTable": ServingTable,
    "build_serving_index": build_serving_index,
    "export_table": lambda url: export_table(create_table(OPTIONS), url + ".npz", format="numpy"),
    "import_table": lambda url: import_table(create_table(OPTIONS), url, format="numpy"),
    "DynamicTables": lambda url: dcp.DynamicTables(make_model(), saved_in=url),
    "SsdStore": lambda url: SsdStore(OPTIONS, SGD, path=url),
    "SsdStore(Path)": lambda url: SsdStore(OPTIONS, SGD, path=Path(url)),
    "SsdStore.at": SsdStore.at,
    "register_io": register_io,
    "device_mem": lambda url: one_embedding.make_device_mem_store_options(url, 100),
    "cached_ssd": lambda url: one_embedding.make_cached_ssd_store_options(1, url),
    "cached_host_mem": lambda url: one_embedding.make_cached_host_mem_store_options(1, url, 100),
    "cached_remote": lambda url: one_embedding.make_cached_remote_store_options(
        1, "memory://x", url
    ),
    "a folder per rank": lambda url: one_embedding.make_cached_ssd_store_options(1, ["x", url]),
    "store_options": embedding,
    "persistent reader": lambda url: one_embedding.make_persistent_table_reader(url, "s", *KINDS),
    "persistent writer": lambda url: one_embedding.make_persistent_table_writer([url], "s", *KINDS),
}
COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "inspect": lambda url: ["inspect", url],
    "verify": lambda url: ["verify", url],
    "diff": lambda url: ["diff", url, url],
    "convert from": lambda url: ["convert", url, "y.npz"],
    "convert to": lambda url: ["convert", "x.npz", url, "--to", "checkpoint"],
    "serve": lambda url: ["serve", url, "--port", "0", "--wait"],
    "doctor": lambda url: ["doctor", "--folder", url],
    "train --out": lambda url: ["train", "--out", url],
    "train --data": lambda url: ["train", "--data", url, "--schema", "criteo"],
    "train --schema": lambda url: ["train", "--data", "x", "--schema", url],
    "train --config": lambda url: ["train", "--config", url],
    "train --store": lambda url: ["train", "--store", f"ssd:{url}"],
    "train --tensorboard": lambda url: ["train", "--tensorboard", url],
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("call", list(CALLS))
def test_a_call(empty_folder: Path, call: str, url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is a URL \(.*allowed: .*") as raised:
        CALLS[call](url)
    assert SECRET not in str(raised.value)
    assert os.listdir(empty_folder) == []


def test_a_scheme_of_one_letter(empty_folder: Path) -> None:
    """``a:/x`` may be a drive, ``a://x`` is none."""
    for call in (lambda url: DynamicEmbDump(url, make_model()), ServingTable, SsdStore.at):
        with pytest.raises(InvalidArgumentError, match=r"is a URL \(a://"):
            call(f"a://{SECRET}/x")
    assert os.listdir(empty_folder) == []


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_command(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], command: str, url: str
) -> None:
    if "://" not in url:
        url = url.replace(":/", "://")
    assert main(COMMANDS[command](url)) == 2
    error = capsys.readouterr().err
    assert "is a URL (" in error
    assert SECRET not in error
    assert os.listdir(empty_folder) == []


def test_a_store_at_an_unknown_scheme(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--store", f"s3://:{SECRET}@x"]) == 2
    error = capsys.readouterr().err
    assert "--store is" in error
    assert SECRET not in error
    assert os.listdir(empty_folder) == []


@pytest.mark.parametrize("path", ["a:b", "x/s3://y", "./s3:", "C:/x", "a b:/c", "1s:/x", ":/x"])
def test_what_is_a_path_all_the_same(empty_folder: Path, path: str) -> None:
    DynamicEmbDump(path, make_model())
    assert DynamicEmbLoad(path, make_model()).did_not_fit == 0


@pytest.mark.parametrize("path", ["", "x\0y", b"x", None, 3])
def test_what_is_no_path(empty_folder: Path, path: Any) -> None:
    for call in (
        lambda: DynamicEmbDump(path, make_model()),
        lambda: ServingTable(path),
        lambda: SsdStore(OPTIONS, SGD, path=path),
        lambda: one_embedding.make_cached_ssd_store_options(1, path),
        lambda: export_table(create_table(OPTIONS), path),
    ):
        with pytest.raises(dynamicemb.ArgumentTypeError, match="allowed"):
            call()
    assert os.listdir(empty_folder) == []
