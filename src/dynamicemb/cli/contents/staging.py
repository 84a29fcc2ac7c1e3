"""A file or folder that is made beside its place and comes there whole, in one step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from dynamicemb.checkpoint.files import Directory
from dynamicemb.errors import CheckpointError, InvalidArgumentError

_END = ".unfinished"
_AT_FDCWD = -100
_EXCHANGE = 2


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write a file or a folder to. When the block ends it takes the
    place of what is at ``target``; if it raises, or the process dies, ``target`` is as it was. What
    a process that died left is removed by the next one."""
    parent = Path(os.path.abspath(target)).parent
    if not parent.is_dir():
        raise InvalidArgumentError(f"the folder {parent} does not exist")
    try:
        _tidy(parent, target.name)
        place = parent / f".{target.name}.{secrets.token_hex(8)}{_END}"
        place.mkdir()
    except OSError as error:
        raise CheckpointError(f"{parent} cannot be written to: {error.strerror}") from error
    with Directory.open(place) as lock:
        lock.lock()  # as long as this process lives
        try:
            fresh = place / target.name
            yield fresh
            _sync_tree(fresh)
            _put(fresh, parent / target.name)
            with Directory.open(parent) as folder:
                folder.sync()
        except OSError as error:
            raise CheckpointError(
                f"writing {target} failed: {error.strerror} ({error.filename})"
            ) from error
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _tidy(parent: Path, name: str) -> None:
    """Remove what processes that are gone left."""
    for place in parent.iterdir():
        if not (place.name.startswith(f".{name}.") and place.name.endswith(_END)):
            continue
        with contextlib.suppress(OSError), Directory.open(place) as folder:
            if folder.lock():
                shutil.rmtree(place, ignore_errors=True)


def _put(fresh: Path, target: Path) -> None:
    """Move ``fresh`` to ``target``; what is there is then at ``fresh``, or gone."""
    if not target.is_dir() or not os.listdir(target):
        if target.is_dir() and fresh.is_file():
            target.rmdir()
        os.replace(fresh, target)
    elif not _exchange(fresh, target):
        old = fresh.with_name(fresh.name + ".old")
        os.rename(target, old)
        os.rename(fresh, target)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one step, where the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # pragma: no cover
        return False
    paths = (os.fsencode(one), os.fsencode(other))
    done: int = call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_EXCHANGE))
    return done == 0


def _sync_tree(path: Path) -> None:
    """Return when a file, or a folder with all in it, is on the device."""
    places = [path, *path.rglob("*")] if path.is_dir() else [path]
    for place in places:
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
