"""Writing a checkpoint from sources of rows, over all ranks, all or nothing."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynamicemb.checkpoint.blocks import BlockWriter
from dynamicemb.checkpoint.files import Directory
from dynamicemb.checkpoint.manifest import (
    BLOCK_BYTES,
    STAGING_PREFIX,
    CollectionEntry,
    FileEntry,
    Manifest,
    Shard,
    TableEntry,
)
from dynamicemb.checkpoint.names import distinct_stems, file_name, opt_args_name
from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.scores import to_file, uses_clock
from dynamicemb.checkpoint.target import Target, naming
from dynamicemb.checkpoint.threads import one_thread_for_files
from dynamicemb.errors import InvalidArgumentError
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import ScoreStrategy
from dynamicemb.routing import Routing
from dynamicemb.table.rows import Progress, Rows

#: Batches that wait for the disk while the next one is made.
_IN_FLIGHT = 2


@dataclass(frozen=True)
class TableSource:
    """One table as this rank writes it.

    batches: gives the rows, on the CPU, embeddings in the table's dtype; called once, in the
        thread that writes the checkpoint. rows: how many to expect, for the progress bar.
    clock: the table's reading at the dump, for ages; any number where no score is a clock's.
    routing: this rank's; ``None`` if the table is not spread over ranks.
    counter: (ids, counts) of the admission counter, to be saved; ``None``: not saved.
    opt_args: hyper-parameters for the JSON file beside the rows.
    extra: further files, by role: what to write, asked for after the rows.
    """

    collection: str
    name: str
    dim: int
    dtype: torch.dtype
    value_dtype: torch.dtype
    strategy: ScoreStrategy
    scores: bool
    state: bool
    optimizer: Optimizer
    routing: Routing | None
    clock: int
    progress: Progress
    options: Mapping[str, Any]
    opt_args: Mapping[str, Any]
    rows: int
    batches: Callable[[], Iterable[Rows]]
    counter: tuple[torch.Tensor, torch.Tensor] | None = None
    extra: Mapping[str, Callable[[], Iterable[torch.Tensor] | None]] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all files together."""
        words = 2 if isinstance(self.strategy, tuple) else 1
        size = 8 + self.dim * self.value_dtype.itemsize
        size += 8 * words if self.scores else 0
        return size + (4 * self.optimizer.state_dim(self.dim) if self.state else 0)


