"""A store over another one that fails now and then, before or in the middle of what it does."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dynamicemb.errors import StoreError
from dynamicemb.table import Found, Rows
from dynamicemb.tiers import Store, StoreStats
from dynamicemb.tiers.merge import select


class Faults:
    """When calls fail. ``rate``: the share of them; 0: none. ``count``: how many did."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.rate = rate
        self.count = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()  # rows are also read ahead by another thread

    def strike(self) -> bool:
        with self._lock:
            hit = torch.rand((), generator=self._generator).item() < self.rate
            self.count += hit
            return hit

    def meet(self) -> None:
        if self.strike():
            if self.count % 2:
                raise StoreError(errno.EIO, "the disk does not answer")
            raise ConnectionResetError("the other side is gone")  # a store of a user's own


class FlakyStore(Store):
    """``below`` with faults."""

    def __init__(self, options: Any, optimizer: Any, below: Callable[..., Any], faults: Faults):
        super().__init__(options, optimizer)
        self.below: Store = below(options, optimizer)
        self.faults = faults

    def find(self, ids: torch.Tensor) -> Found:
        self.faults.meet()
        return self.below.find(ids)

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        self.faults.meet()
        return self.below.contains(ids)

    def insert(self, rows: Rows) -> None:
        if self.faults.strike():  # some of them are there, and the caller cannot know which
            self.below.insert(select(rows, slice(0, len(rows) // 2)))
            raise StoreError(errno.ENOSPC, "the disk is full")
        self.below.insert(rows)

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        self.faults.meet()
        return self.below.erase(ids)

    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        self.faults.meet()
        return self.below.export(batch_size=batch_size)

    def clear(self) -> None:
        self.faults.meet()
        self.below.clear()

    def size(self) -> int:
        return self.below.size()

    def flush(self) -> None:
        self.faults.meet()
        self.below.flush()

    def stats(self) -> StoreStats:
        return self.below.stats()

    def close(self) -> None:
        self.below.close()
