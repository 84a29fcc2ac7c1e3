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
    HEADS,
    KEYS,
    LFU,
    NO_EVICTION,
    PAIR,
    REJECTED,
    SCORES,
    TIMES,
    TOUCHED,
    entry_table,
    field,
    of_class,
    table_of,
)


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
):
    """Position of each id in its bucket, int32, or -1. LINE digests are read at a time."""
    position = tl.full([BLOCK], -1, tl.int32)
    start = buckets * WIDTH
    begin = 0
    while begin < WIDTH:
        low, high = matches(digests_at + start + begin, digests, mask & (position < 0), LINE, BLOCK)
        pending = (low | high) != 0
        while tl.max(pending.to(tl.int32), axis=0) > 0:
            candidate = lowest_bit(low, high)
            places = keys_at + (start + begin + candidate) * 8
            key = tl.load(places.to(tl.pointer_type(tl.int64)), mask=pending, other=0)
            hit = pending & (key == ids)
            position = tl.where(hit, begin + candidate, position)
            low, high = without_lowest(low, high)
            pending = pending & (hit == 0) & ((low | high) != 0)
        begin += LINE
    return position


@kernel
def lookup_kernel(
    ids_ptr, bounds_ptr, count, meta_ptr, tables, number, slots_ptr, WIDTH: tl.constexpr,
    LINE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr,
):  # fmt: skip
    """slots[i] = the slot of ids[i], or FAILED. Changes no table."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    table = table_of(i, bounds_ptr, tables, mask, ONE)
    mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
    ids = tl.load(ids_ptr + i, mask=mask, other=0)
    hashes = hash_id(ids)
    buckets = bucket_of(hashes, field(meta_ptr, tables, BUCKETS, table, mask))
    keys_at = field(meta_ptr, tables, KEYS, table, mask)
    digests_at = field(meta_ptr, tables, DIGESTS, table, mask)
    position = probe(ids, buckets, digest_of(hashes), keys_at, digests_at, mask, WIDTH, LINE, BLOCK)
    slot = tl.where(position >= 0, (buckets * WIDTH + position).to(tl.int32), FAILED)
    tl.store(slots_ptr + i, slot, mask=mask)


@triton.jit
def saturated_sum(a, b):
    """a + b of unsigned 64-bit numbers in int64; stops at the largest."""
    total = a.to(tl.uint64) + b.to(tl.uint64)
    return tl.where(total < a.to(tl.uint64), 0xFFFFFFFFFFFFFFFF, total).to(tl.int64)


@kernel
def find_kernel(
    ids_ptr, tables_ptr, count_ptr, meta_ptr, tables, number, batch_scores_ptr, entry_counts_ptr,
    codes_ptr, known_ptr, slots_ptr, next_ptr, WIDTH: tl.constexpr, LINE: tl.constexpr,
    BLOCK: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr, STRATEGY: tl.constexpr,
    WRITE: tl.constexpr, CODES: tl.constexpr, SCORED: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Finds the entries of a batch.

    WRITE 0: slots[e] = slot, or GONE. WRITE 1: hits also take their new score (if SCORED) and are
    marked as touched, and each missing entry is put on the list of its bucket. CODES: entries whose
    code is FAILED or says that they were rejected are left as they are; codes_ptr is not slots_ptr.
    KNOWN: the slots, or -1, are known already.
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(count_ptr)
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
            ids, buckets, digest_of(hashes), keys_at, digests_at, wanted, WIDTH, LINE, BLOCK
        )
        slot = buckets * WIDTH + position
        hit = position >= 0
    found = tl.where(hit, slot.to(tl.int32), GONE)
    tl.store(slots_ptr + e, tl.where(wanted, found, code), mask=mask)
    if WRITE:
        if SCORED:
            scores_at = field(meta_ptr, tables, SCORES, table, wanted) + slot * 8
            scores = scores_at.to(tl.pointer_type(tl.int64))
            if STRATEGY == LFU or STRATEGY == PAIR:
                before = tl.load(scores, mask=hit, other=0)
                times = tl.load(entry_counts_ptr + e, mask=hit, other=0)
                tl.store(scores, saturated_sum(before, times), mask=hit)
            elif STRATEGY != NO_EVICTION:
                tl.store(scores, tl.load(batch_scores_ptr + table, mask=hit, other=0), mask=hit)
            if STRATEGY == PAIR:
                times_at = field(meta_ptr, tables, TIMES, table, wanted) + slot * 8
                now = tl.load(batch_scores_ptr + tables + table, mask=hit, other=0)
                tl.store(times_at.to(tl.pointer_type(tl.int64)), now, mask=hit)
        if STRATEGY != NO_EVICTION:
            touch(meta_ptr, tables, table, slot, hit)
        heads_at = field(meta_ptr, tables, HEADS, table, wanted) + buckets * 4
        heads = heads_at.to(tl.pointer_type(tl.int32))
        missing = wanted & (hit == 0)
        before = tl.atomic_xchg(heads, e, mask=missing, sem="relaxed")
        tl.store(next_ptr + e, before, mask=missing)


@triton.jit
def touch(meta_ptr, tables, table, slot, mask):
    """Mark slots as used by the running batch: it evicts none of them."""
    words = field(meta_ptr, tables, TOUCHED, table, mask) + (slot >> 5) * 4
    bits = tl.full(slot.shape, 1, tl.int32) << (slot & 31).to(tl.int32)
    tl.atomic_or(words.to(tl.pointer_type(tl.int32)), bits, mask=mask, sem="relaxed")


@triton.jit
def untouch(meta_ptr, tables, table, slot, mask):
    """Forget the marks around these slots; all of a batch go together."""
    words = field(meta_ptr, tables, TOUCHED, table, mask) + (slot >> 5) * 4
    tl.store(words.to(tl.pointer_type(tl.int32)), tl.zeros(slot.shape, tl.int32), mask=mask)


@kernel
def mark_kernel(
    slots_ptr, tables_ptr, count_ptr, meta_ptr, tables, BLOCK: tl.constexpr, ONE: tl.constexpr,
    ON: tl.constexpr,
):  # fmt: skip
    """Marks (ON) or unmarks the slots of another batch's entries."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(count_ptr)
    table = entry_table(tables_ptr, e, mask, ONE)
    slot = tl.load(slots_ptr + e, mask=mask, other=-1).to(tl.int64)
    if ON:
        touch(meta_ptr, tables, table, slot, mask & (slot >= 0))
    else:
        untouch(meta_ptr, tables, table, slot, mask & (slot >= 0))


@kernel
def buckets_kernel(ids_ptr, count, buckets, out_ptr, BLOCK: tl.constexpr):
    """out[i] = the bucket of ids[i] in a table of ``buckets``, int64."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    ids = tl.load(ids_ptr + i, mask=mask, other=0)
    tl.store(out_ptr + i, bucket_of(hash_id(ids), buckets.to(tl.int64)), mask=mask)
