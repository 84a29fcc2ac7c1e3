"""Rows that another thread reads before they are needed."""

from __future__ import annotations

import os
import threading

import torch

from dynamicemb.table.rows import Found, Rows
from dynamicemb.tiers.base import Store


class ReadAhead:
    """Rows of a store that were read before they are needed, as long as they are the truth."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids  # distinct, ascending, in main memory; those not in the cache at the time
        self._valid = torch.ones(len(ids), dtype=torch.bool, device="cpu")
        self._found: Found | None = None
        self._done = threading.Event()
        self._process = os.getpid()

    def start(self, store: Store) -> None:
        threading.Thread(target=self._read, args=(store,), daemon=True, name="read ahead").start()

    def _read(self, store: Store) -> None:
        try:
            self._found = store.find(self.ids)
        except Exception:
            self._found = None  # the batch will meet the error again
        finally:
            self._done.set()

    def forget(self, ids: torch.Tensor) -> None:
        """The store's rows of these ids changed, or will."""
        self._valid &= ~torch.isin(self.ids, ids)

    def forget_all(self) -> None:
        self._valid.zero_()

    def take(self, ids: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        """(rows of ``ids`` that were read and found, the ids about which nothing is known)."""
        if os.getpid() == self._process:  # a forked child does not have the thread
            self._done.wait()
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._found is None or not len(self.ids):
            return Rows(empty, empty, empty, empty), ids
        at = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        known = (self.ids[at] == ids) & self._valid[at]
        rows = at[known & self._found.found[at]]
        found = self._found
        return (
            Rows(self.ids[rows], found.embeddings[rows], found.state[rows], found.scores[rows]),
            ids[~known],
        )
