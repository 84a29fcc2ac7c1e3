"""Reading a checkpoint: its manifest, its checksums, its rows in bounded memory."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from dynamicemb.checkpoint.blocks import BlockReader, CheckedBlock
from dynamicemb.checkpoint.files import Directory, ReadFile
from dynamicemb.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Shard,
    TableEntry,
)
from dynamicemb.checkpoint.names import opt_args_name
from dynamicemb.checkpoint.replaced import MissingFileError, pauses, was_replaced
from dynamicemb.checkpoint.target import (
    CheckpointFiles,
    decode_manifest,
    naming,
    open_folder,
    open_manifest,
)
from dynamicemb.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ReplacedCheckpointError,
    check_path,
)

#: Stands for the file of a table's hyper-parameters among the roles of its shards' files.
OPT_ARGS = "opt_args"
#: Bytes of rows that are read at a time.
BATCH_BYTES = 16 * 2**20


class _Room:
    """How many files the readers of this process may hold open together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0

    def take(self) -> bool:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with self._lock:
            if limit != resource.RLIM_INFINITY and self._taken >= limit // 4:
                return False
            self._taken += 1
            return True

    def give(self, number: int) -> None:
        with self._lock:
            self._taken -= number


_room = _Room()


class NoCheckpointError(CheckpointError):
    """The folder has no manifest; it may hold a checkpoint of an older layout."""


@dataclass
class StoredRows:
    """Rows as files hold them: ids int64 [n], embeddings [n, dim] in the file's dtype, state
    float32 [n, state_dim] and score words int64 [n] or [n, 2], each ``None`` if not asked for or
    not saved. ``scores.from_file`` gives a table's scores."""

    ids: torch.Tensor
    embeddings: torch.Tensor | None
    state: torch.Tensor | None
    scores: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.ids)


def _roles(table: TableEntry, *, values: bool, state: bool, scores: bool) -> list[str]:
    """The files that hold what is asked for, as far as it was saved."""
    roles = ["keys"]
    roles += ["values"] if values else []
    roles += ["scores"] if scores and table.scores else []
    roles += ["opt_values"] if state and table.state else []
    return roles


class _Buffers:
    """Tensors for a batch of rows."""

    def __init__(self, table: TableEntry, roles: Sequence[str], rows: int) -> None:
        state_dim = table.optimizer.state_dim(table.dim)
        words = () if table.score_words == 1 else (table.score_words,)
        shapes = {
            "keys": ((rows,), torch.int64),
            "values": ((rows, table.dim), table.value_dtype),
            "scores": ((rows, *words), torch.int64),
            "opt_values": ((rows, state_dim), torch.float32),
        }
        self._tensors = {
            role: torch.empty(shape, dtype=dtype, device="cpu")
            for role, (shape, dtype) in shapes.items()
            if role in roles
        }

    def read(self, readers: dict[str, BlockReader], rows: int) -> StoredRows:
        """The next ``rows`` of each file."""
        by_role = {
            role: readers[role].fill(tensor[:rows]) for role, tensor in self._tensors.items()
        }
        return StoredRows(
            by_role["keys"], by_role.get("values"), by_role.get("opt_values"), by_role.get("scores")
        )


