"""What lies below a table: a store of whole rows, found by id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dynamicemb.errors import UsageError, wrong_type, wrong_value
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.rows import Found, Rows


@dataclass(frozen=True)
class RowLayout:
    """The parts of a row: ``dim`` elements of ``dtype``, ``state_dim`` floats of optimizer state,
    ``score_words`` 64-bit scores."""

    dim: int
    dtype: torch.dtype
    state_dim: int
    score_words: int

    @classmethod
    def of(cls, options: DynamicEmbTableOptions, optimizer: Optimizer) -> RowLayout:
        """Of the rows of a table with these options."""
        if options.dim is None:
            raise wrong_value("dim", None, "a positive integer")
        return cls(
            dim=options.dim,
            dtype=options.embedding_dtype or torch.float32,
            state_dim=optimizer.state_dim(options.dim),
            score_words=2 if isinstance(options.score_strategy, tuple) else 1,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, its id not counted."""
        return 8 * self.score_words + self.dim * self.dtype.itemsize + 4 * self.state_dim

    def empty(self, count: int) -> Rows:
        """Uninitialised rows in main memory."""
        scores = (count,) if self.score_words == 1 else (count, self.score_words)
        return Rows(
            torch.empty(count, dtype=torch.int64, device="cpu"),
            torch.empty(count, self.dim, dtype=self.dtype, device="cpu"),
            torch.empty(count, self.state_dim, dtype=torch.float32, device="cpu"),
            torch.empty(scores, dtype=torch.int64, device="cpu"),
        )

    def check(self, rows: object) -> Rows:
        """``rows`` with contiguous tensors, if they have this layout and are in main memory."""
        if not isinstance(rows, Rows):
            raise wrong_type("rows", rows, "Rows")
        expected = self.empty(0)
        checked = []
        for name in ("ids", "embeddings", "state", "scores"):
            tensor, like = getattr(rows, name), getattr(expected, name)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != like.dtype:
                raise wrong_type(f"rows.{name}", tensor, f"a tensor of {like.dtype}")
            if tensor.shape != (len(rows.ids), *like.shape[1:]):
                allowed = str((len(rows.ids), *like.shape[1:]))
                raise wrong_value(f"rows.{name}.shape", tuple(tensor.shape), allowed)
            if tensor.device.type != "cpu":
                raise wrong_value(f"rows.{name}.device", str(tensor.device), "cpu")
            checked.append(tensor.detach().contiguous())
        return Rows(*checked)


@dataclass(frozen=True)
class StoreStats:
    """rows: stored now. bytes_in_memory, bytes_on_disk: that they take. details: numbers of the
    kind of store."""

    rows: int
    bytes_in_memory: int = 0
    bytes_on_disk: int = 0
    details: dict[str, Any] | None = None


class Store(ABC):
    """Whole rows below a table: ids, embeddings, optimizer state and scores, in main memory's
    tensors (see :class:`~dynamicemb.table.Rows`).

    To write one of your own, derive from this class and implement :meth:`find`, :meth:`insert`,
    :meth:`erase`, :meth:`export`, :meth:`clear` and :meth:`size`; give the class (or a function
    with the same arguments) as ``external_storage`` of a table's options. The table makes it by
    ``external_storage(options, optimizer)``, one per table. ``self.layout`` then says what a row
    is. Ids are int64 tensors, any 64 bits. A table calls a store from one thread at a time, except
    :meth:`find`, which prefetching calls from another.

    What a table relies on: a row that :meth:`insert` took is found, bit by bit, until it is erased
    or overwritten. If :meth:`insert` raises, the table keeps the rows and inserts them again later.
    """

    #: Whether rows that were flushed are there when the store is made again.
    persistent: bool = False

    def __init__(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        self.layout = RowLayout.of(options, optimizer)

    @abstractmethod
    def find(self, ids: torch.Tensor) -> Found:
        """The rows of distinct ``ids``; where ``found`` is False, the rest is arbitrary. Changes
        nothing."""

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: which of distinct ``ids`` are stored."""
        return self.find(ids).found

    @abstractmethod
    def insert(self, rows: Rows) -> None:
        """Store rows, overwriting those that exist; of equal ids the last one counts."""

    def insert_counting(self, rows: Rows) -> int | None:
        """:meth:`insert`; how many of the ids are new here, or None where that is not known. A
        store that drops rows by itself must not count by its size, as this does."""
        before = self.size()
        self.insert(rows)
        return self.size() - before

    @abstractmethod
    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        """Remove rows; bool [n], True at the first occurrence of an id that was there."""

    @abstractmethod
    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        """Every row once, in any order, at most ``batch_size`` at a time. Nothing is inserted or
        erased meanwhile."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every row."""

    @abstractmethod
    def size(self) -> int:
        """Rows stored."""

    def buckets(self) -> tuple[int, int] | None:
        """The places for rows in a store that drops none: (how many buckets, rows of each); a row's
        is in the bucket that :func:`~dynamicemb.hashing.bucket_of` says. A NO_EVICTION table makes
        no row that has none. ``None``: it is bounded by ``max_capacity`` alone."""
        return None

    def flush(self) -> None:  # noqa: B027  stores that only have memory need none
        """Make what was inserted survive the end of the process, where the store can."""

    def snapshot(self, name: str, note: bytes = b"") -> None:
        """Keep the content of now under a name, with a note of the caller."""
        raise self._no_snapshots()

    def load_snapshot(self, name: str) -> bytes:
        """Return to the content of a snapshot; its note. A missing one is a StoreError."""
        raise self._no_snapshots()

    def drop_snapshot(self, name: str) -> None:
        """Forget a snapshot. The content stays."""
        raise self._no_snapshots()

    def snapshots(self) -> list[str]:
        """The names of the snapshots there are."""
        return []

    def log_drops(self) -> None:  # noqa: B027  most stores drop nothing
        """From now on :meth:`take_dropped` is asked."""

    def take_dropped(self) -> torch.Tensor:
        """int64 [n]: the ids that the store dropped by itself since the last call."""
        return torch.empty(0, dtype=torch.int64, device="cpu")

    def set_layout(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        """Take rows of another layout from now on. The table calls it only while the store is
        empty."""
        self.layout = RowLayout.of(options, optimizer)

    def stats(self) -> StoreStats:
        """Rows and bytes; ``details`` are of the kind of store."""
        return StoreStats(rows=self.size())

    def close(self) -> None:
        """Flush and give back what the store holds. It cannot be used afterwards."""
        self.flush()

    def __len__(self) -> int:
        return self.size()

    def _no_snapshots(self) -> UsageError:
        return UsageError(f"a {type(self).__name__} has no snapshots")


class BoundedStore(Store):
    """A store that has a bound of its own, so that it can lie above another one in a
    :class:`~dynamicemb.tiers.Stack`.

    From :meth:`hand_down` on, the rows beyond the bound are not dropped or refused: they are still
    found, and :meth:`surplus` names them, until :meth:`release` says that the store below has them.
    """

    @abstractmethod
    def hand_down(self) -> None:
        """A store lies below from now on."""

    @abstractmethod
    def surplus(self) -> Rows:
        """Rows that should go down now, some or all of them; none: the bound is kept."""

    @abstractmethod
    def release(self, ids: torch.Tensor) -> None:
        """The rows of the last :meth:`surplus`, these ids, are below; forget them."""

    def unflushed(self) -> Iterator[Rows]:
        """The rows that were inserted since the last :meth:`flush`, or more, without the surplus;
        asked only of a store that is not :attr:`persistent`."""
        return self.export()
