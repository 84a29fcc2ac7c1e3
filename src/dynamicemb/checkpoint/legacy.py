"""Checkpoints of older layouts, which have no manifest: what they do not say is taken from the
model, and nothing but the lengths of their files can be checked.

Per-rank files: as this library's, see docs/checkpoint_format.md. Single files, older still:
``<table>_keys``, ``<table>_values`` (each row followed by its optimizer state, if that was saved)
and ``<table>_scores``.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynamicemb.checkpoint.blocks import BlockReader
from dynamicemb.checkpoint.dump import routing_of
from dynamicemb.checkpoint.files import Directory, ReadFile
from dynamicemb.checkpoint.json_object import SMALL, parsed, shortened
from dynamicemb.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    CollectionEntry,
    FileEntry,
    Manifest,
    Shard,
    TableEntry,
)
from dynamicemb.checkpoint.names import ROLES, escape, file_name, opt_args_name
from dynamicemb.checkpoint.opt_args import evict_strategy_text, optimizer_from_json
from dynamicemb.checkpoint.reader import BATCH_BYTES, CheckpointReader, StoredRows
from dynamicemb.checkpoint.replaced import was_replaced
from dynamicemb.checkpoint.scores import strategy_names
from dynamicemb.checkpoint.target import naming, open_manifest
from dynamicemb.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ReplacedCheckpointError,
)
from dynamicemb.nn.module import DynamicModule
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import ScoreStrategy
from dynamicemb.routing import Routing
from dynamicemb.table import Progress, Table


@dataclass(frozen=True)
class Chosen:
    """A table of the model that is to be loaded."""

    collection: str
    module: DynamicModule
    table: Table


@dataclass(frozen=True)
class Expected:
    """A table, with what files of older layouts do not say of it. ``routing``: how its ids are
    spread now, which says the blocks of "continuous" ones; ``None`` if that is not known."""

    collection: str
    name: str
    dim: int
    dtype: torch.dtype
    strategy: ScoreStrategy
    optimizer: Optimizer
    progress: Progress
    routing: Routing | None

    @staticmethod
    def of(chosen: Chosen) -> Expected:
        """As a table of a model says it."""
        table = chosen.table
        return Expected(
            collection=chosen.collection,
            name=table.name,
            dim=table.dim,
            dtype=table.dtype,
            strategy=table.options.score_strategy,
            optimizer=table.optimizer,
            progress=table.progress(),
            routing=routing_of(chosen.module, table),
        )


def open_legacy(path: str, chosen: Sequence[Chosen]) -> LegacyReader | None:
    """A reader of what ``path`` has of the chosen tables; ``None`` if that is nothing."""
    reader = open_expected(path, [Expected.of(one) for one in chosen])
    check_no_manifest(path, reader)
    if reader is not None:
        warnings.warn(
            f"the checkpoint in {path!r} is of an older layout, without checksums: damage to its "
            "files cannot be seen",
            UserWarning,
            stacklevel=5,
        )
    return reader


def check_no_manifest(path: str, reader: LegacyReader | None) -> None:
    """Raise ``ReplacedCheckpointError``, with ``reader`` closed, if the folder ``path``, which had
    no manifest before ``reader`` was opened, has got one."""
    if os.path.lexists(os.path.join(path, MANIFEST_NAME)):
        if reader is not None:
            reader.close()
        raise was_replaced(path)


def open_expected(path: str, tables: Sequence[Expected]) -> LegacyReader | None:
    """A reader of what ``path``, a folder that was seen a moment ago, has of the tables; ``None``
    if that is nothing."""
    try:
        folder = Directory.open(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise was_replaced(path) from error
    except OSError as error:
        raise CheckpointError(f"reading {path!r} failed: {error}") from error
    marker = reader = None
    try:
        with naming("reading", path):
            marker = open_manifest(folder)  # mostly there is none; a dump may write one meanwhile
            reader = _find(folder, tables, marker)
            if reader is None:
                _check_in_force(folder, marker, path)
    except ReplacedCheckpointError:
        raise
    except (CheckpointError, InvalidArgumentError) as error:
        _check_in_force(folder, marker, path, error)
        raise
    finally:
        if reader is None:
            if marker is not None:
                marker.close()
            folder.close()
    return reader


def _check_in_force(
    folder: Directory, marker: ReadFile | None, path: str, error: Exception | None = None
) -> None:
    """Raise ``ReplacedCheckpointError`` unless ``folder`` is still at ``path`` and has the manifest
    ``marker``."""
    with naming("reading", path):
        if folder.holds(MANIFEST_NAME, marker) and folder.is_at(path):
            return
    raise was_replaced(path) from error


def _find(
    folder: Directory, chosen: Sequence[Expected], marker: ReadFile | None
) -> LegacyReader | None:
    collections: dict[str, CollectionEntry] = {}
    names: dict[tuple[str, str, int, str], str] = {}
    for one in chosen:
        for place in dict.fromkeys((one.collection, one.collection.rpartition(".")[2])):
            if not place or "/" in place or not folder.is_directory(place):
                continue
            with folder.directory(place) as inside:
                entry = _Old(inside, one).entry(names)
            if entry is None:
                continue
            found = collections.setdefault(
                one.collection, CollectionEntry(one.collection, place, {})
            )
            found.tables[entry.name] = entry
            break
    if not collections:
        return None
    size = max(len(t.shards) for c in collections.values() for t in c.tables.values())
    manifest = Manifest("", "", "", size, BLOCK_BYTES, collections)
    return LegacyReader(folder, manifest, marker, names)


class LegacyReader(CheckpointReader):
    """Rows of an older layout. Ids that upstream stored relative to a rank's block of a
    "continuous" table become whole again."""

    def __init__(
        self,
        folder: Directory,
        manifest: Manifest,
        marker: ReadFile | None,
        names: dict[tuple[str, str, int, str], str],
    ) -> None:
        super().__init__(folder, manifest, marker)
        self._stored = names

    def _name(self, collection: str, table: TableEntry, shard: Shard, role: str) -> str:
        return self._stored[collection, table.name, shard.rank, role]

    def verify(self, *_: Any, **__: Any) -> None:
        """Nothing to compare with; lengths were checked when the files were found."""

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
        joined = "opt_values" not in shard.files and table.state
        found = (
            self._joined_rows(collection, table, shard, scores, batch_bytes)
            if joined
            else super().rows(
                collection,
                table,
                shard,
                values=values,
                state=state,
                scores=scores,
                batch_bytes=batch_bytes,
                buffers=buffers,
            )
        )
        for one in found:
            one.ids = _whole_ids(one.ids, table.routing, shard.rank)
            yield one

    def _joined_rows(
        self, collection: str, table: TableEntry, shard: Shard, scores: bool, batch_bytes: int
    ) -> Iterator[StoredRows]:
        """Of single files with state: a row is the embedding and then its state."""
        width = table.dim + table.optimizer.state_dim(table.dim)
        with (
            naming("reading", self.path),
            self.open_file(collection, table, shard, "keys") as keys,
            self.open_file(collection, table, shard, "values") as values,
        ):
            ids = BlockReader(keys, shard.files["keys"])
            numbers = BlockReader(values, shard.files["values"])
            words = None
            if scores and table.scores:
                file = self.open_file(collection, table, shard, "scores")
                words = BlockReader(file, shard.files["scores"])
            try:
                step = max(1, batch_bytes // (4 * width + 16))
                for begin in range(0, shard.rows, step):
                    n = min(step, shard.rows - begin)
                    some = ids.read((n,), torch.int64)
                    both = numbers.read((n, width), torch.float32)
                    yield StoredRows(
                        some,
                        both[:, : table.dim].contiguous(),
                        both[:, table.dim :].contiguous(),
                        None if words is None else words.read((n,), torch.int64),
                    )
            finally:
                if words is not None:
                    words.close()


def _whole_ids(ids: torch.Tensor, routing: Routing | None, rank: int) -> torch.Tensor:
    """Undo what upstream does to ids of a "continuous" table: those below ``block * world_size``
    were stored as ``id mod block``, the others as ``id div world_size``, which is not below
    ``block``."""
    if routing is None or routing.block is None or routing.world_size == 1:
        return ids
    inside = (ids >= 0) & (ids < routing.block)
    return torch.where(inside, ids + rank * routing.block, ids * routing.world_size + rank)


def read_opt_args(folder: Directory, stem: str) -> dict[str, Any]:
    """The hyper-parameters beside the files of a table; empty if there are none."""
    name = opt_args_name(stem)
    if not folder.exists(name):
        return {}
    with folder.read(name) as file:
        try:
            content = parsed(file.read_all(SMALL))
        except ValueError as error:
            raise CorruptCheckpointError(f"{file.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{file.name} is {shortened(content)}; allowed: an object")
    return content


class _Old:
    """Looks for the files of one table in one folder."""

    def __init__(self, folder: Directory, table: Expected) -> None:
        self._folder = folder
        self._table = table
        self._files = folder.list()

    def entry(self, names: dict[tuple[str, str, int, str], str]) -> TableEntry | None:
        """The table as a manifest would have it, with its files in ``names``; ``None`` if it has no
        files here."""
        for stem in dict.fromkeys((self._table.name, escape(self._table.name))):
            pattern = re.escape(stem) + r"_emb_keys\.rank_(\d+)\.world_size_(\d+)"
            found = [m for m in (re.fullmatch(pattern, f) for f in self._files) if m is not None]
            if found:
                sizes = {int(m[2]) for m in found}
                ranks = {int(m[1]) for m in found}
                size = max(sizes)
                if len(sizes) > 1 or ranks != set(range(size)):
                    raise CorruptCheckpointError(
                        f"{self._folder.name} has {stem}_emb_keys of ranks {sorted(ranks)} and "
                        f"world sizes {sorted(sizes)}; allowed: all ranks of one"
                    )
                shards = [self._per_rank(stem, rank, size) for rank in range(size)]
                return self._entry(stem, shards, names)
            if f"{stem}_keys" in self._files and f"{stem}_values" in self._files:
                single = {"keys": f"{stem}_keys", "values": f"{stem}_values"}
                if f"{stem}_scores" in self._files:
                    single["scores"] = f"{stem}_scores"
                return self._entry(stem, [single], names)
        return None

    def _per_rank(self, stem: str, rank: int, size: int) -> dict[str, str]:
        """The files of one rank, by role."""
        files = {role: file_name(stem, role, rank, size) for role in ROLES}
        if files["opt_values"] not in self._files:  # as one version called it
            files["opt_values"] = f"{stem}_opt_values.rank_{rank}.world_size_{size}"
        return {role: name for role, name in files.items() if name in self._files}

    def _entry(
        self,
        stem: str,
        shards: list[dict[str, str]],
        names: dict[tuple[str, str, int, str], str],
    ) -> TableEntry:
        table = self._table
        content = self._opt_args(stem)
        optimizer = table.optimizer
        if "opt_type" in content:
            optimizer = optimizer_from_json(content, opt_args_name(stem))
        sizes = [{role: self._size(name) for role, name in files.items()} for files in shards]
        dtype = torch.float32
        scores = all("scores" in files for files in shards)
        state = self._has_state(sizes, optimizer)
        progress = replace(
            table.progress,
            step=_number(content, "step_score", table.progress.step),
            iteration=_number(content, "iters", table.progress.iteration),
        )
        entries = []
        for rank, size in enumerate(sizes):
            self._check(rank, size, optimizer, scores, state)
            for role, name in shards[rank].items():
                names[table.collection, table.name, rank, role] = name
            counted = "counter_keys" in size and "counter_frequencies" in size
            entries.append(
                Shard(
                    checkpoint="",
                    rank=rank,
                    owner=None,  # rows are always chosen by their ids
                    rows=size["keys"] // 8,
                    counter_rows=size["counter_keys"] // 8 if counted else None,
                    clock=None,
                    progress=progress,
                    files={role: FileEntry(count, None) for role, count in size.items()},
                )
            )
        return TableEntry(
            name=table.name,
            stem=stem,
            dim=table.dim,
            dtype=table.dtype,
            value_dtype=dtype,
            strategy=table.strategy,
            scores=scores,
            state=state,
            routing=self._routing(content, len(shards)),
            optimizer=optimizer,
            options={},
            opt_args=None,
            shards=tuple(entries),
        )

    def _size(self, name: str) -> int:
        with self._folder.read(name) as file:
            return file.size

    def _opt_args(self, stem: str) -> dict[str, Any]:
        content = read_opt_args(self._folder, stem)
        expected = evict_strategy_text(self._table.strategy)
        found = content.get("evict_strategy", expected)
        if found != expected:
            raise InvalidArgumentError(
                f"the checkpoint of table {self._table.name!r} was written with {found}; allowed: "
                f"{expected}, which follows from the table's score_strategy"
            )
        return content

    def _has_state(self, sizes: list[dict[str, int]], optimizer: Optimizer) -> bool:
        state_dim = optimizer.state_dim(self._table.dim)
        if all("opt_values" in size for size in sizes):
            return all(size["opt_values"] == size["keys"] // 8 * 4 * state_dim for size in sizes)
        width = 4 * (self._table.dim + state_dim)
        return all(size["values"] == size["keys"] // 8 * width for size in sizes)

    def _check(
        self, rank: int, size: dict[str, int], optimizer: Optimizer, scores: bool, state: bool
    ) -> None:
        """The lengths of one shard's files agree with each other and with the table."""
        table = self._table
        rows, rest = divmod(size["keys"], 8)
        width = table.dim
        if state and "opt_values" not in size:
            width += optimizer.state_dim(table.dim)
        expected = {"values": 4 * width * rows}
        if scores:
            expected["scores"] = 8 * len(strategy_names(table.strategy)) * rows
        if "counter_keys" in size:
            expected["counter_frequencies"] = size["counter_keys"]
        for role, count in expected.items():
            if rest or size.get(role) != count:
                raise CorruptCheckpointError(
                    f"the files of rank {rank} of table {table.name!r} in {self._folder.name} do "
                    f"not belong together or have another dim: {size['keys']} bytes of keys and "
                    f"{size.get(role)} of {role}; needed: {count}"
                )

    def _routing(self, content: dict[str, Any], world_size: int) -> Routing | None:
        """How upstream spread the ids."""
        if world_size == 1:
            return Routing.single()
        kind = content.get("dist_type", "roundrobin")
        if kind != "continuous":
            return Routing(kind, world_size, 0)
        present = self._table.routing
        if present is None or present.world_size != world_size or present.block is None:
            raise InvalidArgumentError(
                f"table {self._table.name!r} was written with dist_type 'continuous' on "
                f"{world_size} ranks, without its block of ids; allowed: a table with the same "
                "dist_type, number of ranks and num_embeddings"
            )
        return Routing("continuous", world_size, 0, present.block)


def _number(content: dict[str, Any], name: str, default: int) -> int:
    value = content.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64:
        return value
    return default
