"""Rows on their way to a server, written behind the caller's back."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import torch

from dynamicemb.tiers.remote.rows import RemoteRows

#: Bytes on their way; beyond it, :meth:`WriteBack.put` waits.
MAX_BYTES = 256 << 20


class _Rows:
    """Rows of distinct ids, that can be found."""

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.ids, self.rows = ids, rows
        self.order = np.argsort(ids.numpy())
        self.sorted = ids.numpy()[self.order]


class WriteBack:
    """Writes rows to a server in the order they come, from a thread of its own.

    Until a row is written, :meth:`find` has it. When the server fails, nothing is lost: the rows
    stay, the next call raises the error, and the one after it tries again.
    """

    def __init__(self, server: RemoteRows) -> None:
        self._server = server
        self._waiting: deque[_Rows] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows of distinct ids, later."""
        if not len(ids):
            return
        taken = _Rows(ids, rows)
        with self._changed:
            # Taken in any case: the caller has no other place for them.
            self._waiting.append(taken)
            self._bytes += rows.numel()
            self._start()
            while self._bytes > MAX_BYTES and self._error is None:
                self._changed.wait()

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(bool [n]: which of ``ids`` are on their way, their rows uint8 [n, bytes])."""
        found = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
        rows = torch.zeros(len(ids), self._server.format.nbytes, dtype=torch.uint8, device="cpu")
        with self._changed:
            waiting = list(self._waiting)
        for one in waiting:  # the latest is the truth
            at = np.searchsorted(one.sorted, ids.numpy())
            at[at == len(one.sorted)] = 0
            here = torch.from_numpy(one.sorted[at] == ids.numpy())
            if bool(here.any()):
                found |= here
                rows[here] = one.rows[torch.from_numpy(one.order[at])[here]]
        return found, rows

    def raise_error(self) -> None:
        """Raise what went wrong since the last call, and let the thread try again."""
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                self._start()
                raise error

    def flush(self) -> None:
        """Wait until everything is written; raises what goes wrong."""
        with self._changed:
            self._error = None
            self._start()
            while self._waiting and self._error is None:
                self._changed.wait()
        self.raise_error_once()

    def raise_error_once(self) -> None:
        """Raise what went wrong; the thread rests until the next call."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> None:
        if self._thread is None and self._waiting and self._error is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="write back")
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                first = self._waiting[0]
            try:
                self._server.push(first.ids, first.rows)
            except Exception as error:
                with self._changed:
                    self._error = error
                continue
            with self._changed:
                self._waiting.popleft()
                self._bytes -= first.rows.numel()
                self._changed.notify_all()
