"""Backward: gradients summed per row in a fixed order, and the updates."""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.dedup import span_of
from dynamicemb.kernels.launch import kernel
from dynamicemb.kernels.layout import (
    COUNTERS,
    DROPPED,
    GONE,
    MAX_GRADIENT,
    ROWS,
    SEED,
    STATE,
    STEP_NUMBER,
    entry_table,
    field,
    of_class,
    table_of,
)
from dynamicemb.kernels.numbers import (
    FLOAT32,
    ROUNDING_STREAM,
    bytes_of,
    narrow,
    narrow_stochastic,
    ordered_dot,
    philox,
    row_starts,
    typed,
    widen,
)
from dynamicemb.kernels.optimizers import (
    ADAGRAD,
    ADAM,
    FTRL,
    MOMENTUM_SGD,
    PARTIAL_ROWWISE_ADAM,
    ROWWISE_ADAGRAD,
    SGD,
    optimize,
    step_number,
)
from dynamicemb.kernels.rows import load_rows

#: Occurrences that are added one after the other; the sums of such blocks are then added in order.
SUM_BLOCK = 256
#: Ids that occur more often than this are summed by programs of their own, many loads ahead.
HOT = 8
#: Those that occur more often than this begin first: they take longest.
LONG = 64


@triton.jit
def bags_of(occurrence, mask, bag_of_ptr, POOLED: tl.constexpr):
    """(bag, mask): of occurrences; those in no bag, -1, are not in the mask."""
    if POOLED:
        bag = tl.load(bag_of_ptr + occurrence, mask=mask, other=-1)
        return bag, mask & (bag >= 0)
    else:
        return occurrence, mask


@triton.jit
def gradient_places(
    occurrence, bag, mask, feature_column_ptr, batch_size, stride, OUT: tl.constexpr,
    ALIGNED: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Where the gradient row of an occurrence starts, in elements. ALIGNED: at multiples of 16
    bytes."""
    if POOLED:
        feature = bag // batch_size
        column = tl.load(feature_column_ptr + feature, mask=mask, other=0)
        at = (bag % batch_size).to(tl.int64) * stride + column
    else:
        at = occurrence.to(tl.int64) * stride
    return row_starts(at, OUT, ALIGNED)


@triton.jit
def gradient_scales(
    occurrence, bag, mask, offsets_ptr, weights_ptr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The factor an occurrence entered the output with, float32 [BLOCK]."""
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHTED:
        scale = tl.load(weights_ptr + occurrence, mask=mask, other=0.0)
    if MEAN:
        begin = tl.load(offsets_ptr + bag, mask=mask, other=0)
        length = tl.load(offsets_ptr + bag + 1, mask=mask, other=1) - begin
        scale = scale * tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), length.to(tl.float32))
    return scale


