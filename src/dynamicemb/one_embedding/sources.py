"""The rows of a snapshot in one folder, whichever layout it has."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dynamicemb.errors import CorruptStoreError, StoreError
from dynamicemb.one_embedding import folders
from dynamicemb.one_embedding.oneflow_layout import OneFlowTable
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.tiers import SsdStore

#: ids int64 [n], values float32 [n, storage_dim], scores int64 [n].
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

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


def note_of(folder: str, stored: str) -> dict[str, Any]:
    """What was noted with a snapshot in a rank's folder (csrc/store_manifest.h has the format)."""
    file = os.path.join(folders.rows_folder(folder), "snapshots", stored)
    try:
        with open(file, encoding="ascii") as opened:
            lines = opened.read().splitlines()
        text = next(line for line in lines if line.startswith("note "))
        note = json.loads(bytes.fromhex(text[5:]))
        assert isinstance(note, dict)
        return note
    except OSError as error:
        raise StoreError(error.errno, f"{error.strerror}: {file}", file) from error
    except (StopIteration, ValueError, AssertionError) as error:
        raise CorruptStoreError(None, f"{file} has no note of an embedding") from error


class Source:
    """A snapshot in one folder, open for reading. Use as a context manager.

    ``stamp`` ``None``: the folder has OneFlow's layout. ``note``: what was noted with the snapshot.
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
    ) -> None:
        self.note: dict[str, Any] = {}
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
        self.note = note_of(folder, stored)
        self._store = open_rows(folder, storage_dim, physical_block_size, stored)

    def batches(self, limit: int = 65536) -> Iterator[Batch]:
        """Every row once, at most ``limit`` at a time."""
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
