"""How many rows a table may still get that evicts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dynamicemb.hashing import bucket_of
from dynamicemb.tiers.base import Store


class Room:
    """The places for the rows of a NO_EVICTION table: ``most`` in all, and where the store has
    buckets, so many in each. A row has one in the store, wherever it is now: without one it could
    never leave the cache.

    The rows there are, are counted once, by ``count_rows`` or from ``all_ids``, then as they come
    and go. The caller holds the table's lock.
    """

    def __init__(
        self,
        store: Store,
        most: int,
        device: torch.device,
        *,
        count_rows: Callable[[], int],
        all_ids: Callable[[], Iterator[torch.Tensor]],
    ) -> None:
        self._store = store
        self._capacity = most
        self._device = device
        self._count_rows, self._all_ids = count_rows, all_ids
        self._rows: int | None = None  # None: not known
        self._most = most
        self._width = 0  # places of a bucket
        self._taken: torch.Tensor | None = None  # of each bucket, where there are several
        self.refused = self._no_ids()  # distinct ids, in the running batch of the cache
        self.failures = 0  # distinct ids of a call that found no place; see TableStats
        self.rejections = 0  # those of them that the cache counted as rejections

    def _no_ids(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self._device)

    @property
    def places(self) -> int:
        """In all."""
        buckets = self._store.buckets()
        return self._capacity if buckets is None else min(self._capacity, buckets[0] * buckets[1])

    # ---- counting ----

    def prepare(self) -> None:
        """Count the rows if that must be done; it asks the store. The other methods do not."""
        if self._rows is not None:
            return
        self._most = self.places
        buckets = self._store.buckets()
        if buckets is None or buckets[0] == 1:
            self._taken, self._rows = None, self._count_rows()
            return
        count, self._width = buckets
        taken, rows = torch.zeros(count, dtype=torch.int64, device=self._device), 0
        for ids in self._all_ids():
            rows += len(ids)
            taken += torch.bincount(bucket_of(ids.to(self._device), count), minlength=count)
        self._taken, self._rows = taken, rows

    def forget(self) -> None:
        """The table has other rows, or the store other places."""
        self._rows = None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of the rows that may fail half way."""
        rows, self._rows = self._rows, None
        yield
        self._rows = rows

    def come(self, ids: torch.Tensor) -> None:
        """Distinct ids got rows."""
        self._add(ids, 1)

    def go(self, ids: torch.Tensor) -> None:
        """Rows of distinct ids are gone."""
        self._add(ids, -1)

    def _add(self, ids: torch.Tensor, change: int) -> None:
        if self._rows is None:
            return
        self._rows += change * len(ids)
        if self._taken is not None:
            bucket = bucket_of(ids, len(self._taken))
            self._taken.index_add_(0, bucket, torch.full_like(bucket, change))

    # ---- asking ----

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: which of distinct new ids find a place, the first ones first."""
        assert self._rows is not None, "prepare() comes first"
        found = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        if self._taken is not None:
            bucket, order = torch.sort(bucket_of(ids, len(self._taken)), stable=True)
            rank = torch.arange(len(ids), device=ids.device) - torch.searchsorted(bucket, bucket)
            found[order] = self._taken[bucket] + rank < self._width
        if self._rows + len(ids) > self._most:
            found &= torch.cumsum(found, 0) <= self._most - self._rows
        return found

    # ---- batches of the cache ----

    def begin(self, new: torch.Tensor) -> bool:
        """A batch has these distinct ids without a row: whether the cache must ask about them."""
        self.refused = self._no_ids()
        return len(new) > 0 and not bool(self.find(new).all())

    def allows(self, ids: torch.Tensor) -> torch.Tensor:
        """See :class:`~dynamicemb.table.device_table.RowLimit`."""
        found = self.find(ids)
        self.refused = ids[~found]
        return found

    def end(self) -> None:
        """The batch ran."""
        self.failures += len(self.refused)
        self.rejections += len(self.refused)
