"""Finding ids, and the first step of a training batch."""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.hashing import (
    bucket_of,
    digest_of,
    hash_id,
    lowest_bit,
    matches,
    without_lowest,
)
from dynamicemb.kernels.launch import kernel
from dynamicemb.kernels.layout import (
    BUCKETS,
    DIGESTS,
    FAILED,
    GONE,
    HEAD,
    HEADS,
    KEYS,
    LFU,
    MARK,
    NO_EVICTION,
    PAIR,
    QUEUES,
    RECORD,
    REJECTED,
    SCORE,
    SCORES,
    STAMPS,
    TIME,
    TIMES,
    TOUCHED,
    entry_table,
    field,
    of_class,
    table_of,
)
from dynamicemb.kernels.queues import QUEUE, empty_queue
from dynamicemb.kernels.rows import load_rows, store_rows


@triton.jit
def probe(
    ids,
    buckets,
    digests,
    keys_at,
    digests_at,
    mask,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Position of each id in its bucket, int32, or -1. LINE digests are read at a time. KEEP: as of
    ``matches``."""
    position = tl.full([BLOCK], -1, tl.int32)
    start = buckets * WIDTH
    begin = 0
    while begin < WIDTH:
        wanted = mask & (position < 0)
        low, high = matches(digests_at + start + begin, digests, wanted, LINE, BLOCK, KEEP)
        pending = (low | high) != 0
        while tl.max(pending.to(tl.int32), axis=0) > 0:
            candidate = lowest_bit(low, high)
            places = keys_at + (start + begin + candidate) * RECORD
            key = tl.load(places.to(tl.pointer_type(tl.int64)), mask=pending, other=0)
            hit = pending & (key == ids)
            position = tl.where(hit, begin + candidate, position)
            low, high = without_lowest(low, high)
            pending = pending & (hit == 0) & ((low | high) != 0)
        begin += LINE
    return position


@kernel
def lookup_kernel(
    ids_ptr, bounds_ptr, bounds_step, count, meta_ptr, tables, number, slots_ptr,
    WIDTH: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
    ONE_CLASS: tl.constexpr,
):  # fmt: skip
    """slots[i] = the slot of ids[i], or FAILED. Changes no table."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    table = table_of(i, bounds_ptr, bounds_step, tables, mask, ONE)
    mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
    ids = tl.load(ids_ptr + i, mask=mask, other=0)
    hashes = hash_id(ids)
    buckets = bucket_of(hashes, field(meta_ptr, tables, BUCKETS, table, mask))
    keys_at = field(meta_ptr, tables, KEYS, table, mask)
    digests_at = field(meta_ptr, tables, DIGESTS, table, mask)
    position = probe(
        ids, buckets, digest_of(hashes), keys_at, digests_at, mask, WIDTH, LINE, BLOCK, True
    )
    slot = tl.where(position >= 0, (buckets * WIDTH + position).to(tl.int32), FAILED)
    tl.store(slots_ptr + i, slot, mask=mask)


@kernel
def find_rows_kernel(
    ids_ptr, bounds_ptr, bounds_step, count, meta_ptr, floats_ptr, tables, number, slots_ptr,
    out_ptr, out_stride, WIDTH: tl.constexpr, LINE: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TYPE: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr, SLOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """out[i] = the row of ids[i], or the missing value; with SLOTS, slots[i] as ``lookup``.
    ALIGNED: as of ``gather_kernel``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    table = table_of(i, bounds_ptr, bounds_step, tables, mask, ONE)
    mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
    ids = tl.load(ids_ptr + i, mask=mask, other=0)
    hashes = hash_id(ids)
    buckets = bucket_of(hashes, field(meta_ptr, tables, BUCKETS, table, mask))
    keys_at = field(meta_ptr, tables, KEYS, table, mask)
    digests_at = field(meta_ptr, tables, DIGESTS, table, mask)
    position = probe(
        ids, buckets, digest_of(hashes), keys_at, digests_at, mask, WIDTH, LINE, BLOCK, True
    )
    slot = tl.where(position >= 0, (buckets * WIDTH + position).to(tl.int32), FAILED)
    if SLOTS:
        tl.store(slots_ptr + i, slot, mask=mask)
    values = load_rows(
        slot, table, mask, meta_ptr, floats_ptr, out_ptr, tables, DIM, COLUMNS, STRIDE, TYPE, True,
        False,
    )  # fmt: skip
    store_rows(values, i, mask, out_ptr, out_stride, DIM, COLUMNS, TYPE, OUT, ALIGNED)


@triton.jit
def saturated_sum(a, b):
    """a + b of unsigned 64-bit numbers in int64; stops at the largest."""
    total = a.to(tl.uint64) + b.to(tl.uint64)
    return tl.where(total < a.to(tl.uint64), 0xFFFFFFFFFFFFFFFF, total).to(tl.int64)


@kernel
def find_kernel(
    ids_ptr, tables_ptr, count_ptr, meta_ptr, tables, number, batch_ptr, entry_counts_ptr,
    codes_ptr, known_ptr, slots_ptr, next_ptr, free_ptr, WIDTH: tl.constexpr, LINE: tl.constexpr,
    BLOCK: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr, STRATEGY: tl.constexpr,
    WRITE: tl.constexpr, CODES: tl.constexpr, MARKED: tl.constexpr, OTHER: tl.constexpr,
    KNOWN: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Finds the entries of a batch.

    WRITE 0: slots[e] = slot, or GONE. WRITE 1: hits also take their new score and are marked as
    touched (if MARKED), and each missing entry is put on the list of its bucket. OTHER: the score
    may be one that a row had before, or lower, so the queues of buckets are emptied. CODES: entries
    whose code is FAILED or says that they were rejected are left as they are; codes_ptr is not
    slots_ptr. KNOWN: the slots, or -1, are known already. FREE: free[2 * e] and the number after it
    are the free slots of a missing entry's bucket, as bits; a bucket is one line.
    """
    count = tl.load(count_ptr)
    start = tl.program_id(0) * BLOCK
    while start < count:  # mostly once: the host guesses how many entries there are
        e = start + tl.arange(0, BLOCK)
        mask = e < count
        table = entry_table(tables_ptr, e, mask, ONE)
        mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
        wanted = mask
        code = e * 0
        if CODES:
            code = tl.load(codes_ptr + e, mask=mask, other=0)
            wanted = mask & (code != FAILED) & (code > REJECTED)
        ids = tl.load(ids_ptr + e, mask=wanted, other=0)
        hashes = hash_id(ids)
        buckets = bucket_of(hashes, field(meta_ptr, tables, BUCKETS, table, wanted))
        keys_at = field(meta_ptr, tables, KEYS, table, wanted)
        digests_at = field(meta_ptr, tables, DIGESTS, table, wanted)
        if KNOWN:
            slot = tl.load(known_ptr + e, mask=wanted, other=-1).to(tl.int64)
            hit = slot >= 0
        else:
            position = probe(
                ids, buckets, digest_of(hashes), keys_at, digests_at, wanted, WIDTH, LINE, BLOCK,
                False,
            )  # fmt: skip
            slot = buckets * WIDTH + position
            hit = position >= 0
        found = tl.where(hit, slot.to(tl.int32), GONE)
        tl.store(slots_ptr + e, tl.where(wanted, found, code), mask=mask)
        if WRITE:
            scores_at = field(meta_ptr, tables, SCORES, table, wanted) + slot * RECORD
            scores = scores_at.to(tl.pointer_type(tl.int64))
            if STRATEGY == LFU or STRATEGY == PAIR:
                before = tl.load(scores, mask=hit, other=0)
                times = tl.load(entry_counts_ptr + e, mask=hit, other=0)
                tl.store(scores, saturated_sum(before, times), mask=hit)
            elif STRATEGY != NO_EVICTION:
                score = field(batch_ptr, tables, SCORE, table, hit)
                tl.store(scores, score, mask=hit)
            if STRATEGY == PAIR:
                times_at = field(meta_ptr, tables, TIMES, table, wanted) + slot * 8
                now = field(batch_ptr, tables, TIME, table, hit)
                tl.store(times_at.to(tl.pointer_type(tl.int64)), now, mask=hit)
            if MARKED and STRATEGY != NO_EVICTION:
                touch(meta_ptr, batch_ptr, tables, table, slot, hit)
            heads_at = field(meta_ptr, tables, HEADS, table, wanted) + buckets * HEAD
            heads = heads_at.to(tl.pointer_type(tl.int32))
            if OTHER and STRATEGY != LFU and STRATEGY != PAIR and STRATEGY != NO_EVICTION:
                queues = field(meta_ptr, tables, QUEUES, table, wanted)
                empty_queue(queues + buckets * QUEUE, wanted)
            missing = wanted & (hit == 0)
            before = tl.atomic_xchg(heads, e, mask=missing, sem="relaxed")
            tl.store(next_ptr + e, before, mask=missing)
            if FREE:
                if tl.max(missing.to(tl.int32), axis=0) > 0:
                    # The line is still near.
                    lines = digests_at + buckets * WIDTH
                    low, high = matches(lines, e * 0, missing, LINE, BLOCK)
                    tl.store(free_ptr + 2 * e, low, mask=missing)
                    tl.store(free_ptr + 2 * e + 1, high, mask=missing)
        start += tl.num_programs(0) * BLOCK


@triton.jit
def touch(meta_ptr, batch_ptr, tables, table, slot, mask):
    """Mark slots as used by the running batch: it evicts none of them."""
    places = field(meta_ptr, tables, TOUCHED, table, mask) + slot
    mark = field(batch_ptr, tables, MARK, table, mask).to(tl.uint8)
    tl.store(places.to(tl.pointer_type(tl.uint8)), mark, mask=mask)


@kernel
def mark_kernel(
    slots_ptr, tables_ptr, count_ptr, meta_ptr, batch_ptr, tables, BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """Marks the slots of another batch's entries as used by the running one."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(count_ptr)
    table = entry_table(tables_ptr, e, mask, ONE)
    slot = tl.load(slots_ptr + e, mask=mask, other=-1).to(tl.int64)
    touch(meta_ptr, batch_ptr, tables, table, slot, mask & (slot >= 0))


@kernel
def stamp_kernel(
    slots_ptr, tables_ptr, count_ptr, meta_ptr, now_ptr, tables, BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """Writes down that the rows of entries changed, where their table does that; now[t]: when."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(count_ptr)
    table = entry_table(tables_ptr, e, mask, ONE)
    slot = tl.load(slots_ptr + e, mask=mask, other=-1).to(tl.int64)
    stamps = field(meta_ptr, tables, STAMPS, table, mask)
    mask = mask & (slot >= 0) & (stamps != 0)
    places = (stamps + slot * 4).to(tl.pointer_type(tl.int32))
    tl.store(places, tl.load(now_ptr + table, mask=mask, other=0), mask=mask)


@kernel
def buckets_kernel(ids_ptr, count, buckets, out_ptr, BLOCK: tl.constexpr):
    """out[i] = the bucket of ids[i] in a table of ``buckets``, int64."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    ids = tl.load(ids_ptr + i, mask=mask, other=0)
    tl.store(out_ptr + i, bucket_of(hash_id(ids), buckets.to(tl.int64)), mask=mask)
