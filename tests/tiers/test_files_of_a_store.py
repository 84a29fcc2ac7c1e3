"""Opening a folder whose files are not those of one store, each in its place, is refused."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from stores import assert_holds, make_rows, make_ssd

from dynamicemb.errors import CorruptStoreError

IDS = range(30_000)


def segment(store: Path, number: int) -> Path:
    return store / "segments" / f"{number:012}.rows"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the closed stores a and b, whose rows have the same size."""
    path = tmp_path_factory.mktemp("stores")
    for version, name in enumerate("ab"):
        store = make_ssd(path / name)
        store.insert(make_rows(IDS, version=version))
        store.snapshot("first")
        store.insert(make_rows(IDS, version=version))
        store.snapshot("second")
        store.close()
    assert segment(path / "a", 2).exists()
    return path


def exchange(one: Path, two: Path) -> None:
    text = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(text)


DAMAGES: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "exchanged segments": (
        "000000000000.rows: it is segment 1",
        lambda a, b: exchange(segment(a, 0), segment(a, 1)),
    ),
    "a segment of another store": (
        "000000000001.rows: it belongs to another store",
        lambda a, b: shutil.copy(segment(b, 1), segment(a, 1)),
    ),
    "the manifest of another store": (
        "snapshots/first: it belongs to another store",
        lambda a, b: shutil.copy(b / "MANIFEST", a / "MANIFEST"),
    ),
    "an emptied segment": (
        "000000000000.rows: it is empty",
        lambda a, b: os.truncate(segment(a, 0), 0),
    ),
    "a segment that was cut": (
        "000000000001.rows: records are missing at its end",
        lambda a, b: os.truncate(segment(a, 1), segment(a, 1).stat().st_size // 2),
    ),
    "a segment cut to its header": (
        "000000000001.rows: records are missing at its end",
        lambda a, b: os.truncate(segment(a, 1), 4096),
    ),
    "a missing first segment": (
        "000000000000.rows: this segment is missing",
        lambda a, b: segment(a, 0).unlink(),
    ),
    "a missing last segment": (
        "this segment is missing",
        lambda a, b: max((a / "segments").iterdir()).unlink(),
    ),
    "a missing manifest": ("MANIFEST: missing", lambda a, b: (a / "MANIFEST").unlink()),
    "exchanged snapshots": (
        "snapshots/first: it is the snapshot 'second'",
        lambda a, b: exchange(a / "snapshots/first", a / "snapshots/second"),
    ),
    "a snapshot of another store": (
        "snapshots/first: it belongs to another store",
        lambda a, b: shutil.copy(b / "snapshots/first", a / "snapshots/first"),
    ),
    "a missing snapshot": (
        "snapshots/second: this snapshot is missing",
        lambda a, b: (a / "snapshots/second").unlink(),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_it_is_refused_by_name_and_nothing_is_deleted(
    stores: Path, tmp_path: Path, name: str
) -> None:
    message, damage = DAMAGES[name]
    path = shutil.copytree(stores / "a", tmp_path / "a")
    damage(path, stores / "b")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=message):
            make_ssd(path)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_files_that_nobody_needs_are_moved_aside_and_named(stores: Path, tmp_path: Path) -> None:
    path = shutil.copytree(stores / "a", tmp_path / "a")
    foreign = segment(stores / "b", 0).read_bytes()
    segment(path, 99).write_bytes(foreign)
    with pytest.warns(UserWarning, match=r"set-aside/000000000099\.rows\.1"):
        store = make_ssd(path)
    assert_holds(store, IDS)
    assert (path / "set-aside" / "000000000099.rows.1").read_bytes() == foreign
    store.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_ssd(path).close()


def test_an_older_manifest_beside_newer_segments_is_refused(stores: Path, tmp_path: Path) -> None:
    path = shutil.copytree(stores / "a", tmp_path / "a")
    old = (path / "MANIFEST").read_bytes()
    store = make_ssd(path)
    store.insert(make_rows([1], version=3))
    store.close()
    (path / "MANIFEST").write_bytes(old)
    with pytest.raises(CorruptStoreError, match="newer than MANIFEST"):
        make_ssd(path)


def test_a_copy_of_a_folder_is_the_same_store(stores: Path, tmp_path: Path) -> None:
    store = make_ssd(shutil.copytree(stores / "a", tmp_path / "elsewhere"))
    assert_holds(store, IDS)
    store.load_snapshot("first")
    assert_holds(store, IDS)
    store.close()