@triton.jit
def gradient_rows(
    occurrence, column, clamp, mask, gradient_ptr, stride, bag_of_ptr, feature_column_ptr,
    batch_size, offsets_ptr, weights_ptr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    OUT: tl.constexpr, ALIGNED: tl.constexpr, POOLED: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradients of occurrences, float32 [BLOCK, COLUMNS]; -0.0, which adds
    nothing, where ``mask`` is not set or an occurrence is in no bag."""
    bag, mask = bags_of(occurrence, mask, bag_of_ptr, POOLED)
    at = gradient_places(
        occurrence, bag, mask, feature_column_ptr, batch_size, stride, OUT, ALIGNED, POOLED
    )
    inside = mask[:, None]
    if DIM % COLUMNS != 0:
        inside = inside & (column < DIM)[None, :]
    value = tl.load(gradient_ptr + at[:, None] + column[None, :], mask=inside, other=0)
    value = widen(value, OUT)
    if CLAMP:
        value = tl.where(value < -clamp, -clamp, value)
        value = tl.where(value > clamp, clamp, value)
    if MEAN or WEIGHTED:
        scale = gradient_scales(
            occurrence, bag, mask, offsets_ptr, weights_ptr, MEAN, WEIGHTED, BLOCK
        )
        value = value * scale[:, None]
    return tl.where(mask[:, None], value, -0.0)


@triton.jit
def gradient_sum(
    total, begin, end, column, clamp, mask, order_ptr, gradient_ptr, stride, bag_of_ptr,
    feature_column_ptr, batch_size, offsets_ptr, weights_ptr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr, POOLED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``total`` plus the gradients of the occurrences order[begin..end), one after the other."""
    place = begin
    while tl.max(tl.where(mask, end - place, 0), axis=0) > 0:
        for step in tl.static_range(UNROLL):
            more = mask & (place + step < end)
            occurrence = tl.load(order_ptr + place + step, mask=more, other=0).to(tl.int32)
            total = total + gradient_rows(
                occurrence, column, clamp, more, gradient_ptr, stride, bag_of_ptr,
                feature_column_ptr, batch_size, offsets_ptr, weights_ptr, DIM, COLUMNS, OUT,
                ALIGNED, POOLED, MEAN, WEIGHTED, CLAMP, BLOCK,
            )  # fmt: skip
        place += UNROLL
    return total


@kernel
def hot_sums_kernel(
    spans_ptr, room, hot_base_ptr, hot_entry_ptr, work_ptr, hint_ptr, entry_tables_ptr, meta_ptr,
    tables, number, steps_ptr, order_ptr, gradient_ptr, stride, bag_of_ptr, feature_column_ptr,
    batch_size, offsets_ptr, weights_ptr, sums_ptr, DIM: tl.constexpr, ROW: tl.constexpr,
    COLUMNS: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr, POOLED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """sums[b] = the gradient sum of hot block b, rows of ROW. A program sums COLUMNS columns of
    BLOCK blocks at a time. The host may read the number of blocks from hint[2], at any time."""
    PIECES: tl.constexpr = ROW // COLUMNS
    front = tl.load(work_ptr)
    parts = front + tl.load(work_ptr + 1)
    item = tl.program_id(0)
    if item == 0:
        tl.store(hint_ptr + 2, parts)
    while (item // PIECES) * BLOCK < parts:
        part = (item // PIECES) * BLOCK + tl.arange(0, BLOCK)
        column = (item % PIECES) * COLUMNS + tl.arange(0, COLUMNS)
        mask = part < parts
        part = tl.where(part < front, part, room - 1 - (part - front))
        e = tl.load(hot_entry_ptr + part, mask=mask, other=0)
        table = entry_table(entry_tables_ptr, e, mask, ONE)
        mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
        base = tl.load(hot_base_ptr + e, mask=mask, other=0)
        begin, end = span_of(spans_ptr, e, mask)
        begin += (part - base) * LIMIT
        end = tl.minimum(end, begin + LIMIT)
        clamp = step_number(steps_ptr, tables, MAX_GRADIENT, table, mask)
        total = gradient_sum(
            tl.zeros([BLOCK, COLUMNS], tl.float32), begin, end, column, clamp, mask, order_ptr,
            gradient_ptr, stride, bag_of_ptr, feature_column_ptr, batch_size, offsets_ptr,
            weights_ptr, DIM, COLUMNS, OUT, ALIGNED, POOLED, MEAN, WEIGHTED, CLAMP, BLOCK, UNROLL,
        )  # fmt: skip
        places = sums_ptr + part.to(tl.int64)[:, None] * ROW + column[None, :]
        tl.store(places, total, mask=mask[:, None])
        item += tl.num_programs(0)


@triton.jit
def entry_occurrences(e, mask, spans_ptr, first_ptr):
    """(begin, end, first): as ``span_of``, and the first occurrence."""
    begin, end = span_of(spans_ptr, e, mask)
    return begin, end, tl.load(first_ptr + e, mask=mask, other=0)


@triton.jit
def entry_gradient(
    e, begin, end, first, clamp, mask, hot_base_ptr, hot_sums_ptr, order_ptr, gradient_ptr, stride,
    bag_of_ptr, feature_column_ptr, batch_size, offsets_ptr, weights_ptr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr, POOLED: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, HOT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The summed gradient of entries, float32 [BLOCK, COLUMNS]; 0 beyond the row."""
    column = tl.arange(0, COLUMNS)
    # Most ids occur once: their gradient is asked for without the order being known.
    hot = mask & (end - begin > HOT)
    cold = mask & (hot == 0)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    if OUT == FLOAT32 and not MEAN and not WEIGHTED and not CLAMP:
        # A single plain one is taken as it is: nothing is added to a -0.0.
        total = tl.where((end == begin)[:, None], -0.0, total)
    total = total + gradient_rows(
        first, column, clamp, cold, gradient_ptr, stride, bag_of_ptr, feature_column_ptr,
        batch_size, offsets_ptr, weights_ptr, DIM, COLUMNS, OUT, ALIGNED, POOLED, MEAN, WEIGHTED,
        CLAMP, BLOCK,
    )  # fmt: skip
    total = gradient_sum(
        total, begin + 1, end, column, clamp, cold, order_ptr, gradient_ptr, stride, bag_of_ptr,
        feature_column_ptr, batch_size, offsets_ptr, weights_ptr, DIM, COLUMNS, OUT, ALIGNED,
        POOLED, MEAN, WEIGHTED, CLAMP, BLOCK, UNROLL,
    )  # fmt: skip
    if tl.max(hot.to(tl.int32), axis=0) > 0:
        part = tl.load(hot_base_ptr + e, mask=hot, other=0)
        last = part + tl.where(hot, (end - begin + LIMIT - 1) // LIMIT, 0)
        while tl.max(last - part, axis=0) > 0:
            for step in tl.static_range(UNROLL):
                more = hot & (part + step < last)
                places = hot_sums_ptr + (part + step).to(tl.int64)[:, None] * COLUMNS
                value = tl.load(places + column[None, :], mask=more[:, None], other=-0.0)
                total = total + value
            part += UNROLL
    return total


@kernel
def update_kernel(
    ids_ptr, entry_tables_ptr, count_ptr, slots_ptr, meta_ptr, tables, number, steps_ptr,
    spans_ptr, first_ptr, hot_base_ptr, hot_sums_ptr, order_ptr, gradient_ptr, stride, bag_of_ptr,
    feature_column_ptr, batch_size, offsets_ptr, weights_ptr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TYPE: tl.constexpr, STATE_STRIDE: tl.constexpr,
    OUT: tl.constexpr, ALIGNED: tl.constexpr, POOLED: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, KIND: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr,
    NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr, HOT: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """One optimizer update of every entry's row with the sum of its gradients. Entries whose row
    is gone are counted."""
    count = tl.load(count_ptr)
    start = tl.program_id(0) * BLOCK
    while start < count:  # mostly once: the host guesses how many entries there are
        e = start + tl.arange(0, BLOCK)
        mask = e < count
        # All that does not wait for the slot is asked for together with it.
        slot = tl.load(slots_ptr + e, mask=mask, other=-1)
        table = entry_table(entry_tables_ptr, e, mask, ONE)
        begin, end, first_place = entry_occurrences(e, mask, spans_ptr, first_ptr)
        rows_at = field(meta_ptr, tables, ROWS, table, mask)
        state_at = field(meta_ptr, tables, STATE, table, mask)
        mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
        gone = mask & (slot == GONE)
        counters = field(meta_ptr, tables, COUNTERS, table, gone).to(tl.pointer_type(tl.int64))
        tl.atomic_add(counters + DROPPED, tl.full([BLOCK], 1, tl.int64), mask=gone, sem="relaxed")
        mask = mask & (slot >= 0)
        slot = slot.to(tl.int64)
        column = tl.arange(0, COLUMNS)
        inside = mask[:, None]
        if COLUMNS != DIM:
            inside = inside & (column < DIM)[None, :]
        at = rows_at + slot * (STRIDE * bytes_of(TYPE))
        row = typed(at, TYPE)[:, None] + column[None, :]
        weights = widen(tl.load(row, mask=inside, other=0), TYPE)
        at = state_at + slot * (STATE_STRIDE * 4)
        if KIND == ROWWISE_ADAGRAD:
            states = at.to(tl.pointer_type(tl.float32))
        else:
            states = typed(at, FLOAT32)
        first = tl.zeros([BLOCK, COLUMNS], tl.float32)
        second = first
        scalar = tl.zeros([BLOCK], tl.float32)
        if KIND != SGD and KIND != ROWWISE_ADAGRAD:
            first = tl.load(states[:, None] + column[None, :], mask=inside, other=0.0)
        if KIND == ADAM or KIND == FTRL:
            second = tl.load(states[:, None] + DIM + column[None, :], mask=inside, other=0.0)
        if KIND == ROWWISE_ADAGRAD:
            scalar = tl.load(states, mask=mask, other=0.0)
        if KIND == PARTIAL_ROWWISE_ADAM:
            scalar = tl.load(states + DIM, mask=mask, other=0.0)
        # Rows are on their way while gradients are looked up.
        clamp = step_number(steps_ptr, tables, MAX_GRADIENT, table, mask)
        gradient = entry_gradient(
            e, begin, end, first_place, clamp, mask, hot_base_ptr, hot_sums_ptr, order_ptr,
            gradient_ptr, stride, bag_of_ptr, feature_column_ptr, batch_size, offsets_ptr,
            weights_ptr, DIM, COLUMNS, OUT, ALIGNED, POOLED, MEAN, WEIGHTED, CLAMP, BLOCK, UNROLL,
            HOT, LIMIT,
        )  # fmt: skip
        weights, first, second, scalar = optimize(
            weights, first, second, scalar, gradient, steps_ptr, tables, table, mask, KIND,
            MAXIMIZE, DECAY, NESTEROV, DIM, BLOCK, COLUMNS,
        )  # fmt: skip
        if STOCHASTIC and TYPE != FLOAT32:
            ids = tl.load(ids_ptr + e, mask=mask, other=0)
            seeds = field(meta_ptr, tables, SEED, table, mask)
            numbers = tl.load(steps_ptr + STEP_NUMBER * tables + table, mask=mask, other=0)
            random = philox(seeds, ids, numbers.to(tl.uint32) | ROUNDING_STREAM, BLOCK, COLUMNS)
            tl.store(row, narrow_stochastic(weights, random, TYPE), mask=inside)
        else:
            tl.store(row, narrow(weights, TYPE), mask=inside)
        if KIND == MOMENTUM_SGD or KIND == ADAM or KIND == ADAGRAD or KIND == FTRL:
            tl.store(states[:, None] + column[None, :], first, mask=inside)
        if KIND == PARTIAL_ROWWISE_ADAM:
            tl.store(states[:, None] + column[None, :], first, mask=inside)
            tl.store(states + DIM, scalar, mask=mask)
        if KIND == ADAM or KIND == FTRL:
            tl.store(states[:, None] + DIM + column[None, :], second, mask=inside)
        if KIND == ROWWISE_ADAGRAD:
            tl.store(states, scalar, mask=mask)
        start += tl.num_programs(0) * BLOCK


@kernel
def reduce_kernel(
    entry_tables_ptr, count_ptr, meta_ptr, tables, number, steps_ptr, spans_ptr, first_ptr,
    hot_base_ptr, hot_sums_ptr, order_ptr, gradient_ptr, stride, bag_of_ptr, feature_column_ptr,
    batch_size, offsets_ptr, weights_ptr, sums_ptr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    OUT: tl.constexpr, ALIGNED: tl.constexpr, POOLED: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    ONE: tl.constexpr, ONE_CLASS: tl.constexpr, HOT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """sums[e] = the summed gradient of entry e, float32 rows of DIM."""
    count = tl.load(count_ptr)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < count
    if tl.program_id(0) * BLOCK < count:
        table = entry_table(entry_tables_ptr, e, mask, ONE)
        mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
        clamp = step_number(steps_ptr, tables, MAX_GRADIENT, table, mask)
        begin, end, first = entry_occurrences(e, mask, spans_ptr, first_ptr)
        total = entry_gradient(
            e, begin, end, first, clamp, mask, hot_base_ptr, hot_sums_ptr, order_ptr, gradient_ptr,
            stride, bag_of_ptr, feature_column_ptr, batch_size, offsets_ptr, weights_ptr, DIM,
            COLUMNS, OUT, ALIGNED, POOLED, MEAN, WEIGHTED, CLAMP, BLOCK, UNROLL, HOT, LIMIT,
        )  # fmt: skip
        column = tl.arange(0, COLUMNS)
        inside = mask[:, None] & (column < DIM)[None, :]
        places = sums_ptr + e.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(places, total, mask=inside)


@kernel
def weight_gradient_kernel(
    slots_ptr, entry_of_ptr, bounds_ptr, bounds_step, count, meta_ptr, floats_ptr, tables, number,
    side_ptr, gradient_ptr, stride, bag_of_ptr, feature_column_ptr, batch_size, offsets_ptr,
    out_ptr, DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TYPE: tl.constexpr,
    OUT: tl.constexpr, ALIGNED: tl.constexpr, POOLED: tl.constexpr, MEAN: tl.constexpr,
    BLOCK: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """out[i] = the product of row and gradient of occurrence i, over the length of a mean."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    table = table_of(i, bounds_ptr, bounds_step, tables, mask, ONE)
    mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
    entry = tl.load(entry_of_ptr + i, mask=mask, other=0)
    slots = tl.load(slots_ptr + entry, mask=mask, other=-1)
    row = load_rows(
        slots, table, mask, meta_ptr, floats_ptr, side_ptr, tables, DIM, COLUMNS, STRIDE, TYPE,
        False, SIDE,
    )  # fmt: skip
    bag, covered = bags_of(i, mask, bag_of_ptr, POOLED)
    at = gradient_places(
        i, bag, covered, feature_column_ptr, batch_size, stride, OUT, ALIGNED, POOLED
    )
    column = tl.arange(0, COLUMNS)
    inside = covered[:, None] & (column < DIM)[None, :]
    gradient = tl.load(gradient_ptr + at[:, None] + column[None, :], mask=inside, other=0)
    product = ordered_dot(widen(row, TYPE), widen(gradient, OUT), BLOCK, COLUMNS)
    scale = gradient_scales(i, bag, covered, offsets_ptr, offsets_ptr, MEAN, False, BLOCK)
    tl.store(out_ptr + i, product * scale, mask=mask)
