"""Rows out of the tables of a group: copied, found and copied at once, added to bags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dynamicemb.kernels import find, rows
from dynamicemb.kernels.launch import INTERPRETED, aligned, blocks, launch
from dynamicemb.options import DynamicEmbPoolingMode
from dynamicemb.table.cuda_layout import Layout, TableClass, bits
from dynamicemb.table.numbers import TYPES
from dynamicemb.table.rows import Pooling

if TYPE_CHECKING:
    from dynamicemb.table.cuda_batch import Batch

#: Columns from which rows are found and copied in one launch; long rows are few per program.
#: Measured on an H200.
FOUND_ROW = 16 if INTERPRETED else 64
LONG_ROW = 128
#: Numbers that one program copies where slots are known.
GATHER_TILE = 16384 if INTERPRETED else 2048


def one_launch(layout: Layout) -> bool:
    """Whether finding and copying together is the faster way: for long rows."""
    return all(not one.wide and one.columns >= FOUND_ROW for one in layout.classes)


def _found_rows(columns: int) -> int:
    """Rows that a program finds and copies."""
    return 32 if INTERPRETED or columns < LONG_ROW else max(1, 1024 // columns)


def find_and_copy(
    layout: Layout,
    ids: torch.Tensor,
    bounds: torch.Tensor | None,
    out: torch.Tensor,
    type_: int,
    slots: torch.Tensor | None,
) -> None:
    """Rows of ids, found and copied in one launch per class."""
    count = ids.shape[0]  # len() of a tensor is Python code of torch
    for one in layout.classes:
        block = _found_rows(one.columns)
        launch(
            find.find_rows_kernel,
            blocks(count, block),
            (
                ids,
                *pointer_and_step(layout, bounds),
                count,
                layout.meta,
                layout.floats,
                layout.tables,
                one.number,
                ids if slots is None else slots,
                bits(out),
                out.stride(0),
            ),
            (
                one.width,
                one.line,
                one.dim,
                one.columns,
                one.stride,
                one.type,
                type_,
                block,
                layout.tables == 1,
                layout.one_class,
                slots is not None,
                layout.aligned_rows(out, False),
            ),
            warps=1,
            device=layout.device,
        )


def gather(
    layout: Layout,
    one: TableClass,
    slots: torch.Tensor,
    entry_of: torch.Tensor | None,
    bounds: torch.Tensor | None,
    out: torch.Tensor,
    type_: int,
    *,
    missing: bool,
    side: torch.Tensor | None,
    address: torch.Tensor | None = None,
) -> None:
    """Rows of slots, or of the entries that have them. ``address``: where the address of an output
    like ``out`` will be."""
    count = out.shape[0]
    block = max(1, GATHER_TILE // one.columns)
    launch(
        rows.gather_kernel,
        blocks(count, block),
        (
            slots,
            slots if entry_of is None else entry_of,
            *pointer_and_step(layout, bounds),
            count,
            layout.meta,
            layout.floats,
            layout.tables,
            one.number,
            bits(out) if side is None else bits(side),
            bits(out) if address is None else address,
            out.stride(0),
        ),
        (
            one.dim,
            one.columns,
            one.stride,
            one.type,
            type_,
            block,
            layout.tables == 1,
            layout.one_class,
            entry_of is not None,
            missing,
            side is not None,
            layout.aligned_rows(out, False),
            address is not None,
        ),
        warps=1,
        device=layout.device,
    )


def read_batch(
    layout: Layout,
    batch: Batch,
    out: torch.Tensor,
    address: torch.Tensor | None = None,
) -> None:
    """The row of every occurrence in a batch. ``address``: as of :func:`gather`."""
    for one in layout.classes:
        gather(
            layout, one, batch.slots, batch.entry_of, batch.bounds, out, TYPES[out.dtype],
            missing=False, side=batch.side_of(one), address=address,
        )  # fmt: skip


def pool(
    layout: Layout,
    slots: torch.Tensor,
    entry_of: torch.Tensor | None,
    pooling: Pooling,
    out: torch.Tensor,
    count: int,
    *,
    missing: bool,
    sides: Mapping[tuple[int, int], torch.Tensor],
) -> None:
    tables, columns = layout.feature_arrays(pooling.features)
    bags = len(tables) * pooling.batch_size
    assert pooling.offsets is not None
    # With weights, missing ids and tables that differ, more rows do not fit the registers.
    crowded = pooling.weights is not None and missing and not layout.one_class
    unroll = 2 if INTERPRETED or crowded else 4
    for one in layout.classes:
        side = sides.get((one.dim, one.type))
        block = max(1, (4096 if INTERPRETED else 256) // one.columns)
        launch(
            rows.pool_kernel,
            blocks(bags, block),
            (
                slots,
                slots if entry_of is None else entry_of,
                aligned(pooling.offsets),
                tables,
                columns,
                out if pooling.weights is None else aligned(pooling.weights),
                bags,
                pooling.batch_size,
                count,
                layout.meta,
                layout.floats,
                layout.tables,
                one.number,
                bits(out) if side is None else bits(side),
                bits(out),
                out.stride(0),
            ),
            (
                one.dim,
                one.columns,
                one.stride,
                one.type,
                TYPES[pooling.dtype],
                block,
                unroll,
                layout.one_class,
                entry_of is not None,
                missing,
                side is not None,
                pooling.mode is DynamicEmbPoolingMode.MEAN,
                pooling.weights is not None,
                layout.aligned_rows(out, True),
            ),
            warps=1,
            device=layout.device,
        )


def pointer_and_step(layout: Layout, bounds: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Bounds as kernels take them; some pointer where there are none."""
    return (layout.meta, 1) if bounds is None else (bounds, bounds.stride(0))
