"""A store over another one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dynamicemb.errors import StoreError, UsageError, wrong_type, wrong_value
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.rows import Found, Rows
from dynamicemb.tiers.base import BoundedStore, Store, StoreStats
from dynamicemb.tiers.merge import contains_below, export_below, fill_from

MakeStore = Callable[[DynamicEmbTableOptions, Optimizer], Any]


class Stack(Store):
    """Two stores as one: rows are written to the upper one, which has a bound; what it has too much
    of goes down to the lower one. The lower one may be a stack again.

    A row has one truth: the upper store's if it has one, else the lower one's. :meth:`find` moves
    nothing: a row comes up by being used in the table above, and into the upper store when it
    leaves that. If the lower store fails, :meth:`insert` raises its error and the rows wait in the
    upper one.

    :meth:`flush` makes the lower store hold everything that the upper one cannot keep over the end
    of the process; then both are flushed. A snapshot is the lower store's, and the upper one's too
    where that lasts (:attr:`Store.persistent`).
    """

    def __init__(
        self,
        options: DynamicEmbTableOptions,
        optimizer: Optimizer,
        *,
        upper: MakeStore,
        lower: MakeStore,
    ) -> None:
        super().__init__(options, optimizer)
        above = upper(options, optimizer)
        if not isinstance(above, BoundedStore):
            raise wrong_type("a store above another one", above, "a dynamicemb.tiers.BoundedStore")
        self.upper: BoundedStore = above
        try:
            below = lower(options, optimizer)
            if not isinstance(below, Store):
                raise wrong_type("the lowest store", below, "a dynamicemb.tiers.Store")
        except BaseException:
            above.close()
            raise
        self.lower: Store = below
        self.persistent = below.persistent
        self.upper.hand_down()
        self._only_upper: int | None = None  # rows that the lower store does not have

    @staticmethod
    def of(*stores: MakeStore) -> MakeStore:
        """For ``external_storage``: stores from the fastest to the slowest, each a class or a
        function of (options, optimizer), as ``HostStore.within(2**30)`` and ``SsdStore.at(path)``
        give them. All but the last must be bounded."""
        if not stores:
            raise wrong_value("stores", (), "at least one store")
        for store in stores:
            if not callable(store):
                raise wrong_type("stores", store, "classes, or functions of (options, optimizer)")
        made = stores[-1]
        for store in reversed(stores[:-1]):
            made = functools.partial(Stack, upper=store, lower=made)
        return made

    # ---- rows ----

    def find(self, ids: torch.Tensor) -> Found:
        found = self.upper.find(ids)
        fill_from(self.lower, ids, found)
        return found

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.upper.contains(ids)
        contains_below(self.lower, ids, found)
        return found

    def insert(self, rows: Rows) -> None:
        self._only_upper = None
        self.upper.insert(rows)
        try:
            self._settle()
        except StoreError as error:
            error.kept = True  # by the upper store
            raise

    def _settle(self) -> None:
        """Hand down what the upper store has too much of."""
        while len(rows := self.upper.surplus()):
            self._only_upper = None
            self.lower.insert(rows)
            if self.upper.persistent:
                # The upper store may forget them on the disk at once; the lower one must not then.
                self.lower.flush()
            self.upper.release(rows.ids)

    def insert_counting(self, rows: Rows) -> int | None:
        self.insert(rows)
        return None  # it would take a look into the lower store for every row

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        self._only_upper = None
        below = self.lower.erase(ids)
        return self.upper.erase(ids) | below

    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        """The upper store's rows, then the others."""
        yield from self.upper.export(batch_size=batch_size)
        yield from export_below(self.lower, self.upper.contains, batch_size)

    def clear(self) -> None:
        self._only_upper = None
        self.upper.clear()
        self.lower.clear()

    def size(self) -> int:
        if self._only_upper is None:
            self._only_upper = sum(
                int((~self.lower.contains(rows.ids)).sum()) for rows in self.upper.export()
            )
        return self.lower.size() + self._only_upper

    def buckets(self) -> tuple[int, int] | None:
        return self.lower.buckets()

    # ---- lasting ----

    def flush(self) -> None:
        self._settle()
        if not self.upper.persistent:
            self._only_upper = None
            for rows in self.upper.unflushed():
                self.lower.insert(rows)
        self.lower.flush()
        self.upper.flush()

    def snapshot(self, name: str, note: bytes = b"") -> None:
        self.flush()
        self.lower.snapshot(name, note)
        if self.upper.persistent:
            self.upper.snapshot(name, note)

    def load_snapshot(self, name: str) -> bytes:
        if self.upper.persistent and name not in self.upper.snapshots():
            raise StoreError(None, f"there is no snapshot {name!r} in the upper store of the stack")
        note = self.lower.load_snapshot(name)
        if self.upper.persistent:
            self.upper.load_snapshot(name)
        else:
            self.upper.clear()
        self._only_upper = None
        return note

    def drop_snapshot(self, name: str) -> None:
        if self.upper.persistent and name in self.upper.snapshots():
            self.upper.drop_snapshot(name)
        self.lower.drop_snapshot(name)

    def snapshots(self) -> list[str]:
        names = self.lower.snapshots()
        if self.upper.persistent:
            both = set(self.upper.snapshots())
            names = [name for name in names if name in both]
        return names

    # ---- the rest ----

    def log_drops(self) -> None:
        self.lower.log_drops()

    def take_dropped(self) -> torch.Tensor:
        ids = self.lower.take_dropped()
        return ids[~self.upper.contains(ids)]

    def set_layout(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        if self.size() or self.snapshots():
            raise UsageError("a stack of stores has rows; their layout cannot change")
        self.upper.set_layout(options, optimizer)
        self.lower.set_layout(options, optimizer)
        super().set_layout(options, optimizer)

    def stats(self) -> StoreStats:
        """Of both together; ``details`` has both, and how many rows went from the last one."""
        upper, lower = self.upper.stats(), self.lower.stats()
        return StoreStats(
            rows=self.size(),
            bytes_in_memory=upper.bytes_in_memory + lower.bytes_in_memory,
            bytes_on_disk=upper.bytes_on_disk + lower.bytes_on_disk,
            details={
                "upper": upper,
                "lower": lower,
                "evictions": (lower.details or {}).get("evictions", 0),
            },
        )

    def close(self) -> None:
        self.flush()
        self.upper.close()
        self.lower.close()
