"""Reading a checkpoint: its manifest, its checksums, its rows in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from dynamicemb.checkpoint.blocks import BlockReader, CheckedBlock
from dynamicemb.checkpoint.files import Directory, ReadFile
from dynamicemb.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Shard,
    TableEntry,
)
from dynamicemb.checkpoint.names import opt_args_name
from dynamicemb.checkpoint.target import CheckpointFiles, naming, read_manifest
from dynamicemb.errors import CheckpointError, CorruptCheckpointError

#: Bytes of rows that are read at a time.
BATCH_BYTES = 16 * 2**20


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
        found = {role: readers[role].fill(some[:rows]) for role, some in self._tensors.items()}
        return StoredRows(
            found["keys"], found.get("values"), found.get("opt_values"), found.get("scores")
        )


class CheckpointReader:
    """A committed checkpoint, open for reading. Use as a context manager.

    ``manifest`` has been checked when the object exists; the tables' files have not: call
    :meth:`verify` before using what they hold. :meth:`rows` checks each block again as it reads.
    """

    def __init__(self, folder: Directory, manifest: Manifest) -> None:
        self.path = folder.name
        self.manifest = manifest
        self._folder = folder
        self._files = CheckpointFiles(folder, manifest.id)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> CheckpointReader:
        """The checkpoint in the folder ``path``. Raises ``CheckpointError`` if there is none, and
        ``CorruptCheckpointError`` if its manifest is not as it was written."""
        path = os.fspath(path)
        try:
            with naming("reading", path):
                folder = Directory.open(path)
        except CheckpointError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                raise CheckpointError(f"path is {path!r}; allowed: a folder that exists") from error
            raise
        try:
            with naming("reading", path):
                manifest = read_manifest(folder)
                if manifest is None:
                    raise NoCheckpointError(f"there is no committed checkpoint in {path!r}")
                return cls(folder, manifest)
        except BaseException:
            folder.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()
        self._folder.close()

    # ---- what there is ----

    def table(self, collection: str, name: str) -> TableEntry:
        """The entry of a table; one that is not there is a ``CheckpointError``."""
        if not self.has(collection, name):
            raise CheckpointError(f"the checkpoint has no table {name!r} in {collection!r}")
        return self.manifest.collections[collection].tables[name]

    def has(self, collection: str, name: str) -> bool:
        """Whether a table is in the checkpoint."""
        found = self.manifest.collections.get(collection)
        return found is not None and name in found.tables

    def open_file(self, collection: str, table: TableEntry, shard: Shard, role: str) -> ReadFile:
        """The file of one role of a shard, as bytes; its length is as the manifest says."""
        return self._open(collection, table.file(shard, role), shard.files[role])

    def _open(self, collection: str, name: str, entry: FileEntry) -> ReadFile:
        file = self._files.open(self.manifest.collections[collection].folder, name)
        if file.size != entry.bytes:
            file.close()
            raise CorruptCheckpointError(
                f"{file.name} has {file.size} bytes; the manifest says {entry.bytes}"
            )
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
        for collection, name in self.all_tables() if tables is None else tables:
            table = self.table(collection, name)
            if table.opt_args is not None:
                self._verify(collection, opt_args_name(table.stem), table.opt_args, advance)
            for shard in table.shards:
                if shards is not None and shard.rank not in shards:
                    continue
                for role, entry in shard.files.items():
                    if role in skip:
                        continue
                    self._verify(collection, table.file(shard, role), entry, advance)

    def _verify(
        self,
        collection: str,
        name: str,
        entry: FileEntry,
        advance: Callable[[int], object] | None,
    ) -> None:
        with naming("reading", self.path), self._open(collection, name, entry) as file:
            size = BlockReader(file, entry, self.manifest.block_bytes).verify()
        if advance is not None:
            advance(size)

    def check(self, collection: str, name: str, entry: FileEntry) -> Iterator[CheckedBlock]:
        """Read a file of a collection and say of each block whether it is as it was written. A file
        that is missing or has another length is a ``CorruptCheckpointError``."""
        with naming("reading", self.path), self._open(collection, name, entry) as file:
            yield from BlockReader(file, entry, self.manifest.block_bytes).blocks()

    def all_tables(self) -> list[tuple[str, str]]:
        """(collection, name) of every table."""
        return [
            (path, name) for path, one in self.manifest.collections.items() for name in one.tables
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
            with naming("reading", self.path):
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
        found = []
        for role in ("counter_keys", "counter_frequencies"):
            if shard.counter_rows is None:
                found.append(torch.empty(0, dtype=torch.int64, device="cpu"))
                continue
            with (
                naming("reading", self.path),
                self.open_file(collection, table, shard, role) as file,
            ):
                reader = BlockReader(file, shard.files[role], self.manifest.block_bytes)
                found.append(reader.read((count,), torch.int64))
        return found[0], found[1]
