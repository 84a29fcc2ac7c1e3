"""The seam to the operating system: names only, no links, every call can be failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import FailingSystem, ShortWrites

from dynamicemb import CorruptCheckpointError, InvalidArgumentError
from dynamicemb.checkpoint.files import Directory, System, replaced_system


def test_write_and_read_back(tmp_path: Path) -> None:
    with Directory.open(tmp_path / "a" / "b", create=True) as folder:
        with folder.create("x") as file:
            file.write(b"0123456789")
            file.write(memoryview(b"abc"))
            file.sync()
        with folder.read("x") as read:
            assert read.size == 13
            buffer = bytearray(4)
            read.read_at(8, buffer)
            assert bytes(buffer) == b"89ab"
            assert read.read_all(13) == b"0123456789abc"
        folder.sync()
        assert folder.list() == ["x"]


def test_short_writes_go_on(tmp_path: Path) -> None:
    with (
        replaced_system(ShortWrites(3)),
        Directory.open(tmp_path) as folder,
        folder.create("x") as file,
    ):
        file.write(bytes(range(256)))
    assert (tmp_path / "x").read_bytes() == bytes(range(256))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "/etc/passwd", "x\0"])
def test_names_that_are_paths(tmp_path: Path, name: str) -> None:
    with Directory.open(tmp_path) as folder:
        for operation in (folder.create, folder.read, folder.directory, folder.remove):
            with pytest.raises(InvalidArgumentError, match="file name"):
                operation(name)


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "file").symlink_to(outside / "secret")
    (inside / "new").symlink_to(outside / "made_by_us")
    (inside / "folder").symlink_to(outside)
    with Directory.open(inside) as folder:
        with pytest.raises(CorruptCheckpointError, match="symbolic link"):
            folder.read("file")
        with pytest.raises(FileExistsError):
            folder.create("new")
        with pytest.raises(OSError, match="folder"):
            folder.directory("folder")
        with pytest.raises(OSError, match="folder"):
            folder.make_directory("folder", exist_ok=True)
        assert not folder.is_directory("folder")
        folder.remove_tree("folder")
        assert folder.list() == ["file", "new"]
    assert sorted(os.listdir(outside)) == ["secret"]


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    folder = Directory.open(tmp_path)
    with folder, pytest.raises(CorruptCheckpointError, match="no regular file"):
        folder.read("pipe")


def test_reading_past_the_end(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    with Directory.open(tmp_path) as folder, folder.read("x") as file:
        with pytest.raises(CorruptCheckpointError, match="ends at byte 3"):
            file.read_at(1, bytearray(3))
        with pytest.raises(CorruptCheckpointError, match="at most 2"):
            file.read_all(2)


def test_one_lock_at_a_time(tmp_path: Path) -> None:
    with Directory.open(tmp_path) as one, Directory.open(tmp_path) as two:
        assert one.lock()
        assert not two.lock()
        one.close()
        assert two.lock()


def use_everything(path: Path) -> None:
    with Directory.open(path / "new", create=True) as folder:
        with folder.create("x") as file:
            file.write(b"x")
            file.sync()
        folder.rename("x", folder, "y")
        folder.list()
        folder.remove("y")


@pytest.mark.parametrize("kind", ["open", "write", "sync", "mkdir", "rename", "unlink", "list"])
def test_every_kind_of_call_can_fail(tmp_path: Path, kind: str) -> None:
    system = FailingSystem([kind], 1)
    with replaced_system(system), pytest.raises(OSError, match="made by the test") as raised:
        use_everything(tmp_path)
    assert raised.value.errno == errno.EIO
    assert system.failed


class CachedNames(System):
    """A file system over a network: it answers for a name from its cache, for ever."""

    def __init__(self) -> None:
        self._known: dict[object, os.stat_result] = {}

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if call is not os.stat:
            return super().run(operation, call, *args, **kwargs)
        if args[0] not in self._known:
            self._known[args[0]] = super().run(operation, call, *args, **kwargs)
        return self._known[args[0]]


def test_a_file_that_took_the_place_of_another_one_is_seen_past_a_cache(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    (tmp_path / "y").write_text("new")
    with replaced_system(CachedNames()), Directory.open(tmp_path) as folder:
        assert folder.exists("x")
        with folder.read("x") as file:
            assert folder.holds("x", file)
            folder.rename("y", folder, "x")
            assert not folder.holds("x", file)


def test_what_an_entry_holds(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    (tmp_path / "link").symlink_to("x")
    with Directory.open(tmp_path) as folder, folder.read("x") as file:
        assert folder.holds("none", None)
        assert not folder.holds("x", None)
        assert not folder.holds("none", file)
        assert not folder.holds("link", file)
        assert not folder.holds("link", None)
        (tmp_path / "x").write_text("longer")
        assert not folder.holds("x", file)
