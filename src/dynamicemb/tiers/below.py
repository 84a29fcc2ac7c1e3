"""The store below a cache, with the rows on their way to it and from it."""

from __future__ import annotations

import logging
import weakref

import torch

from dynamicemb.errors import StoreError
from dynamicemb.table.rows import Rows
from dynamicemb.tiers.base import Store
from dynamicemb.tiers.changes import Changes
from dynamicemb.tiers.held import Held
from dynamicemb.tiers.merge import join, select
from dynamicemb.tiers.read_ahead import ReadAhead
from dynamicemb.tiers.staging import to_host

logger = logging.getLogger("dynamicemb.tiers")


class Below:
    """What a cached table does with its store. The caller holds the table's lock.

    Rows that left the cache and that the store did not take (it may be full, or away) wait in main
    memory, and are offered again by the next call that needs the store. A batch has run when rows
    leave for it, so that it does not fail for them: the next one does, before it begins.
    """

    def __init__(self, store: Store, changes: Changes) -> None:
        self.store = store
        self.changes = changes
        self.only_cached: int | None = 0  # rows that the store does not have; None: not known
        self.written_back = 0  # rows
        self._waiting: list[Rows] = []
        self._ahead: list[ReadAhead] = []
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()

    @property
    def empty(self) -> bool:
        """Whether the store has no rows, and none will come."""
        return not (self._waiting or self.store.size() or self.store.snapshots())

    def find(self, ids: torch.Tensor) -> Rows:
        """The rows of distinct ids that the store has."""
        self.drain()
        parts = []
        for ahead in self._ahead:
            rows, ids = ahead.take(ids)
            parts.append(rows)
        found = self.store.find(ids)
        parts.append(select(Rows(ids, found.embeddings, found.state, found.scores), found.found))
        return join(parts)

    # ---- rows that go down ----

    def take(self, rows: Rows) -> None:
        """Rows that left the cache."""
        rows = to_host(rows)
        self._change(rows.ids)
        for held in list(self._held):
            held.keep(rows)
        self._waiting.append(rows)
        try:
            self.drain()
        except Exception as error:
            logger.warning("rows that left a cache wait in memory, the store failed: %s", error)

    def drain(self) -> None:
        """Hand the rows that wait to the store, or raise its error."""
        while self._waiting:
            rows = self._waiting[0]
            only_cached, self.only_cached = self.only_cached, None
            try:
                new = self.store.insert_counting(rows)
            except StoreError as error:
                if error.kept:  # an empty call asks the store again
                    self.written_back += len(rows)
                    self._waiting[0] = select(rows, slice(0, 0))
                raise
            if only_cached is not None and new is not None:
                self.only_cached = only_cached - new
            self.written_back += len(rows)
            del self._waiting[0]
            self._note_dropped()

    def insert(self, rows: Rows) -> None:
        """Rows that are not in the cache."""
        rows = to_host(rows)
        self.only_cached = None
        self._change(rows.ids)
        self.drain()
        self.store.insert(rows)
        self._note_dropped()

    def copy(self, rows: Rows) -> None:
        """Rows that stay in the cache."""
        rows = to_host(rows)
        self.forget(rows.ids)
        self.store.insert(rows)
        self.written_back += len(rows)

    def flushed(self) -> None:
        """All rows of the cache are in the store."""
        self.only_cached = 0
        self._note_dropped()
        self.store.flush()

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        """Remove rows; which of them the store had."""
        self.drain()
        self.only_cached = None
        self.forget(ids)
        return self.store.erase(ids)

    def restart_state(self, initial: torch.Tensor) -> None:
        """All rows get the state ``initial``, of an optimizer with as many numbers."""
        self.drain()
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        ids = torch.cat([none, *(rows.ids for rows in self.store.export())])
        for part in ids.split(65536):
            found = self.store.find(part)
            state = initial.cpu().expand_as(found.state).contiguous()
            self.store.insert(Rows(part, found.embeddings, state, found.scores))
        self.forget(ids)
        self.changes.forget_rows()

    def start_again(self) -> None:
        """The store has other rows: none that waits, or was read ahead, counts any more."""
        self._waiting.clear()
        self.only_cached = 0
        for ahead in self._ahead:
            ahead.forget_all()
        self.forget_held()

    def _change(self, ids: torch.Tensor) -> None:
        """The store's rows of these ids are about to change."""
        self.forget(ids)
        self.changes.written(ids)

    def _note_dropped(self) -> None:
        if self.changes.logs_removals:
            self.changes.removed(self.store.take_dropped())

    # ---- rows that are read before they are needed ----

    def read_ahead(self, ahead: ReadAhead) -> None:
        """Rows of a later batch are being read by another thread; :meth:`find` uses them."""
        for rows in self._waiting:  # the store does not have them yet
            ahead.forget(rows.ids)
        self._ahead.append(ahead)

    def end_read_ahead(self, ahead: ReadAhead) -> None:
        """``ahead`` was used, or nobody will: it need not be told of changes any longer."""
        self._ahead.remove(ahead)

    def forget(self, ids: torch.Tensor) -> None:
        """The store's rows of these ids change: what was read ahead of them is not the truth."""
        for ahead in self._ahead:
            ahead.forget(ids)
        for held in list(self._held):
            held.forget(ids)

    # ---- rows that may be needed again ----

    def hold(self, held: Held) -> None:
        """Keep the rows of its ids that leave the cache, as long as somebody has ``held``."""
        self._held.add(held)

    def forget_held(self) -> None:
        """Rows left the cache all together, or the store has other ones."""
        for held in list(self._held):
            held.forget_all()
