"""Tables on the disk without an embedding: read and written as NumPy arrays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dynamicemb.checkpoint.replaced import tried_again, was_replaced
from dynamicemb.errors import (
    StoreError,
    UsageError,
    check_choice,
    check_integer,
    check_path,
    wrong_type,
    wrong_value,
)
from dynamicemb.one_embedding import folders, oneflow_layout
from dynamicemb.one_embedding.keys import KEY_TYPES
from dynamicemb.one_embedding.sources import ONEFLOW_ORDER, Source, as_ids, exchanged, open_rows
from dynamicemb.optimizers import OptimizerKind
from dynamicemb.routing import Routing
from dynamicemb.table import Rows
from dynamicemb.tiers import SsdStore

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.uint64: np.dtype(np.uint64),
    torch.uint32: np.dtype(np.uint32),
    torch.float32: np.dtype(np.float32),
}
#: Rows of one batch of a reader, at most.
BATCH = 65536


def make_persistent_table_reader(
    paths: str | Sequence[str],
    snapshot_name: str,
    key_type: Any,
    value_type: Any,
    storage_dim: int,
    physical_block_size: int = 4096,
) -> PersistentTableReader:
    """Read a snapshot of tables on the disk.

    Args:
        paths: the folders, one per rank (``<persistent_path>/0-1`` and so on); of an embedding, of
            :func:`make_persistent_table_writer`, or of OneFlow.
        snapshot_name: its name.
        key_type: of the keys: int64, int32, uint64 or uint32, as a torch or NumPy type.
        value_type: of the values: float32.
        storage_dim: floats of a row: the embedding, then the optimizer's state, in OneFlow's order
            (of FTRL: accumulator, then z), which is also the order of a writer's rows.
        physical_block_size: 512 or 4096, as the tables were made with.

    Returns an iterator of (keys [n], values [n, storage_dim]), n at most 65,536, over the folders
    in the order of ``paths``; close it, or use it as a context manager. A missing snapshot is a
    ``StoreError``. Nothing is changed or locked: an embedding may have the folders open, and go on.
    If it takes the snapshot again before the first folder was opened, the reader reads the new one;
    if it does so later, the reader raises ``ReplacedCheckpointError``.
    """
    return PersistentTableReader(
        _Table.checked(paths, snapshot_name, key_type, value_type, storage_dim, physical_block_size)
    )


def make_persistent_table_writer(
    paths: str | Sequence[str],
    snapshot_name: str,
    key_type: Any,
    value_type: Any,
    storage_dim: int,
    physical_block_size: int = 4096,
) -> PersistentTableWriter:
    """Write a snapshot that ``load_snapshot`` of an embedding with as many ranks as ``paths``
    (``<persistent_path>/0-1`` and so on), or any other number, can load.

    The arguments are those of :func:`make_persistent_table_reader`. ``write(keys, values)`` takes
    arrays of just these types; of equal keys the last counts. The snapshot is there when the writer
    is closed, by ``close()`` or as a context manager, and holds what was written by it alone. If an
    error leaves the ``with`` block there is no snapshot.
    """
    return PersistentTableWriter(
        _Table.checked(paths, snapshot_name, key_type, value_type, storage_dim, physical_block_size)
    )


def noting_writer(
    paths: Sequence[str], snapshot_name: str, storage_dim: int, note: Mapping[str, Any]
) -> PersistentTableWriter:
    """:func:`make_persistent_table_writer` of int64 keys, whose snapshot says more of its rows:
    ``note`` holds what an embedding notes (``embedding_dim``, ``optimizer``, ``progress``)."""
    block = 4096
    table = _Table.checked(paths, snapshot_name, torch.int64, torch.float32, storage_dim, block)
    return PersistentTableWriter(table, note)


@dataclass(frozen=True)
class _Table:
    """The arguments of both functions, checked."""

    paths: list[str]
    name: str
    key_type: torch.dtype
    storage_dim: int
    physical_block_size: int

    @staticmethod
    def checked(
        paths: Any, name: Any, key_type: Any, value_type: Any, storage_dim: Any, block: Any
    ) -> _Table:
        check_choice("physical_block_size", block, (512, 4096))
        _checked_type("value_type", value_type, [torch.float32])
        return _Table(
            _checked_paths(paths),
            folders.check_name(name),
            _checked_type("key_type", key_type, KEY_TYPES),
            check_integer("storage_dim", storage_dim, minimum=1),
            int(block),
        )

    @property
    def keys(self) -> np.dtype[Any]:
        """The type of the keys."""
        return _NUMPY[self.key_type]


class PersistentTableReader:
    """See :func:`make_persistent_table_reader`."""

    def __init__(self, table: _Table) -> None:
        self._batches: Iterator[tuple[np.ndarray, np.ndarray]] | None
        tried_again(lambda: _stamps(table.paths, table.name))  # there must be one
        self._batches = _read(table)

    def __iter__(self) -> PersistentTableReader:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        if self._batches is None:
            raise UsageError("the reader is closed")
        return next(self._batches)

    def close(self) -> None:
        """Give the folders back."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]  # a generator
        self._batches = None

    def __enter__(self) -> PersistentTableReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PersistentTableWriter:
    """See :func:`make_persistent_table_writer`."""

    def __init__(self, table: _Table, note: Mapping[str, Any] | None = None) -> None:
        """``note``: more to be noted with the snapshot, such as the optimizer of the state."""
        self._table = table
        self._note = {"optimizer": None, **ONEFLOW_ORDER, **(note or {})}
        self._routing = Routing("hash_roundrobin", len(table.paths), 0)
        self._stores: list[SsdStore] = []
        try:
            for path in table.paths:
                store = open_rows(path, table.storage_dim, table.physical_block_size)
                self._stores.append(store)
                store.clear()
        except BaseException:
            self._give_back()
            raise

    def write(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Store rows; nothing is stored if an array is wrong."""
        if not self._stores:
            raise UsageError("the writer is closed")
        table = self._table
        if not isinstance(keys, np.ndarray) or keys.dtype != table.keys or keys.ndim != 1:
            raise wrong_type("keys", _shape(keys), f"an array of {table.keys} with one axis")
        shape = (len(keys), table.storage_dim)
        if not isinstance(values, np.ndarray) or values.dtype != np.float32:
            raise wrong_type("values", _shape(values), "an array of float32")
        if values.shape != shape:
            raise wrong_value("values.shape", values.shape, str(shape))
        unsigned = np.ascontiguousarray(keys).view(f"<u{keys.itemsize}")
        ids = torch.from_numpy(as_ids(unsigned, table.key_type))
        rows = torch.from_numpy(np.ascontiguousarray(values))
        owner = self._routing.owner(ids)
        for rank, store in enumerate(self._stores):
            here = (owner == rank).nonzero().squeeze(1)
            scores = torch.zeros(len(here), dtype=torch.int64, device="cpu")
            store.insert(
                Rows(ids[here], rows[here], torch.empty(len(here), 0, device="cpu"), scores)
            )

    def close(self) -> None:
        """Save the snapshot in every folder, and give them back."""
        if not self._stores:
            return
        saved = [folders.saved_in(path) for path in self._table.paths]
        known = [stamp for one in saved for stamps in one.values() for stamp in stamps]
        stamp = max([time.time_ns(), *(one + 1 for one in known)])
        try:
            for rank, store in enumerate(self._stores):
                note = {**self._note, "rank": rank, "ranks": len(self._stores)}
                stored = folders.stored_name(self._table.name, stamp)
                store.snapshot(stored, json.dumps(note).encode())
            for store, one in zip(self._stores, saved, strict=True):
                for old in one[self._table.name]:
                    store.drop_snapshot(folders.stored_name(self._table.name, old))
        finally:
            self._give_back()

    def _give_back(self) -> None:
        while self._stores:
            self._stores.pop().close()

    def __enter__(self) -> PersistentTableWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._give_back()


def _read(table: _Table) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    def open_first() -> tuple[list[int | None], Source]:
        stamps = _stamps(table.paths, table.name)
        return stamps, _source(table, 0, stamps)

    stamps, source = tried_again(open_first)
    for number in range(len(table.paths)):
        if number > 0:
            source = _source(table, number, stamps)
        with source:
            ours = source.note.get("optimizer") == OptimizerKind.FTRL.name
            for ids, values, _ in source.batches(BATCH):
                keys = ids.numpy()
                if ours:
                    values = exchanged(values)
                if table.keys.itemsize == 4:
                    keys = keys.astype(np.uint64).astype(np.uint32)
                yield keys.view(table.keys), values.numpy()


def _source(table: _Table, number: int, stamps: Sequence[int | None]) -> Source:
    return Source(
        table.paths[number],
        table.name,
        stamps[number],
        key_type=table.key_type,
        storage_dim=table.storage_dim,
        physical_block_size=table.physical_block_size,
    )


def _stamps(paths: list[str], name: str) -> list[int | None]:
    """The stamp of a snapshot in each folder; ``None`` in OneFlow's layout. If the snapshot is
    taken again between two folders, this is a ``ReplacedCheckpointError``."""
    saved = [folders.saved_in(path) for path in paths]
    stamp = folders.complete(saved).get(name)
    if stamp is not None:
        return [stamp] * len(paths)
    missing = [path for path in paths if not oneflow_layout.has_snapshot(path, name)]
    if not missing:
        return [None] * len(paths)
    if [folders.saved_in(path) for path in paths] != saved:
        raise was_replaced(f"snapshot {name!r} in {missing[0]}")
    if all(name in known for known in saved):
        raise StoreError(
            None, f"{', '.join(paths)} have snapshots {name!r} of different times; allowed: of one"
        )
    known = ", ".join(sorted(saved[paths.index(missing[0])])) or "none"
    raise StoreError(
        None,
        f"there is no snapshot {name!r} in {missing[0]} (all of paths must have it); "
        f"there is: {known}",
    )


def _checked_paths(paths: Any) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, (list, tuple)) or not paths:
        raise wrong_type("paths", paths, "a list of folders")
    return [check_path("paths", path, "folders") for path in paths]


def _checked_type(name: str, value: Any, allowed: Sequence[torch.dtype]) -> torch.dtype:
    """``value``, a torch or NumPy type, as a torch type."""
    kind = value
    if not isinstance(value, torch.dtype):
        by_name = {numpy: kind for kind, numpy in _NUMPY.items()}
        try:
            kind = by_name.get(np.dtype(value), value)
        except TypeError:
            kind = value
    check_choice(name, kind, allowed)
    assert isinstance(kind, torch.dtype)
    return kind


def _shape(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
