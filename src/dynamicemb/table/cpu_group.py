"""Several tables in main memory in one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.errors import OutOfMemoryError, UsageError
from dynamicemb.options import DynamicEmbPoolingMode
from dynamicemb.table.engine import INSERT, LOCATE, TRAIN, _engine, address, threads
from dynamicemb.table.group import TableGroup
from dynamicemb.table.numbers import TYPES
from dynamicemb.table.rows import (
    UNPOOLED,
    Bounds,
    Kept,
    Lookup,
    Pooling,
    Rows,
    SummedGradients,
    Written,
)
from dynamicemb.table.scored import batch_scores

if TYPE_CHECKING:
    from dynamicemb.table.cpu import CpuTable


@dataclass
class CpuLookup(Lookup):
    """One engine batch per table, over ids that are kept alive while they are needed."""

    batches: list[Any]
    bounds: tuple[int, ...]


class CpuTableGroup(TableGroup):
    """See :class:`TableGroup`."""

    def __init__(self, tables: Sequence[CpuTable]) -> None:
        self.tables: Sequence[CpuTable] = list(tables)
        self._engines = [table.engine for table in tables]

    def evaluate(
        self, ids: torch.Tensor, bounds: Bounds, pooling: Pooling, out: torch.Tensor
    ) -> None:
        assert not isinstance(bounds, torch.Tensor)
        call = _call(self._engines, (), bounds, pooling, out)
        call.evaluate(ids.data_ptr(), out.data_ptr(), threads())

    def find_or_insert(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
        keep_evicted: bool = False,
        check: bool = True,
    ) -> CpuLookup:
        assert not isinstance(bounds, torch.Tensor)
        scores = batch_scores(self.tables)
        batches = []
        for t, table in enumerate(self.tables):
            begin, end = bounds[t], bounds[t + 1]
            offset = 8 * begin
            batch = _engine.Batch(
                table.engine,
                TRAIN,
                ids.data_ptr() + offset,
                end - begin,
                0 if counts is None else counts.data_ptr() + offset,
            )
            for other in protect:
                assert isinstance(other, CpuLookup)
                batch.protect(other.batches[t])
            if keep_evicted:
                batch.keep_evicted()
            batches.append(batch)
        try:
            if any(table.decides for table in self.tables):
                _engine.find_batches(batches, threads())
                for table, batch in zip(self.tables, batches, strict=True):
                    table.decide(batch)
                _engine.commit_batches(batches, scores, threads())
            else:
                _engine.run_batches(batches, scores, threads())
        except MemoryError as error:
            raise OutOfMemoryError(f"tables {[t.name for t in self.tables]}: {error}") from error
        for table in self.tables:
            table.advance_step()
        if check:
            for table, batch in zip(self.tables, batches, strict=True):
                table.check_failures(batch.failures, batch.size)
        return CpuLookup(batches, tuple(bounds))

    def find_or_insert_keeping(
        self,
        ids: torch.Tensor,
        bounds: Bounds,
        *,
        counts: torch.Tensor | None = None,
        protect: Sequence[Lookup] = (),
    ) -> Kept:
        lookup = self.find_or_insert(
            ids, bounds, counts=counts, protect=protect, keep_evicted=True, check=False
        )
        return Kept(
            lookup,
            [table.evicted_of(b) for table, b in zip(self.tables, lookup.batches, strict=True)],
            [batch.failures for batch in lookup.batches],
        )

    def bring_in(
        self, t: int, given: Rows, needed: torch.Tensor, protect: Sequence[Lookup]
    ) -> Written:
        table = self.tables[t]
        batch = _engine.Batch(table.engine, INSERT, given.ids.data_ptr(), len(given), 0)
        batch.give(address(given.embeddings), address(given.state), address(given.scores))
        batch.keep_evicted()
        located = _engine.Batch(table.engine, LOCATE, needed.data_ptr(), len(needed), 0)
        _engine.run_batches([located], [(0, 0)], threads())
        batch.protect(located)
        for other in protect:
            assert isinstance(other, CpuLookup)
            batch.protect(other.batches[t])
        _engine.run_batches([batch], [(0, 0)], threads())
        return Written(table._written(batch), table.evicted_of(batch))

    def read(self, lookup: Lookup, pooling: Pooling, out: torch.Tensor) -> None:
        self._lookup_call(lookup, pooling, out).read(out.data_ptr(), threads())

    def update(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        call = self._lookup_call(lookup, pooling, gradient)
        call.update(gradient.data_ptr(), self._steps(), threads())

    def weight_gradient(
        self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(lookup, CpuLookup)
        out = torch.zeros(lookup.bounds[-1], dtype=torch.float32, device="cpu")
        call = self._lookup_call(lookup, pooling, gradient)
        call.weight_gradient(gradient.data_ptr(), out.data_ptr(), threads())
        return out

    def reduce(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> SummedGradients:
        assert isinstance(lookup, CpuLookup)
        call = self._lookup_call(lookup, pooling, gradient)
        return [
            self._sums(table, call, t, gradient, lookup.bounds[t + 1] - lookup.bounds[t])
            for t, table in enumerate(self.tables)
        ]

    def merge(self, parts: Sequence[SummedGradients]) -> SummedGradients:
        merged = []
        for t, table in enumerate(self.tables):
            ids = torch.cat([part[t][0] for part in parts])
            gradient = torch.cat([part[t][1] for part in parts])
            call = self._located(table, ids, gradient)
            merged.append(self._sums(table, call, 0, gradient, len(ids), clamp=False))
        return merged

    def update_summed(self, gradients: SummedGradients) -> None:
        self._steps()
        for table, (ids, gradient) in zip(self.tables, gradients, strict=True):
            call = self._located(table, ids, gradient)
            step = _engine_step(table, clamp=False)
            call.update(gradient.data_ptr(), [step], threads())

    def _sums(
        self,
        table: CpuTable,
        call: Any,
        t: int,
        gradient: torch.Tensor,
        n: int,
        *,
        clamp: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty(n, dtype=torch.int64, device="cpu")
        sums = torch.empty(n, table.dim, dtype=torch.float32, device="cpu")
        limit = table.optimizer.numbers(1)["max_gradient"] if clamp else 0.0
        count = call.reduce(
            t, gradient.data_ptr(), limit, threads(), ids.data_ptr(), sums.data_ptr()
        )
        return ids[:count], sums[:count]

    def _located(self, table: CpuTable, ids: torch.Tensor, gradient: torch.Tensor) -> Any:
        """A call over given ids, with one gradient row each."""
        batch = _engine.Batch(table.engine, LOCATE, ids.data_ptr(), len(ids), 0)
        _engine.run_batches([batch], [(0, 0)], threads())
        return _call([table.engine], [batch], (0, len(ids)), UNPOOLED, gradient)

    def _steps(self) -> list[Any]:
        """The next optimizer step of every table."""
        for table in self.tables:
            if not table.options.training:
                raise UsageError(
                    f"table {table.name!r} has training=False in its options and cannot be updated"
                )
            table.iteration += 1
        return [_engine_step(table) for table in self.tables]

    def _lookup_call(self, lookup: Lookup, pooling: Pooling, output: torch.Tensor) -> Any:
        assert isinstance(lookup, CpuLookup)
        return _call(self._engines, lookup.batches, lookup.bounds, pooling, output)


def _call(
    engines: Sequence[Any],
    batches: Sequence[Any],
    bounds: Sequence[int],
    pooling: Pooling,
    output: torch.Tensor,
) -> Any:
    """The engine's call over the ids of several tables; ``output`` is like what comes out."""
    return _engine.Call(
        engines,
        batches,
        pooling.features,
        bounds,
        pooling.pooled,
        pooling.mode is DynamicEmbPoolingMode.MEAN,
        pooling.batch_size,
        address(pooling.offsets),
        address(pooling.weights),
        TYPES[pooling.dtype],
        output.shape[1],
    )


def _engine_step(table: CpuTable, *, clamp: bool = True) -> Any:
    """The engine's numbers for the update that ``table.iteration`` counts."""
    numbers = table.optimizer.numbers(table.iteration)
    if not clamp:
        numbers["max_gradient"] = 0.0  # the summands were clamped already
    return _engine.OptimizerStep(**numbers, rounding_seed=table.seed)
