"""Several tables in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dynamicemb.table.base import Table
from dynamicemb.table.rows import Bounds, Kept, Lookup, Pooling, Rows, SummedGradients, Written


class TableGroup(ABC):
    """Tables of one device, looked up and updated in one call over all of them.

    ``bounds`` has one entry more than there are tables: the ids [bounds[t], bounds[t + 1]) are
    table t's. They may be an int64 tensor where the tables are on a GPU.
    """

    tables: Sequence[Table]
    #: Entered around several calls of one thread, it may make them cheaper.
    together: AbstractContextManager[Any] = nullcontext()

    @abstractmethod
    def evaluate(
        self, ids: torch.Tensor, bounds: Bounds, pooling: Pooling, out: torch.Tensor
    ) -> None:
        """Write the output of a lookup that changes nothing."""

    @abstractmethod
    def find_or_insert(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> Lookup:
        """One training batch on every table. The rows of ``protect`` are not evicted by it."""

    def read_ahead(self, ids: torch.Tensor, bounds: Bounds) -> bool:
        """Start to read what a later training batch needs from slower stores; changes no row. False
        if there are none. True: call :meth:`find_or_insert` when the batch's turn comes, in the
        order of these calls, and :meth:`end_read_ahead` after it."""
        return False

    def end_read_ahead(self) -> None:  # noqa: B027
        """The oldest batch of :meth:`read_ahead` had its turn."""

    @abstractmethod
    def find_or_insert_keeping(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> Kept:
        """:meth:`find_or_insert` for tables whose rows go elsewhere when they leave. Leaves it to
        the caller to obey ``safe_check_mode``, when the evicted rows are safe."""

    @abstractmethod
    def bring_in(
        self, t: int, given: Rows, needed: torch.Tensor, protect: Sequence[Lookup]
    ) -> Written:
        """Insert whole rows of distinct ids into table t. Neither rows of the ids ``needed`` nor
        those of ``protect`` leave for them. Ignores ``safe_check_mode``."""

    @abstractmethod
    def read(self, lookup: Lookup, pooling: Pooling, out: torch.Tensor) -> None:
        """Write the output of a training lookup from the rows as they are now."""

    def train(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        pooling: Pooling,
        out: torch.Tensor,
    ) -> Lookup:
        """:meth:`find_or_insert` and :meth:`read` in one."""
        with self.together:
            lookup = self.find_or_insert(ids, bounds)
            self.read(lookup, pooling, out)
        return lookup

    @abstractmethod
    def update(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        """Sum the gradient per distinct id and update every row once with its table's optimizer;
        adds 1 to every table's ``iteration``."""

    @abstractmethod
    def weight_gradient(
        self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor
    ) -> torch.Tensor:
        """float32 [n]: the gradient of ``pooling.weights``, from the rows as they are now."""

    @abstractmethod
    def reduce(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> SummedGradients:
        """The gradients summed per distinct id; rows that are not stored are left out."""

    @abstractmethod
    def merge(self, parts: Sequence[SummedGradients]) -> SummedGradients:
        """The sum of several, one entry per id."""

    def prepare_update(self, gradients: SummedGradients) -> None:  # noqa: B027
        """Do the part of :meth:`update_summed` that a store can fail: afterwards the update itself
        does not fail."""

    @abstractmethod
    def update_summed(self, gradients: SummedGradients) -> None:
        """:meth:`update` from gradients that were summed before."""
