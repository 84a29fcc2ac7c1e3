"""Backward on a GPU: gradients summed per row, optimizer updates, gradients of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dynamicemb.kernels import gradients, rows
from dynamicemb.kernels.gradients import HOT, SUM_BLOCK
from dynamicemb.kernels.launch import INTERPRETED, aligned, blocks, launch
from dynamicemb.options import DynamicEmbPoolingMode
from dynamicemb.table.cuda_batch import Batch
from dynamicemb.table.cuda_entries import ELEMENTS
from dynamicemb.table.cuda_layout import Layout, TableClass, bits
from dynamicemb.table.cuda_workspace import hot_blocks
from dynamicemb.table.numbers import TYPES
from dynamicemb.table.rows import Pooling

#: Numbers of the rows that one program updates, and those of the hot blocks that one sums at a
#: time; occurrences that are asked for at once. Measured on an H200.
UPDATE_TILE = 4096 if INTERPRETED else 512
SMALL_TILE = 4096 if INTERPRETED else 256  # of rows of few columns
HOT_TILE = 4096 if INTERPRETED else 128
HOT_UNROLL = 2 if INTERPRETED else 16


class _Sources:
    """What the kernels that sum gradients share: where the gradient of an occurrence is."""

    def __init__(
        self,
        layout: Layout,
        batch: Batch,
        pooling: Pooling,
        gradient: torch.Tensor,
        steps: torch.Tensor,
    ) -> None:
        self.layout, self.batch, self.steps = layout, batch, steps
        self.gradient = aligned(gradient)
        self.stride = self.gradient.stride(0) if gradient.dim() > 1 else 0
        self.order, self.spans = batch.group()
        self.batch_size = max(pooling.batch_size, 1)
        self.bag_of = self.columns = self.offsets = self.order
        self.weights = self.order if pooling.weights is None else aligned(pooling.weights)
        self.constants = (
            TYPES[pooling.dtype],
            layout.aligned_rows(self.gradient, pooling.pooled),
            pooling.pooled,
            pooling.mode is DynamicEmbPoolingMode.MEAN,
            pooling.weights is not None,
        )
        if pooling.pooled:
            assert pooling.offsets is not None
            tables, self.columns = layout.feature_arrays(pooling.features)
            self.offsets = aligned(pooling.offsets)
            # Offsets of a GPU are not looked at: ids may be in no bag.
            self.bag_of = torch.full((batch.n,), -1, dtype=torch.int32, device=batch.device)
            bags = len(tables) * pooling.batch_size
            launch(
                rows.bags_kernel,
                blocks(bags, ELEMENTS),
                (self.offsets, bags, batch.n, self.bag_of),
                (ELEMENTS,),
                warps=8,
                device=batch.device,
            )

    def _source(self) -> tuple[Any, ...]:
        return (
            self.order,
            bits(self.gradient),
            self.stride,
            self.bag_of,
            self.columns,
            self.batch_size,
            self.offsets,
            self.weights,
        )

    def arguments(self, hot: torch.Tensor) -> tuple[Any, ...]:
        """From ``spans`` to ``weights``, as the kernels take them."""
        batch = self.batch
        return (self.spans, batch.first, batch.space.hot_base, hot, *self._source())

    def hot(self, one: TableClass, clamps: bool) -> torch.Tensor:
        """The sums of blocks of ids that occur often."""
        batch, layout = self.batch, self.layout
        if batch.n <= HOT:
            return layout.floats
        batch.list_hot()
        space, most = batch.space, hot_blocks(batch.n)
        sums = torch.empty(most, one.columns, dtype=torch.float32, device=batch.device)
        columns = min(one.columns, HOT_TILE)
        block = HOT_TILE // columns
        pieces = one.columns // columns
        launch(
            gradients.hot_sums_kernel,
            blocks(batch.hot_guess, block) * pieces,
            (
                self.spans,
                most,
                space.hot_base,
                space.hot_entry,
                space.hot_count,
                layout.hint,
                batch.tables,
                layout.meta,
                layout.tables,
                one.number,
                self.steps,
                *self._source(),
                sums,
            ),
            (
                one.dim,
                one.columns,
                columns,
                *self.constants,
                clamps,
                block,
                HOT_UNROLL,
                batch.one,
                layout.one_class,
                SUM_BLOCK,
            ),
            warps=1,
            device=batch.device,
        )
        return sums


def update(
    layout: Layout, batch: Batch, pooling: Pooling, gradient: torch.Tensor, *, clamp: bool
) -> None:
    """One optimizer step on the rows of a batch; the tables have counted it."""
    if batch.n == 0:
        return
    batch.stamp()
    steps = layout.step_numbers.current(layout.version)
    sources = _Sources(layout, batch, pooling, gradient, steps)
    for one in layout.classes:
        clamps = clamp and one.clips
        hot = sources.hot(one, clamps)
        block, warps = _update_tile(one.columns)
        launch(
            gradients.update_kernel,
            blocks(batch.entries_guess, block),
            (
                batch.ids,
                batch.tables,
                batch.count,
                batch.slots,
                layout.meta,
                layout.tables,
                one.number,
                steps,
                *sources.arguments(hot),
            ),
            (
                one.dim,
                one.columns,
                one.stride,
                one.type,
                one.state_stride,
                *sources.constants,
                one.kind,
                one.maximize,
                one.decay,
                one.nesterov,
                one.rounds_at_random,
                clamps,
                block,
                2,
                batch.one,
                layout.one_class,
                HOT,
                SUM_BLOCK,
            ),
            warps=warps,
            device=batch.device,
        )


def _update_tile(columns: int) -> tuple[int, int]:
    """(rows, warps) of a program that updates rows."""
    if columns < 64:
        return SMALL_TILE // columns, 1
    if columns <= UPDATE_TILE:
        return UPDATE_TILE // columns, 2
    return 1, min(columns // 256, 8)


def sums_per_entry(
    layout: Layout, batch: Batch, pooling: Pooling, gradient: torch.Tensor, *, clamp: bool
) -> Iterator[tuple[TableClass, torch.Tensor]]:
    """Per class: the summed gradient of every entry, float32."""
    if batch.n == 0:
        return
    steps = layout.step_numbers.current(layout.version)
    sources = _Sources(layout, batch, pooling, gradient, steps)
    for one in layout.classes:
        clamps = clamp and one.clips
        hot = sources.hot(one, clamps)
        out = torch.empty(batch.n, one.dim, dtype=torch.float32, device=batch.device)
        block = max(1, (4096 if INTERPRETED else 256) // one.columns)
        launch(
            gradients.reduce_kernel,
            blocks(batch.n, block),
            (
                batch.tables,
                batch.count,
                layout.meta,
                layout.tables,
                one.number,
                steps,
                *sources.arguments(hot),
                out,
            ),
            (
                one.dim,
                one.columns,
                *sources.constants,
                clamps,
                block,
                2,
                batch.one,
                layout.one_class,
                HOT,
                SUM_BLOCK,
            ),
            warps=1,
            device=batch.device,
        )
        yield one, out


def weight_gradient(
    layout: Layout, batch: Batch, pooling: Pooling, gradient: torch.Tensor
) -> torch.Tensor:
    """float32 [n]: the product of row and gradient of every occurrence."""
    out = torch.zeros(batch.n, dtype=torch.float32, device=batch.device)
    if batch.n == 0:
        return out
    sources = _Sources(layout, batch, pooling, gradient, out)
    for one in layout.classes:
        side = batch.side_of(one)
        block = max(1, (4096 if INTERPRETED else 256) // one.columns)
        launch(
            gradients.weight_gradient_kernel,
            blocks(batch.n, block),
            (
                batch.slots,
                batch.entry_of,
                batch.bounds,
                batch.bounds_step,
                batch.n,
                layout.meta,
                layout.floats,
                layout.tables,
                one.number,
                bits(gradient) if side is None else bits(side),
                bits(sources.gradient),
                sources.stride,
                sources.bag_of,
                sources.columns,
                sources.batch_size,
                sources.offsets,
                out,
            ),
            (
                one.dim,
                one.columns,
                one.stride,
                one.type,
                *sources.constants[:-1],
                block,
                batch.one,
                layout.one_class,
                side is not None,
            ),
            warps=1,
            device=batch.device,
        )
    return out
