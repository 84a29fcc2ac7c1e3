"""The seam to the operating system: every byte of a checkpoint goes through it.

:class:`Directory` gives names inside one folder, never paths: a name with a separator is refused,
and symbolic links inside the folder are not followed, so nothing outside it can be reached. All
system calls are made by :class:`System`, in one method, so that a test can fail any of them.

Errors of the operating system are ``OSError``, as they come; callers say what they were doing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from dynamicemb.errors import CorruptCheckpointError, InvalidArgumentError

try:  # advisory locks exist on POSIX only
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

ResultT = TypeVar("ResultT")
Buffer = bytes | bytearray | memoryview

#: Seconds that :meth:`Directory.lock` waits: ``build_serving_index`` has a folder for less.
LOCK_WAIT = 0.2
#: Bytes of a block of ``st_blocks``, whatever the file system's own block size is.
_BLOCK = 512


class System:
    """The system calls. Override :meth:`run` to see or to fail them."""

    def run(
        self, operation: str, call: Callable[..., ResultT], *args: Any, **kwargs: Any
    ) -> ResultT:
        """Make one system call. ``operation``: "open", "write", "sync", "rename", "mkdir",
        "unlink", "rmdir", "read", "stat", "list", "lock" or "unlock"."""
        while True:
            try:
                return call(*args, **kwargs)
            except InterruptedError:  # pragma: no cover  (PEP 475 leaves few)
                continue


_system = System()


def system() -> System:
    """What makes the system calls now."""
    return _system


@contextlib.contextmanager
def replaced_system(other: System) -> Iterator[None]:
    """Let ``other`` make the system calls of every thread, for tests."""
    global _system
    before, _system = _system, other
    try:
        yield
    finally:
        _system = before


def check_name(name: str) -> str:
    """``name`` if it names an entry of a folder: no separator, no NUL, not "." or ".."."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise InvalidArgumentError(
            f"the file name is {name[:80]!r}; allowed: a name without separators and NUL"
        )
    return name


