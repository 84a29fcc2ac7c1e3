"""How many rows an embedding may have, and the growth of its table up to that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from dynamicemb.errors import InsertionError
from dynamicemb.one_embedding.store_table import LOAD_FACTOR
from dynamicemb.table import Table

ResultT = TypeVar("ResultT")


class Room:
    """The room for rows on one rank. ``limit``: rows at most; ``None``: any number."""

    def __init__(self, table: Table, limit: int | None, *, embedding: str, rank: int) -> None:
        self.table = table
        self.limit = limit
        self._where = f"embedding {embedding!r} on rank {rank}"
        self._at_most = 0  # rows, if every id so far was a new one

    def use(self, table: Table) -> None:
        """Another table with the same rows."""
        self.table = table

    def count(self) -> None:
        """The table has other rows than :meth:`check` saw."""
        if self.limit is not None:
            self._at_most = len(self.table)

    def check(self, keys: torch.Tensor) -> None:
        """Raise if the new ones among ``keys`` would make more rows than there may be. The table is
        asked only when the keys of all batches since the last time might be too many."""
        if self.limit is None:
            return
        self._at_most += len(keys)
        if self._at_most <= self.limit:
            return
        self.count()
        missing = torch.unique(keys[~self.table.contains(keys)])
        rows = self._at_most + len(missing)
        if rows > self.limit:
            raise InsertionError(
                f"{len(missing)} new ids would make {rows} rows of {self._where}; allowed: "
                f"{self.limit}, this rank's part of capacity. Raise capacity, or make the store "
                "options with on_full='grow'"
            )
        self._at_most = rows

    def check_snapshot(self, rows: int, ranks: int = 1) -> None:
        """Raise if a snapshot's rows are more than may be on ``ranks`` of them."""
        if self.limit is not None and rows > self.limit * ranks:
            raise InsertionError(
                f"the snapshot has {rows} rows for a capacity of {self.limit * ranks}; raise "
                "capacity, or make the store options with on_full='grow'"
            )

    def grow_for(self, insert: Callable[[], ResultT]) -> ResultT:
        """Run ``insert``, again if a bucket was full before the table was."""
        while True:
            try:
                return insert()
            except InsertionError as error:
                slots = self.table.capacity
                if self.table.has_store:
                    raise InsertionError(
                        f"{error}. Or raise cache_budget_mb, or make the batches smaller"
                    ) from None
                self.table.reserve(int(LOAD_FACTOR * slots) - len(self.table) + 1)
                if self.table.capacity == slots:
                    raise

    def insert(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        state: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Insert whole rows, on any device."""
        rows = [part.to(self.table.device) for part in (ids, embeddings, state, scores)]
        self.grow_for(lambda: self.table.insert(rows[0], rows[1], state=rows[2], scores=rows[3]))
