"""The running numbers of rows in a cache that evicts by last use."""

from __future__ import annotations

from dataclasses import replace

import torch

from dynamicemb.hashing import signed
from dynamicemb.table.base import Table
from dynamicemb.table.rows import Rows
from dynamicemb.tiers.merge import last_of_each

_LARGEST = 2**64 - 1
_SIGN = -(2**63)  # makes the order of signed numbers that of unsigned ones
#: Bytes that a slot of the cache takes here, in each of the arrays.
NUMBER_BYTES = (8, 8, 1)


class RowNumbers:
    """The scores of a NO_EVICTION table's rows while they are in its cache.

    A row keeps the number it got when it was made; the first rows made are often those that are
    used most, so a cache must not evict by it. The scores in the cache say when a row was last
    used, and the numbers are here, beside the slots. Whoever writes to the cache tells. The caller
    holds the table's lock.
    """

    def __init__(self, cache: Table) -> None:
        self._cache = cache
        self.next = 0  # the number of the next new row; from 2**64 - 1 on it stays
        slots, device = cache.capacity, cache.device
        self._ids = torch.zeros(slots, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(slots, dtype=torch.int64, device=device)
        self._used = torch.zeros(slots, dtype=torch.bool, device=device)

    @property
    def bytes(self) -> int:
        return sum(NUMBER_BYTES) * len(self._ids)

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the numbers of the rows that are in the cache, 0 for other ids."""
        slots = self._cache.find_slots(ids)
        return torch.where(slots >= 0, self._numbers[slots.clamp(min=0)], 0)

    def numbered(self, rows: Rows) -> Rows:
        """Rows of the cache, with their numbers as scores."""
        return replace(rows, scores=self.of(rows.ids))

    def moved(
        self, evicted: Rows, arrived: torch.Tensor, numbers: torch.Tensor | None = None
    ) -> Rows:
        """The distinct ids ``arrived`` took slots, of which some were those of ``evicted``: those
        rows with their numbers as scores. ``numbers``: of the rows that arrived; ``None``: they are
        new, made in this order."""
        slots = self._cache.find_slots(arrived)
        if len(evicted):
            before = slots[self._used[slots]]
            ids, order = torch.sort(self._ids[before])
            before = before[order]
            at = torch.searchsorted(ids, evicted.ids)
            evicted = replace(evicted, scores=self._numbers[before[at]])
        self._ids[slots] = arrived
        self._numbers[slots] = self._take(len(arrived)) if numbers is None else numbers
        self._used[slots] = True
        return evicted

    def _take(self, count: int) -> torch.Tensor:
        """The next numbers."""
        first, self.next = self.next, min(self.next + count, _LARGEST)
        numbers = torch.arange(count, device=self._ids.device) + signed(first)
        numbers[_LARGEST - first :] = signed(_LARGEST)
        return numbers

    def assign(self, ids: torch.Tensor, numbers: torch.Tensor) -> None:
        """Give rows of the cache other numbers; of equal ids the last one counts."""
        last = last_of_each(ids)
        self._numbers[self._cache.find_slots(ids[last])] = numbers[last]

    def continue_after(self, numbers: torch.Tensor) -> None:
        """Rows have these numbers: new ones get larger ones."""
        if len(numbers):
            largest = int((numbers ^ _SIGN).max()) - _SIGN
            self.next = max(self.next, min(largest + 1, _LARGEST))

    def leave(self, ids: torch.Tensor) -> None:
        """Rows of these ids are about to be erased from the cache."""
        slots = self._cache.find_slots(ids)
        self._used[slots[slots >= 0]] = False

    def clear(self) -> None:
        """The cache was emptied."""
        self._used.zero_()
