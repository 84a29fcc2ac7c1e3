"""Folders of OneEmbedding: of this library, and of OneFlow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from dynamicemb.cli.contents.base import (
    EVERYTHING,
    NO_PROGRESS,
    Batch,
    Columns,
    Content,
    Damage,
    Part,
    TableInfo,
)
from dynamicemb.cli.contents.meta import Described
from dynamicemb.cli.output import bytes_on_disk
from dynamicemb.errors import (
    CorruptStoreError,
    DynamicEmbError,
    InvalidArgumentError,
    ReplacedCheckpointError,
    StoreError,
)
from dynamicemb.one_embedding import folders, oneflow_layout
from dynamicemb.one_embedding.sources import (
    Source,
    note_of,
    snapshot_file,
    snapshot_text,
    unless_dropped,
)
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.routing import Routing
from dynamicemb.table.rows import Progress

_ROWS = re.compile(r"^rows (\d+) (\d+) (\d+)$", re.MULTILINE)
_KEY_TYPES = {"int64": torch.int64, "int32": torch.int32, "uint64": torch.uint64}
_KEY_TYPES["uint32"] = torch.uint32


def rank_folders(path: str) -> tuple[str, ...] | None:
    """The folders of the ranks in ``path``, which may be one of them itself; the largest set that
    has snapshots; ``None`` if there are none."""
    sets = [*folders.sets_of_folders(path), (path,)]
    for some in sorted(sets, key=len, reverse=True):
        if _snapshots(some):
            return some
    return None


def _snapshots(some: tuple[str, ...]) -> dict[str, int | None]:
    """``{name: stamp}`` of the snapshots that all folders have, newest last; ``None`` in OneFlow's
    layout."""
    ours = folders.complete([folders.saved_in(folder) for folder in some])
    found: dict[str, int | None] = {
        name: ours[name] for name in sorted(ours, key=lambda n: ours[n])
    }
    if found:
        return found
    names = oneflow_layout.snapshots(some[0])
    whole = (n for n in names if all(oneflow_layout.has_snapshot(one, n) for one in some))
    return dict.fromkeys(whole)


class OneEmbeddingContent(Content):
    """A snapshot, of all ranks. ``dim``: columns of the embedding, where the folder does not say
    how a row is divided; ``key_type``: of OneFlow's keys of 4 bytes, "uint32" or "int32"."""

    layout = "oneembedding"

    def __init__(
        self,
        path: str,
        some: tuple[str, ...],
        *,
        snapshot: str | None,
        dim: int | None,
        key_type: str | None,
    ) -> None:
        super().__init__(path)
        known = _snapshots(some)
        if snapshot is not None and snapshot not in known:
            raise InvalidArgumentError(
                f"{path} has no snapshot {snapshot!r}; it has {', '.join(known)}"
            )
        self.snapshot = list(known)[-1] if snapshot is None else snapshot
        self._stamp = known[self.snapshot]
        self._folders = some
        self.facts = {
            "snapshot": self.snapshot,
            "snapshots": list(known),
            "ranks": len(some),
        }
        try:
            self._note, self._floats, self._block, bytes_ = self._shape(key_type)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(error.errno, f"{error.strerror}: {error.filename}") from error
        said = Described(self._note)
        optimizer = said.optimizer or self._optimizer()
        told = self._note.get("embedding_dim")
        dim = told if isinstance(told, int) and 1 <= told <= self._floats else dim
        if dim is not None and dim > self._floats:
            raise InvalidArgumentError(f"--dim is {dim}; allowed: up to {self._floats}")
        if dim is None:
            dim = self._floats
            self.notes.append(
                f"the folder does not say how many of the {self._floats} floats of a row are "
                "optimizer state; all are read as the embedding (--dim says otherwise)"
            )
        state_dim = self._floats - dim
        if state_dim and (optimizer is None or optimizer.state_dim(dim) != state_dim):
            self.notes.append(
                "the optimizer state is left out: the folder does not say whose it is"
            )
            state_dim = 0
        self._dim, self._state_dim = dim, state_dim
        ranks = len(some)
        self.tables = [
            TableInfo(
                collection=said.text("collection", "model"),
                name=said.text("name", str(self._note.get("name") or _name_of(path))),
                dim=dim,
                dtype=said.dtype("dtype", torch.float32),
                value_dtype=said.dtype("value_dtype", torch.float32),
                strategy=None,
                optimizer=optimizer,
                state_dim=state_dim,
                routing=None if ranks == 1 else Routing("hash_roundrobin", ranks, 0),
                parts=tuple(
                    Part(rank, rows, progress=self._progress())
                    for rank, rows in enumerate(self._counts())
                ),
                bytes=bytes_,
                options=said.options,
            )
        ]
        if self._note.get("tables_in_keys"):
            self.notes.append("the upper 8 bits of an id are the number of its table")

    def _shape(self, key_type: str | None) -> tuple[dict[str, Any], int, int, int]:
        """(note, floats of a row, block size, bytes of all ranks)."""
        first = self._folders[0]
        if self._stamp is None:
            self.checksums = False
            numbers = {
                name: oneflow_layout.read_number(os.path.join(first, name))
                for name in ("KEY_SIZE", "VALUE_SIZE", "PHYSICAL_BLOCK_SIZE")
            }
            wide = numbers["KEY_SIZE"] == 8
            self._key_type = _KEY_TYPES[key_type or ("int64" if wide else "uint32")]
            if not wide and key_type is None:
                self.notes.append("keys have 4 bytes; read as uint32 (--key-type says otherwise)")
            size = sum(_bytes_in(folder) for folder in self._folders)
            return {}, numbers["VALUE_SIZE"] // 4, numbers["PHYSICAL_BLOCK_SIZE"], size
        self._key_type = torch.int64
        stored = folders.stored_name(self.snapshot, self._stamp)
        file = snapshot_file(first, stored)
        with unless_dropped(first, stored):
            found = _ROWS.search(snapshot_text(file))
            note = note_of(first, stored)
        if found is None:
            raise CorruptStoreError(None, f"{file} does not say how long a row is")
        size = sum(_bytes_in(folders.rows_folder(folder)) for folder in self._folders)
        return note, (int(found[1]) - 8) // 4, int(found[2]), size

    def _optimizer(self) -> Optimizer | None:
        kind = OptimizerKind.__members__.get(str(self._note.get("optimizer")))
        return None if kind is None else Optimizer(kind, OptimizerArgs())

    def _progress(self) -> Progress:
        said = self._note.get("progress")
        try:
            return Progress(**said) if isinstance(said, dict) else NO_PROGRESS
        except TypeError:
            return NO_PROGRESS

    def _source(self, place: int) -> Source:
        return Source(
            self._folders[place],
            self.snapshot,
            self._stamp,
            key_type=self._key_type,
            storage_dim=self._floats,
            physical_block_size=self._block,
        )

    def _counts(self) -> list[int]:
        counts = []
        for place in range(len(self._folders)):
            with self._source(place) as source:
                counts.append(source.size())
        return counts

    def batches(
        self, table: TableInfo, part: int | None = None, columns: Columns = EVERYTHING
    ) -> Iterator[Batch]:
        for place in range(len(self._folders)) if part is None else [part]:
            with self._source(place) as source:
                for ids, floats, _ in source.batches():
                    rows, state = floats[:, : self._dim], floats[:, self._dim :]
                    yield Batch(
                        ids,
                        rows.to(table.value_dtype).contiguous() if columns.values else None,
                        state.contiguous() if columns.state and self._state_dim else None,
                        None,
                    )

    def damages(self, table: TableInfo, *, skip_rows: bool) -> Iterator[Damage | int]:
        if skip_rows:
            return
        for place, folder in enumerate(self._folders):
            try:
                for batch in self.batches(table, place):
                    yield len(batch) * table.row_bytes()
            except ReplacedCheckpointError:
                raise
            except DynamicEmbError as error:
                yield Damage(str(error), folder, table.label)


def _name_of(path: str) -> str:
    return os.path.basename(os.path.abspath(path)) or "embedding"


def _bytes_in(folder: str) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a trainer tidies its store meanwhile
                total += bytes_on_disk(os.path.join(place, name))
    return total