class _Open:
    """A file descriptor that is closed once."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name

    def fileno(self) -> int:
        if self._descriptor < 0:
            raise ValueError(f"{self.name} is closed")
        return self._descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            with contextlib.suppress(OSError):
                self.close()


class WriteFile(_Open):
    """A new file. Nothing is safe before :meth:`sync`."""

    def write(self, data: Buffer) -> None:
        """Append all of ``data``; a short write goes on where it stopped."""
        rest = memoryview(data).cast("B")
        while len(rest):
            written = _system.run("write", os.write, self.fileno(), rest)
            if written <= 0:
                raise OSError(errno.EIO, "the system wrote nothing", self.name)
            rest = rest[written:]

    def sync(self) -> None:
        """Return when the bytes are on the device."""
        _system.run("sync", os.fsync, self.fileno())


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What tells a file from another one and from what it was before it was written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class ReadFile(_Open):
    """A regular file that is read at any place."""

    def __init__(self, descriptor: int, name: str, status: os.stat_result) -> None:
        super().__init__(descriptor, name)
        self.size = status.st_size
        self.identity = _identity(status)
        self._status = status

    def again(self) -> ReadFile:
        """The same file, open a second time."""
        return ReadFile(os.dup(self.fileno()), self.name, self._status)

    def read_at(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on. A file that ends before is a
        ``CorruptCheckpointError``."""
        rest = memoryview(buffer).cast("B")
        while len(rest):
            count = _system.run("read", os.preadv, self.fileno(), [rest], offset)
            if count <= 0:
                raise CorruptCheckpointError(
                    f"{self.name} ends at byte {offset}; needed: {len(rest)} bytes more"
                )
            offset += count
            rest = rest[count:]

    def expect_in_order(self) -> None:
        """Tell the system that the file is read from start to end, where it can be told."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_all(self, limit: int) -> bytearray:
        """The whole file, if it has at most ``limit`` bytes."""
        if self.size > limit:
            raise CorruptCheckpointError(
                f"{self.name} has {self.size} bytes; allowed: at most {limit}"
            )
        data = bytearray(self.size)
        self.read_at(0, data)
        return data


class Directory(_Open):
    """An open folder. Names are those of its entries; see the module."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = False) -> Directory:
        """The folder at ``path`` (here links are followed: the path is the user's own word).
        ``create``: make it, and its parents, if it is missing."""
        path = os.fspath(path)
        if create:
            _make_path(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return cls(_system.run("open", os.open, path, flags), path)

    def _path(self, name: str) -> str:
        return os.path.join(self.name, name)

    def directory(self, name: str) -> Directory:
        """The folder ``name``; a link is not followed."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = _system.run("open", os.open, check_name(name), flags, dir_fd=self.fileno())
        return Directory(descriptor, self._path(name))

    def make_directory(self, name: str, *, exist_ok: bool = False) -> Directory:
        """Make and open the folder ``name``."""
        try:
            _system.run("mkdir", os.mkdir, check_name(name), 0o777, dir_fd=self.fileno())
        except FileExistsError:
            if not exist_ok:
                raise
        return self.directory(name)

    def create(self, name: str) -> WriteFile:
        """A new file ``name``. One that exists, or a link, is a ``FileExistsError``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = _system.run(
            "open", os.open, check_name(name), flags, 0o666, dir_fd=self.fileno()
        )
        return WriteFile(descriptor, self._path(name))

    def read(self, name: str) -> ReadFile:
        """The regular file ``name``; a link or a device is a ``CorruptCheckpointError``."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = _system.run("open", os.open, check_name(name), flags, dir_fd=self.fileno())
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise CorruptCheckpointError(
                    f"{self._path(name)} is a symbolic link; allowed: a regular file"
                ) from error
            raise
        try:
            status = _system.run("stat", os.fstat, descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpointError(f"{self._path(name)} is no regular file")
        except BaseException:
            os.close(descriptor)
            raise
        return ReadFile(descriptor, self._path(name), status)

    def list(self) -> list[str]:
        """The names of the entries, sorted."""
        return sorted(_system.run("list", os.listdir, self.fileno()))

    def is_directory(self, name: str) -> bool:
        """Whether ``name`` is a folder (a link to one is not)."""
        status = self._status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def exists(self, name: str) -> bool:
        """Whether there is an entry ``name``, of any kind."""
        return self._status(name) is not None

    def holds(self, name: str, file: ReadFile | None) -> bool:
        """Whether the entry ``name`` is still ``file`` as it was opened; ``None``: still nothing.
        As long as ``file`` is open, no other file can be taken for it. The entry is opened: a file
        system over a network may answer for a name alone from its cache."""
        try:
            with self.read(name) as present:
                return file is not None and present.identity == file.identity
        except FileNotFoundError:
            return file is None
        except CorruptCheckpointError:  # a link, or no regular file
            return False

    def is_at(self, path: str) -> bool:
        """Whether ``path`` leads to this folder now."""
        try:
            there = _system.run("stat", os.stat, path)
        except OSError:
            return False
        here = _system.run("stat", os.fstat, self.fileno())
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def size(self, name: str) -> int | None:
        """Bytes of the regular file ``name``; ``None`` if there is none."""
        status = self._status(name)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def allocated(self, name: str) -> tuple[int, int]:
        """(length, bytes on the device) of the regular file ``name``; zeros if there is none. A
        sparse or compressed file takes less than its length."""
        status = self._status(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return 0, 0
        return status.st_size, _BLOCK * status.st_blocks

    def _status(self, name: str) -> os.stat_result | None:
        """Of the entry itself, not of what a link leads to."""
        try:
            return _system.run(
                "stat", os.stat, check_name(name), dir_fd=self.fileno(), follow_symlinks=False
            )
        except FileNotFoundError:
            return None

    def rename(self, name: str, target: Directory, target_name: str) -> None:
        """Move the entry to ``target`` in one step, in place of one that is there."""
        _system.run(
            "rename",
            os.rename,
            check_name(name),
            check_name(target_name),
            src_dir_fd=self.fileno(),
            dst_dir_fd=target.fileno(),
        )

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove a file or a link."""
        try:
            _system.run("unlink", os.unlink, check_name(name), dir_fd=self.fileno())
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_directory(self, name: str) -> None:
        """Remove an empty folder."""
        _system.run("rmdir", os.rmdir, check_name(name), dir_fd=self.fileno())

    def remove_tree(self, name: str) -> None:
        """Remove an entry and, if it is a folder, all inside; links are removed, not followed."""
        if not self.is_directory(name):
            self.remove(name, missing_ok=True)
            return
        with self.directory(name) as inside:
            for one in inside.list():
                inside.remove_tree(one)
        self.remove_directory(name)

    def sync(self) -> None:
        """Return when the names of the entries are on the device."""
        _system.run("sync", os.fsync, self.fileno())

    def lock(self) -> bool:
        """Take the folder for this process until it is closed or unlocked; False if another one
        still has it after :data:`LOCK_WAIT` seconds. True without a lock where the file system has
        none."""
        if fcntl is None:  # pragma: no cover
            return True
        until = time.monotonic() + LOCK_WAIT
        while True:
            try:
                _system.run("lock", fcntl.flock, self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.001)
            except OSError as error:
                if error.errno in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EBADF):
                    return True
                raise
            else:
                return True

    def unlock(self) -> None:
        """Give up what :meth:`lock` took."""
        if fcntl is not None:
            with contextlib.suppress(OSError):  # of a file system without locks
                _system.run("unlock", fcntl.flock, self.fileno(), fcntl.LOCK_UN)


def _make_path(path: str) -> None:
    """The folder ``path`` and its parents, each durable in its own parent."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    _make_path(parent)
    with contextlib.suppress(FileExistsError):
        _system.run("mkdir", os.mkdir, path, 0o777)
    with Directory.open(parent) as above:
        above.sync()