def write_checkpoint(
    path: str | os.PathLike[str],
    sources: Sequence[TableSource],
    ranks: Ranks,
    *,
    allow_overwrite: bool = False,
    extra: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> str:
    """Write the tables of all ranks to the folder ``path`` and commit them together.

    Every rank calls it, with sources for the same tables in the same order. Returns the
    checkpoint's id. ``extra`` (JSON) goes into the manifest. ``progress``: show a bar; ``None``:
    on rank 0 if standard error is a terminal. Raises on all ranks if one fails; the checkpoint that
    was at ``path`` is then still in force (only if the last step, making the commit durable, fails,
    is it the new one).
    """
    path = os.path.abspath(os.fspath(path))
    names = [(one.collection, one.name) for one in sources]
    _agree_on(ranks, (path, names, allow_overwrite))
    target: Target | None = None
    identity = ""

    def begin() -> str:
        nonlocal target
        with naming("dumping to", path):
            target = Target(path, allow_overwrite=allow_overwrite)
            fresh = secrets.token_hex(16)
            target.begin(fresh, _layout(sources)[0].values())
        return fresh

    try:
        identity = ranks.first(begin)
        shown = progress if ranks.rank == 0 else False
        place = (ranks.rank, ranks.size)
        parts = ranks.together(lambda: _write_shards(path, identity, sources, place, shown))
        manifest = _manifest(identity, sources, parts, ranks.size, extra or {})

        def commit() -> None:
            assert target is not None
            with naming("committing", path):
                target.commit(manifest)

        ranks.first(commit)
    except BaseException:
        if target is not None and identity:
            target.abandon(identity)
        raise
    finally:
        if target is not None:
            target.close()
    return identity


def write_shards(
    path: str | os.PathLike[str],
    shards: Sequence[Sequence[TableSource]],
    *,
    progress: bool | None = None,
) -> str:
    """Write a checkpoint of ``len(shards)`` ranks from this process alone: ``shards[r]`` are the
    tables as rank r writes them, the same ones in the same order. ``path`` must be empty, or not
    there. Returns the checkpoint's id. All or nothing, as :func:`write_checkpoint`."""
    path = os.path.abspath(os.fspath(path))
    identity = secrets.token_hex(16)
    with naming("writing", path), contextlib.closing(Target(path, allow_overwrite=False)) as target:
        try:
            target.begin(identity, _layout(shards[0])[0].values())
            parts = [
                _write_shards(path, identity, sources, (rank, len(shards)), progress)
                for rank, sources in enumerate(shards)
            ]
            target.commit(_manifest(identity, shards[0], parts, len(shards), {}))
        except BaseException:
            target.abandon(identity)
            raise
    return identity


def _agree_on(ranks: Ranks, what: Any) -> None:
    for rank, other in enumerate(ranks.gather(what)):
        if other != what:
            raise InvalidArgumentError(
                f"rank {rank} dumps {str(other)[:300]} and rank {ranks.rank} {str(what)[:300]}; "
                "allowed: the same path, tables and options on all ranks"
            )


@dataclass(frozen=True)
class _Part:
    """What one rank wrote of one table."""

    shard: Shard
    opt_args: FileEntry | None


def _write_shards(
    path: str,
    identity: str,
    sources: Sequence[TableSource],
    place: tuple[int, int],
    shown: bool | None,
) -> list[_Part]:
    """Write the files of one rank, ``place``: its number and that of all."""
    folders, stems = _layout(sources)
    parts = []
    total = sum(one.rows * one.row_bytes for one in sources)
    with (
        naming("dumping to", path),
        one_thread_for_files(),
        Directory.open(os.path.join(path, STAGING_PREFIX + identity)) as staging,
        ThreadPoolExecutor(1, thread_name_prefix="dynamicemb-dump") as disk,
        ThreadPoolExecutor(1, thread_name_prefix="dynamicemb-sync") as syncer,
        ProgressBar("dump", total, shown=shown) as bar,
        ExitStack() as open_folders,
    ):
        inside: dict[str, Directory] = {}
        for collection, folder in folders.items():
            made = staging.make_directory(folder, exist_ok=True)
            inside[collection] = open_folders.enter_context(made)
        for one in sources:
            stem = stems[one.collection][one.name]
            writer = _ShardWriter(inside[one.collection], stem, one, place, disk, syncer, bar)
            parts.append(writer.write(identity))
        for folder_handle in inside.values():
            folder_handle.sync()
        staging.sync()
    return parts


def _layout(sources: Sequence[TableSource]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Folder of every collection, and stem of every table in it."""
    folders = distinct_stems(one.collection for one in sources)
    stems = {
        collection: distinct_stems(one.name for one in sources if one.collection == collection)
        for collection in folders
    }
    return folders, stems


class _ShardWriter:
    """Writes one table of one rank. Rows are made in this thread and go to disk in another."""

    def __init__(
        self,
        folder: Directory,
        stem: str,
        source: TableSource,
        place: tuple[int, int],
        disk: ThreadPoolExecutor,
        syncer: ThreadPoolExecutor,
        bar: ProgressBar,
    ) -> None:
        self._folder = folder
        self._stem = stem
        self._source = source
        self._rank, self._world_size = place
        self._disk = disk
        self._syncer = syncer
        self._bar = bar
        self._rows = 0

    def write(self, identity: str) -> _Part:
        source = self._source
        roles = ["keys", "values"]
        roles += ["scores"] if source.scores else []
        roles += ["opt_values"] if source.state else []
        files = self._write_files(roles, self._row_pieces())
        if source.counter is not None:
            ids, counts = source.counter
            counter = [{"counter_keys": ids, "counter_frequencies": counts}]
            files |= self._write_files(["counter_keys", "counter_frequencies"], counter)
        for role, content in source.extra.items():
            pieces = content()
            if pieces is not None:
                files |= self._write_files([role], _under(role, pieces))
        shard = Shard(
            checkpoint=identity,
            rank=self._rank,
            owner=None if source.routing is None else source.routing.rank,
            rows=self._rows,
            counter_rows=None if source.counter is None else len(source.counter[0]),
            clock=source.clock if uses_clock(source.strategy) else None,
            progress=source.progress,
            files=files,
        )
        return _Part(shard, self._write_opt_args() if self._rank == 0 else None)

    def _row_pieces(self) -> Iterable[dict[str, torch.Tensor]]:
        source = self._source
        for rows in source.batches():
            self._rows += len(rows)
            pieces = {"keys": rows.ids, "values": rows.embeddings.to(source.value_dtype)}
            if source.scores:
                pieces["scores"] = to_file(rows.scores, source.strategy, source.clock)
            if source.state:
                pieces["opt_values"] = rows.state
            yield pieces

    def _write_files(
        self, roles: Sequence[str], batches: Iterable[dict[str, torch.Tensor]]
    ) -> dict[str, FileEntry]:
        """Stream the pieces of every role to its file; the files' entries."""
        writers: dict[str, BlockWriter] = {}
        waiting: list[Future[None]] = []

        def put(pieces: dict[str, torch.Tensor]) -> None:
            for role, piece in pieces.items():
                writers[role].write(piece)
                self._bar.add(piece.numel() * piece.element_size())

        try:
            for role in roles:
                name = file_name(self._stem, role, self._rank, self._world_size)
                writers[role] = BlockWriter(self._folder.create(name), syncer=self._syncer)
            for pieces in batches:
                waiting.append(self._disk.submit(put, pieces))
                if len(waiting) > _IN_FLIGHT:
                    waiting.pop(0).result()
            for one in waiting:
                one.result()
            return {role: self._disk.submit(writers[role].finish).result() for role in roles}
        finally:
            for future in waiting:  # nothing may write to a file that is closed
                future.cancel()
            self._disk.submit(lambda: None).result()
            for writer in writers.values():
                writer.close()

    def _write_opt_args(self) -> FileEntry:
        text = json.dumps(dict(self._source.opt_args), indent=4).encode()
        with self._folder.create(opt_args_name(self._stem)) as file:
            writer = BlockWriter(file)
            writer.write(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            return writer.finish()


def _under(role: str, pieces: Iterable[torch.Tensor]) -> Iterable[dict[str, torch.Tensor]]:
    return ({role: piece} for piece in pieces)


def _manifest(
    identity: str,
    sources: Sequence[TableSource],
    parts: Sequence[Sequence[_Part]],
    world_size: int,
    extra: Mapping[str, Any],
) -> Manifest:
    from dynamicemb import __version__

    folders, stems = _layout(sources)
    collections = {
        collection: CollectionEntry(collection, folder, {})
        for collection, folder in folders.items()
    }
    for number, one in enumerate(sources):
        collections[one.collection].tables[one.name] = TableEntry(
            name=one.name,
            stem=stems[one.collection][one.name],
            dim=one.dim,
            dtype=one.dtype,
            value_dtype=one.value_dtype,
            strategy=one.strategy,
            scores=one.scores,
            state=one.state,
            routing=None if one.routing is None else replace(one.routing, rank=0),
            optimizer=one.optimizer,
            options=one.options,
            opt_args=parts[0][number].opt_args,
            shards=tuple(part[number].shard for part in parts),
        )
    return Manifest(
        id=identity,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        library=__version__,
        world_size=world_size,
        block_bytes=BLOCK_BYTES,
        collections=collections,
        extra=extra,
    )
