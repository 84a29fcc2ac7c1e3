"""The rows of a snapshot in one folder, whichever layout it has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dynamicemb.checkpoint.json_object import parsed
from dynamicemb.checkpoint.replaced import was_replaced
from dynamicemb.errors import CorruptStoreError, InvalidArgumentError, StoreError
from dynamicemb.one_embedding import folders
from dynamicemb.one_embedding.oneflow_layout import OneFlowTable
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.tiers import SsdStore

#: ids int64 [n], values float32 [n, storage_dim], scores int64 [n].
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: A snapshot's note, as hexadecimal digits, and the length of its file.
_NOTE = re.compile(r"^note ([0-9a-f]*)$", re.MULTILINE)
_LONGEST = 12 * 2**20
#: Part of a note that names no optimizer: the state is in OneFlow's order.
ONEFLOW_ORDER = {"order": "oneflow"}

_SIZES = {torch.int32: 4, torch.uint32: 4, torch.int64: 8, torch.uint64: 8}


def open_rows(
    folder: str, storage_dim: int, physical_block_size: int, snapshot: str | None = None
) -> SsdStore:
    """The store of a rank's folder, whose rows are ``storage_dim`` floats, whatever they mean; or
    one of its snapshots for reading alone."""
    options = DynamicEmbTableOptions(dim=storage_dim, max_capacity=1)
    return SsdStore(
        options,
        Optimizer(OptimizerKind.SGD, OptimizerArgs()),
        path=folders.rows_folder(folder),
        physical_block_size=physical_block_size,
        snapshot=snapshot,
    )


@contextmanager
def unless_dropped(folder: str, stored: str) -> Iterator[None]:
    """Turn a failure inside into ``ReplacedCheckpointError`` if the snapshot is gone: a trainer
    drops a snapshot when it takes another one of the same name."""
    file = snapshot_file(folder, stored)
    try:
        yield
    except StoreError as error:
        if os.path.exists(file):
            raise
        raise was_replaced(file) from error


def note_of(folder: str, stored: str) -> dict[str, Any]:
    """The note of a snapshot in a rank's folder (csrc/store_manifest.h has the format)."""
    file = snapshot_file(folder, stored)
    found = _NOTE.search(snapshot_text(file))
    try:
        note = None if found is None else parsed(bytes.fromhex(found[1]))
    except ValueError as error:
        raise CorruptStoreError(None, f"{file} has no note of an embedding") from error
    if not isinstance(note, dict):
        raise CorruptStoreError(None, f"{file} has no note of an embedding")
    return note


def snapshot_file(folder: str, stored: str) -> str:
    """The file of a snapshot in a rank's folder."""
    return os.path.join(folders.rows_folder(folder), "snapshots", stored)


def snapshot_text(file: str) -> str:
    """The text of a snapshot's file. Raises if it is too long to be one."""
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            text = opened.read(_LONGEST + 1)
    except OSError as error:
        raise StoreError(error.errno, f"{error.strerror}: {file}", file) from error
    if len(text) > _LONGEST:
        raise CorruptStoreError(None, f"{file} is too long; allowed: at most {_LONGEST} bytes")
    return text


def exchanged(values: torch.Tensor) -> torch.Tensor:
    """Rows of FTRL in the other order. OneFlow's order is weight, accumulator, z; ours is weight,
    z, accumulator."""
    weight, first, second = values.chunk(3, 1)
    return torch.cat([weight, second, first], 1)


class Source:
    """A snapshot in one folder, open for reading. Use as a context manager.

    ``stamp`` ``None``: the folder has OneFlow's layout. ``note``: what was noted with the snapshot.
    ``kind``: the optimizer of the state, if the note does not name it; ``None``: not known.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        stamp: int | None,
        *,
        key_type: torch.dtype,
        storage_dim: int,
        physical_block_size: int,
        kind: OptimizerKind | None = None,
    ) -> None:
        self.note: dict[str, Any] = {}
        self._folder, self._kind = folder, kind
        self._store: SsdStore | None = None
        self._name, self._key_type = name, key_type
        if stamp is None:
            self._table = OneFlowTable.open(
                folder,
                key_size=_SIZES[key_type],
                value_size=4 * storage_dim,
                physical_block=physical_block_size,
            )
            return
        stored = folders.stored_name(name, stamp)
        with unless_dropped(folder, stored):
            self.note = note_of(folder, stored)
            self._store = open_rows(folder, storage_dim, physical_block_size, stored)

    @property
    def says_optimizer(self) -> bool:
        """Whether the note names the optimizer of the state. If so, the order is ours."""
        return self.note.get("optimizer") is not None

    def batches(self, limit: int = 65536) -> Iterator[Batch]:
        """Yield every row once, at most ``limit`` at a time. State is in our order if its optimizer
        is known."""
        if self.says_optimizer or self._kind is not OptimizerKind.FTRL:
            yield from self._stored(limit)
            return
        of_oneflow = self._store is None or self.note.items() >= ONEFLOW_ORDER.items()
        for ids, values, scores in self._stored(limit):
            if of_oneflow:
                values = exchanged(values)
            negative = (values.chunk(3, 1)[2] < 0).any(1)
            if bool(negative.any()):
                order = "weight, accumulator, z" if of_oneflow else "weight, z, accumulator"
                raise InvalidArgumentError(
                    f"the row of id {int(ids[negative][0])} in {self._folder} has a negative "
                    f"accumulator; expected {order}, as the rows of FTRL are there. If it was "
                    "written by make_persistent_table_writer, write it again in OneFlow's order: "
                    "weight, accumulator, z"
                )
            yield ids, values, scores

    def _stored(self, limit: int) -> Iterator[Batch]:
        if self._store is not None:
            for rows in self._store.export(batch_size=limit):
                yield rows.ids, rows.embeddings, rows.scores
            return
        for keys, values in self._table.rows(self._name, limit=limit):
            ids = torch.from_numpy(as_ids(keys, self._key_type))
            floats = torch.from_numpy(values.view("<f4").astype(np.float32, copy=False))
            yield ids, floats, torch.zeros_like(ids)

    def size(self) -> int:
        """Rows, as the store or OneFlow's index says, without a look at them."""
        return len(self._store) if self._store is not None else self._table.count(self._name)

    def count(self) -> int:
        """Rows; reads and checks all of them."""
        return sum(len(ids) for ids, _, _ in self.batches())

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_ids(keys: np.ndarray, key_type: torch.dtype) -> np.ndarray:
    """int64 ids of keys of ``key_type``, given as integers of its width."""
    if key_type is torch.int32:
        return keys.view(np.int32).astype(np.int64)
    return keys.astype(np.uint64).view(np.int64)