class CheckpointReader:
    """A committed checkpoint, open for reading. Use as a context manager.

    ``manifest`` has been checked when the object exists; the tables' files have not: call
    :meth:`verify` before using what they hold. :meth:`rows` checks each block again as it reads.

    All that it reads belongs to this checkpoint. A dump may replace the checkpoint at any time: the
    files that :meth:`hold` opened stay as they were, and opening another file raises
    ``ReplacedCheckpointError`` from then on. ``marker``: the manifest's file, by which the reader
    detects that (``None``: there is none); the reader closes it.
    """

    def __init__(self, folder: Directory, manifest: Manifest, marker: ReadFile | None) -> None:
        self.path = folder.name
        self.manifest = manifest
        self._folder = folder
        self._marker = marker
        self._files = CheckpointFiles(folder, manifest.id)
        self._held: dict[tuple[str, str], ReadFile] = {}
        self._waited = False  # for a file that stayed missing; for the next one there is no need

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> CheckpointReader:
        """The checkpoint in the folder ``path``. Raises ``CheckpointError`` if there is none, and
        ``CorruptCheckpointError`` if its manifest is not as it was written."""
        path = check_path("path", path)
        folder = open_folder(path)
        marker = None
        try:
            with naming("reading", path):
                marker = open_manifest(folder)
                if marker is None and not folder.is_at(path):  # it was removed, and written anew
                    raise was_replaced(path)
                if marker is None:
                    raise NoCheckpointError(f"there is no committed checkpoint in {path!r}")
                return cls(folder, decode_manifest(folder, marker), marker)
        except BaseException:
            if marker is not None:
                marker.close()
            folder.close()
            raise

    @classmethod
    def open_known(cls, path: str, identity: str) -> CheckpointReader:
        """The checkpoint that was seen in the folder ``path`` a moment ago. Raises
        ``ReplacedCheckpointError`` if it is not there any more."""
        replaced = was_replaced(path)
        try:
            reader = cls.open(path)
        except CheckpointError as error:
            if isinstance(error, NoCheckpointError) or not os.path.isdir(path):
                raise replaced from error
            raise
        if reader.manifest.id != identity:
            reader.close()
            raise replaced
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.release()
        self._files.close()
        if self._marker is not None:
            self._marker.close()
        self._folder.close()

    # ---- one checkpoint ----

    def in_force(self) -> bool:
        """Whether the checkpoint is still the one in its folder: it was neither replaced nor
        removed."""
        return self._folder.holds(MANIFEST_NAME, self._marker) and self._folder.is_at(self.path)

    def confirm(self) -> None:
        """Raise ``ReplacedCheckpointError`` unless files that were opened by name before are of
        this checkpoint: a dump moves its manifest to its place before any other file."""
        if not self._folder.holds(MANIFEST_NAME, self._marker):
            raise was_replaced(self.path)

    def hold(
        self,
        tables: Iterable[tuple[str, str]] | None = None,
        shards: Sequence[int] | None = None,
        *,
        skip: Sequence[str] = (),
        without_missing: bool = False,
    ) -> None:
        """Open the files of ``tables`` (collection, name; ``None``: all) and of the given shards
        (``None``: all), but not of the roles ``skip``, now, so that they can be read whatever
        happens to the folder. All readers of a process hold at most a quarter of the files that it
        may have open; a file that does not fit, or cannot be opened, is opened when it is read. One
        that stays missing is a ``CorruptCheckpointError``, unless ``without_missing``."""
        missing: list[tuple[str, str]] = []
        with self.sound():
            for collection, name, _ in self._names(tables, shards, skip):
                place = (self.manifest.collections[collection].folder, name)
                if place in self._held:
                    continue
                if not _room.take():
                    break
                try:
                    self._held[place] = self._files.open(*place)
                except CheckpointError as error:
                    _room.give(1)
                    if isinstance(error, MissingFileError):
                        missing.append(place)
            self.confirm()
            if missing and not without_missing:
                self._wait_for(*missing[0]).close()
                raise was_replaced(self.path)  # it is there after all: look at the others again

    def _wait_for(self, folder: str, name: str) -> ReadFile:
        """The file that the manifest lists as ``name`` in ``folder``. If it is missing, wait for as
        long as :func:`tried_again` would retry: if the checkpoint is no longer in force by then
        this is a ``ReplacedCheckpointError``, else a ``CorruptCheckpointError``."""
        waits = iter(()) if self._waited else pauses()
        while True:
            try:
                return self._files.open(folder, name)
            except MissingFileError as error:
                if not self.in_force():
                    raise was_replaced(self.path) from error
                if next(waits, False) is False:
                    self._waited = True
                    raise CorruptCheckpointError(str(error)) from error

    def release(self) -> None:
        """Close what :meth:`hold` opened."""
        held, self._held = self._held, {}
        for file in held.values():
            file.close()
        _room.give(len(held))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep dumps of all processes from the folder inside, where the file system has locks; the
        checkpoint is in force when this begins. A dump that is running is a ``CheckpointError``."""
        locked = self._folder.lock()
        try:
            self.confirm()
            if not locked:
                raise CheckpointError(f"a dump into {self.path!r} is running; allowed: none")
            yield
        finally:
            if locked:
                self._folder.unlock()

    @contextmanager
    def sound(self, doing: str = "reading") -> Iterator[None]:
        """Raise the errors of the block as they are if the checkpoint is in force, else a
        ``ReplacedCheckpointError``."""
        try:
            with naming(doing, self.path):
                yield
        except ReplacedCheckpointError:
            raise
        except CheckpointError as error:
            if not self.in_force():
                raise was_replaced(self.path) from error
            raise

    def _names(
        self,
        tables: Iterable[tuple[str, str]] | None,
        shards: Sequence[int] | None,
        skip: Sequence[str] = (),
    ) -> Iterator[tuple[str, str, FileEntry]]:
        """(collection, name, entry) of the files of tables."""
        for collection, name in self.all_tables() if tables is None else tables:
            table = self.table(collection, name)
            if table.opt_args is not None and OPT_ARGS not in skip:
                yield collection, opt_args_name(table.stem), table.opt_args
            for shard in table.shards:
                if shards is None or shard.rank in shards:
                    for role, entry in shard.files.items():
                        if role not in skip:
                            yield collection, self._name(collection, table, shard, role), entry

    def _name(self, collection: str, table: TableEntry, shard: Shard, role: str) -> str:
        return table.file(shard, role)

    def folder_of(self, collection: str, *, create: bool = False) -> Directory:
        """The folder of a collection, where files can be that the manifest does not list.
        ``create``: make it if a commit that was interrupted has not."""
        name = self.manifest.collections[collection].folder
        if create:
            return self._folder.make_directory(name, exist_ok=True)
        return self._folder.directory(name)

    # ---- what there is ----

    def table(self, collection: str, name: str) -> TableEntry:
        """The entry of a table; one that is not there is a ``CheckpointError``."""
        if not self.has(collection, name):
            raise CheckpointError(f"the checkpoint has no table {name!r} in {collection!r}")
        return self.manifest.collections[collection].tables[name]

    def has(self, collection: str, name: str) -> bool:
        """Whether a table is in the checkpoint."""
        entry = self.manifest.collections.get(collection)
        return entry is not None and name in entry.tables

    def open_file(self, collection: str, table: TableEntry, shard: Shard, role: str) -> ReadFile:
        """The file of one role of a shard, as bytes; its length is as the manifest says."""
        name = self._name(collection, table, shard, role)
        with self.sound():
            return self._open(collection, name, shard.files[role])

    def _open(self, collection: str, name: str, entry: FileEntry) -> ReadFile:
        place = (self.manifest.collections[collection].folder, name)
        held = self._held.get(place)
        file = self._wait_for(*place) if held is None else held.again()
        try:
            if held is None:
                self.confirm()
            if file.size != entry.bytes:
                raise CorruptCheckpointError(
                    f"{file.name} has {file.size} bytes; the manifest says {entry.bytes}"
                )
        except BaseException:
            file.close()
            raise
        return file

    # ---- checking ----

    def verify(
        self,
        tables: Iterable[tuple[str, str]] | None = None,
        *,
        shards: Sequence[int] | None = None,
        skip: Sequence[str] = (),
        advance: Callable[[int], object] | None = None,
    ) -> None:
        """Read the files of ``tables`` (collection, name; ``None``: all) and of the given shards
        (``None``: all), but not of the roles ``skip``, and compare length and checksums. Raises
        ``CorruptCheckpointError``. ``advance`` is called with the bytes of each file."""
        for collection, name, entry in self._names(tables, shards, skip):
            with self.sound(), self._open(collection, name, entry) as file:
                size = BlockReader(file, entry, self.manifest.block_bytes).verify()
            if advance is not None:
                advance(size)

    def check(self, collection: str, name: str, entry: FileEntry) -> Iterator[CheckedBlock]:
        """Read a file of a collection and say of each block whether it is as it was written. A file
        that is missing or has another length is a ``CorruptCheckpointError``."""
        with self.sound(), self._open(collection, name, entry) as file:
            for block in BlockReader(file, entry, self.manifest.block_bytes).blocks():
                if block.problem is not None and not self.in_force():
                    raise was_replaced(self.path)
                yield block

    def all_tables(self) -> list[tuple[str, str]]:
        """(collection, name) of every table."""
        return [
            (path, name)
            for path, collection in self.manifest.collections.items()
            for name in collection.tables
        ]

    # ---- rows ----

    def rows(
        self,
        collection: str,
        table: TableEntry,
        shard: Shard,
        *,
        values: bool = True,
        state: bool = False,
        scores: bool = True,
        batch_bytes: int = BATCH_BYTES,
        buffers: int = 0,
    ) -> Iterator[StoredRows]:
        """The rows of a shard in the order of its files, a bounded number at a time.

        ``buffers`` above 0: use so many sets of tensors in turn, so that a batch is good only until
        so many further ones were asked for; faster than new memory for each.
        """
        roles = _roles(table, values=values, state=state, scores=scores)
        step = self._batch_rows(table, roles, batch_bytes)
        sets = [_Buffers(table, roles, min(step, shard.rows)) for _ in range(buffers)]
        with self._readers(collection, table, shard, roles) as readers:
            for number, begin in enumerate(range(0, shard.rows, step)):
                n = min(step, shard.rows - begin)
                into = sets[number % buffers] if buffers else _Buffers(table, roles, n)
                yield into.read(readers, n)

    def row(self, collection: str, table: TableEntry, shard: Shard, number: int) -> StoredRows:
        """One row of a shard with its state and scores, as far as they were saved; only the blocks
        that it is in are read."""
        roles = _roles(table, values=True, state=True, scores=True)
        with self._readers(collection, table, shard, roles) as readers:
            for role, reader in readers.items():
                reader.seek(number * table.row_bytes(role))
            return _Buffers(table, roles, 1).read(readers, 1)

    @contextmanager
    def _readers(
        self, collection: str, table: TableEntry, shard: Shard, roles: Sequence[str]
    ) -> Iterator[dict[str, BlockReader]]:
        """The files of these roles, open."""
        readers: dict[str, BlockReader] = {}
        try:
            with self.sound():
                for role in roles:
                    file = self.open_file(collection, table, shard, role)
                    readers[role] = BlockReader(file, shard.files[role], self.manifest.block_bytes)
                yield readers
        finally:
            for reader in readers.values():
                reader.close()

    def _batch_rows(self, table: TableEntry, roles: Sequence[str], batch_bytes: int) -> int:
        """Rows of a batch: whole blocks of the widest file where its rows divide a block, so that
        they are read to their place without a copy."""
        widths = [table.row_bytes(role) for role in roles]
        step = max(1, batch_bytes // sum(widths))
        rows_of_block, rest = divmod(self.manifest.block_bytes, max(widths))
        if rest == 0 and step > rows_of_block:
            step -= step % rows_of_block
        return step

    def counter(
        self, collection: str, table: TableEntry, shard: Shard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, counts), both int64 [n], of the shard's admission counter; empty if not saved."""
        count = shard.counter_rows or 0
        columns = []
        for role in ("counter_keys", "counter_frequencies"):
            if shard.counter_rows is None:
                columns.append(torch.empty(0, dtype=torch.int64, device="cpu"))
                continue
            with self.sound(), self.open_file(collection, table, shard, role) as file:
                reader = BlockReader(file, shard.files[role], self.manifest.block_bytes)
                columns.append(reader.read((count,), torch.int64))
        return columns[0], columns[1]
