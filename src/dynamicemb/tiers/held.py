"""Rows that must be able to come up again, whatever the store does meanwhile."""

from __future__ import annotations

import torch

from dynamicemb.table.rows import Rows
from dynamicemb.tiers.merge import join, places, select


class Held:
    """The rows of some ids that left the cache, in main memory, as long as they are the truth.

    The ids are looked at when the first rows leave: mostly none do.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self._given = ids
        self._ids: torch.Tensor | None = None  # distinct, in main memory
        self._rows: Rows | None = None
        self._elsewhere = torch.empty(0, dtype=torch.int64, device="cpu")
        self._all_elsewhere = False

    @property
    def ids(self) -> torch.Tensor:
        if self._ids is None:
            self._ids = torch.unique(self._given).cpu()
        return self._ids

    def keep(self, rows: Rows) -> None:
        """Rows that left the cache, or never were there; in main memory."""
        ours = torch.isin(rows.ids, self.ids)
        if not bool(ours.any()):
            return
        rows = select(rows, ours)
        self._elsewhere = self._elsewhere[~torch.isin(self._elsewhere, rows.ids)]
        if self._rows is not None:
            rows = join([select(self._rows, ~torch.isin(self._rows.ids, rows.ids)), rows])
        self._rows = select(rows, torch.argsort(rows.ids))

    def forget(self, ids: torch.Tensor) -> None:
        """The rows of these ids change in the store: what is there is the truth."""
        if self._rows is not None:
            self._rows = select(self._rows, ~torch.isin(self._rows.ids, ids))
        self._elsewhere = torch.cat([self._elsewhere, ids[torch.isin(ids, self.ids)]])

    def forget_all(self) -> None:
        """All rows may be other ones."""
        self._rows, self._all_elsewhere = None, True

    def take(self, ids: torch.Tensor) -> Rows | None:
        """The rows that ``ids``, distinct ones that are not in the cache, have; ``None`` if only
        the store knows."""
        if self._all_elsewhere or bool(torch.isin(ids, self._elsewhere).any()):
            return None
        if self._rows is None or not len(self._rows):
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            return Rows(none, none, none, none)
        at, there = places(self._rows, ids)
        return select(self._rows, at[there])
