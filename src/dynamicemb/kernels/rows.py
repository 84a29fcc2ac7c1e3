"""Reading and writing rows: copies, pooling, given rows."""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.launch import kernel
from dynamicemb.kernels.layout import (
    EVICTED,
    MISSING,
    QUEUES,
    RECORD,
    REJECTED,
    ROWS,
    SCORES,
    STATE,
    TIMES,
    field,
    of_class,
    table_of,
)
from dynamicemb.kernels.numbers import bytes_of, narrow, row_starts, typed, widen
from dynamicemb.kernels.queues import QUEUE, empty_queue

#: Entries that :func:`write_kernel` writes.
EVERY, STAYING, LISTED = map(tl.constexpr, range(3))


@triton.jit
def load_rows(
    slots, table, mask, meta_ptr, floats_ptr, side_ptr, tables, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TYPE: tl.constexpr, MISS: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Stored numbers of the rows of ``slots``, [.., COLUMNS]. Without a row: the missing value of
    the table (MISS), else a side row of a rejected id (SIDE), else 0."""
    column = tl.arange(0, COLUMNS)
    there = mask & (slots >= 0)
    at = field(meta_ptr, tables, ROWS, table, there)
    at = at + slots.to(tl.int64) * (STRIDE * bytes_of(TYPE))
    inside = there[:, None]
    if COLUMNS != DIM:
        inside = inside & (column < DIM)[None, :]
    values = tl.load(typed(at, TYPE)[:, None] + column[None, :], mask=inside, other=0)
    if MISS:
        missing = tl.load(floats_ptr + MISSING * tables + table, mask=mask, other=0.0)
        values = tl.where(there[:, None], values, narrow(missing, TYPE)[:, None])
    if SIDE:
        rejected = mask & (slots <= REJECTED)
        at = (slots - REJECTED).to(tl.int64) * -DIM
        inside = rejected[:, None] & (column < DIM)[None, :]
        aside = tl.load(side_ptr + at[:, None] + column[None, :], mask=inside, other=0)
        values = tl.where(rejected[:, None], aside, values)
    return values


@triton.jit
def store_rows(
    values, i, mask, out_ptr, out_stride, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    TYPE: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out[i] = values, from the numbers of a table to those of an output."""
    if TYPE != OUT:
        values = narrow(widen(values, TYPE), OUT)
    column = tl.arange(0, COLUMNS)
    inside = mask[:, None]
    if COLUMNS != DIM:
        inside = inside & (column < DIM)[None, :]
    start = row_starts(i.to(tl.int64) * out_stride, OUT, ALIGNED)
    tl.store(out_ptr + start[:, None] + column[None, :], values, mask=inside)


@kernel
def gather_kernel(
    slots_ptr, entry_of_ptr, bounds_ptr, bounds_step, count, meta_ptr, floats_ptr, tables, number,
    side_ptr, out_ptr, out_stride, DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    TYPE: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
    ONE_CLASS: tl.constexpr, ENTRIES: tl.constexpr, MISS: tl.constexpr, SIDE: tl.constexpr,
    ALIGNED: tl.constexpr, POINTED: tl.constexpr,
):  # fmt: skip
    """out[i] = the row of occurrence i. ENTRIES: its slot is that of its entry. ALIGNED, here and
    below: rows of ``out`` start at multiples of 16 bytes. POINTED: the address of the output is at
    ``out_ptr``."""
    if POINTED:
        out_ptr = typed(tl.load(out_ptr), OUT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    table = table_of(i, bounds_ptr, bounds_step, tables, mask, ONE)
    mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
    if ENTRIES:
        place = tl.load(entry_of_ptr + i, mask=mask, other=0)
    else:
        place = i
    slots = tl.load(slots_ptr + place, mask=mask, other=-1)
    values = load_rows(
        slots, table, mask, meta_ptr, floats_ptr, side_ptr, tables, DIM, COLUMNS, STRIDE, TYPE,
        MISS, SIDE,
    )  # fmt: skip
    store_rows(values, i, mask, out_ptr, out_stride, DIM, COLUMNS, TYPE, OUT, ALIGNED)


@kernel
def pool_kernel(
    slots_ptr, entry_of_ptr, offsets_ptr, feature_table_ptr, feature_column_ptr, weights_ptr, bags,
    batch_size, count, meta_ptr, floats_ptr, tables, number, side_ptr, out_ptr, out_stride,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TYPE: tl.constexpr,
    OUT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, ONE_CLASS: tl.constexpr,
    ENTRIES: tl.constexpr, MISS: tl.constexpr, SIDE: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The output of each bag: its rows added from left to right in float32."""
    bag = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = bag < bags
    feature = bag // batch_size
    table = tl.load(feature_table_ptr + feature, mask=mask, other=0)
    mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
    begin, end = bag_range(bag, offsets_ptr, count, mask)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    place = begin
    while tl.max(end - place, axis=0) > 0:
        for step in tl.static_range(UNROLL):
            occurrence = place + step
            more = mask & (occurrence < end)
            if ENTRIES:
                entry = tl.load(entry_of_ptr + occurrence, mask=more, other=0)
            else:
                entry = occurrence
            slots = tl.load(slots_ptr + entry, mask=more, other=-1)
            values = load_rows(
                slots, table, more, meta_ptr, floats_ptr, side_ptr, tables, DIM, COLUMNS, STRIDE,
                TYPE, MISS, SIDE,
            )  # fmt: skip
            values = widen(values, TYPE)
            if WEIGHTED:
                weight = tl.load(weights_ptr + occurrence, mask=more, other=0.0)
                values = tl.where(more[:, None], values * weight[:, None], 0.0)
            total = total + values
        place += UNROLL
    if MEAN:
        length = end - begin
        divisor = tl.where(length > 1, length, 1).to(tl.float32)
        total = tl.where((length > 1)[:, None], tl.div_rn(total, divisor[:, None]), total)
    column = tl.arange(0, COLUMNS)
    inside = mask[:, None]
    if COLUMNS != DIM:
        inside = inside & (column < DIM)[None, :]
    start = tl.load(feature_column_ptr + feature, mask=mask, other=0)
    at = row_starts((bag % batch_size).to(tl.int64) * out_stride + start, OUT, ALIGNED)
    tl.store(out_ptr + at[:, None] + column[None, :], narrow(total, OUT), mask=inside)


@triton.jit
def bag_range(bag, offsets_ptr, count, mask):
    """(begin, end) of bags, int32, inside the ids whatever the offsets say."""
    begin = tl.load(offsets_ptr + bag, mask=mask, other=0)
    end = tl.load(offsets_ptr + bag + 1, mask=mask, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), count)
    end = tl.minimum(tl.maximum(end, 0), count)
    return begin.to(tl.int32), end.to(tl.int32)


@kernel
def bags_kernel(offsets_ptr, bags, count, bag_of_ptr, BLOCK: tl.constexpr):
    """bag_of[i] = the bag of occurrence i."""
    bag = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = bag < bags
    place, end = bag_range(bag, offsets_ptr, count, mask)
    while tl.max(end - place, axis=0) > 0:
        tl.store(bag_of_ptr + place, bag, mask=place < end)
        place += 1


@kernel
def write_kernel(
    entries_ptr, count_ptr, slots_ptr, last_ptr, embeddings_ptr, state_ptr, scores_ptr, meta_ptr,
    tables, width, DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    TYPE: tl.constexpr, STATE_DIM: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    STATE_STRIDE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, STATED: tl.constexpr,
    SCORED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Writes given rows of one table: embeddings, then state and scores where they are given; the
    data of entry e are at last[e]. PART: EVERY entry; those that evicted nothing (STAYING), as
    ``entries`` says of each, see ``commit_kernel``; those that ``entries`` lists (LISTED).
    ``width``: slots of a bucket."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(count_ptr)
    if PART == STAYING:
        mask = mask & (tl.load(entries_ptr + e, mask=mask, other=EVICTED) != EVICTED)
    if PART == LISTED:
        e = tl.load(entries_ptr + e, mask=mask, other=0)
    slot = tl.load(slots_ptr + e, mask=mask, other=-1).to(tl.int64)
    mask = mask & (slot >= 0)
    if tl.max(mask.to(tl.int32), axis=0) > 0:
        table = e * 0
        place = tl.load(last_ptr + e, mask=mask, other=0).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        inside = mask[:, None] & (column < DIM)[None, :]
        given = embeddings_ptr + place[:, None] * DIM + column[None, :]
        at = field(meta_ptr, tables, ROWS, table, mask) + slot * (STRIDE * bytes_of(TYPE))
        places = typed(at, TYPE)[:, None] + column[None, :]
        tl.store(places, tl.load(given, mask=inside, other=0), mask=inside)
        if STATED:
            column = tl.arange(0, STATE_COLUMNS)
            inside = mask[:, None] & (column < STATE_DIM)[None, :]
            given = state_ptr + place[:, None] * STATE_DIM + column[None, :]
            at = field(meta_ptr, tables, STATE, table, mask) + slot * (STATE_STRIDE * 4)
            places = at.to(tl.pointer_type(tl.float32))[:, None] + column[None, :]
            tl.store(places, tl.load(given, mask=inside, other=0.0), mask=inside)
        if SCORED:
            at = field(meta_ptr, tables, SCORES, table, mask) + slot * RECORD
            value = tl.load(scores_ptr + place * WORDS + (WORDS - 1), mask=mask, other=0)
            tl.store(at.to(tl.pointer_type(tl.int64)), value, mask=mask)
            queues = field(meta_ptr, tables, QUEUES, table, mask)
            empty_queue(queues + slot // width * QUEUE, mask & (queues != 0))
            if WORDS == 2:
                at = field(meta_ptr, tables, TIMES, table, mask) + slot * 8
                value = tl.load(scores_ptr + place * 2, mask=mask, other=0)
                tl.store(at.to(tl.pointer_type(tl.int64)), value, mask=mask)
