"""Slots for newcomers: free ones, then evicted ones, and the writes to the index.

Every newcomer knows its rank among those of its bucket from the bucket's list (built in any order),
so each works out its own slot and no two write to one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.hashing import (
    bit_count,
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
    COUNTERS,
    DIGESTS,
    EVICTED,
    EVICTIONS,
    FAILED,
    FAILURES,
    GONE,
    HEAD,
    HEADS,
    HITS,
    INSERTS,
    KEYS,
    LFU,
    LISTED_AT,
    MARK,
    MISSES,
    NO_EVICTION,
    PAIR,
    QUEUES,
    RECORD,
    REJECTED,
    REJECTIONS,
    SCORE,
    SCORES,
    SIZE,
    TIME,
    TIMES,
    TOUCHED,
    entry_table,
    field,
    of_class,
)
from dynamicemb.kernels.queues import QUEUE, SIGN, fill_queues, take_queued

#: Added to the number of victims of a bucket that has free slots.
PARTLY = tl.constexpr(1 << 16)


@kernel
def place_kernel(
    ids_ptr, tables_ptr, count_ptr, meta_ptr, tables, number, batch_ptr, found_ptr, next_ptr,
    choice_ptr, fresh_ptr, free_ptr, work_ptr, victims_ptr, low_ptr, WIDTH: tl.constexpr,
    LINE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, SCANNED: tl.constexpr,
    ONE: tl.constexpr, ONE_CLASS: tl.constexpr, STRATEGY: tl.constexpr, FREE: tl.constexpr,
    MARKED: tl.constexpr, QUEUED: tl.constexpr,
):  # fmt: skip
    """choice[e] of a missing entry: its slot, FAILED, or -2 - q: the q-th slot its bucket evicts.
    fresh[e] is EVICTED if its slot is that of a row, else 0.

    QUEUED: positions of a queue. Where there are any, a full bucket evicts what its queue says, and
    ``low`` lists the first evicting entries of buckets whose queues are to be filled. Otherwise,
    and where a queue has too few, the first evicting entry of a bucket, its leader, finds the slots
    that the bucket evicts, see ``victims_of``; where they are in ``victims`` is written to the
    bucket's head. work[0] counts victims, work[1] low queues. SCANNED: buckets that a program scans
    at a time. FREE: the free slots are known; see ``find_kernel``.
    """
    count = tl.load(count_ptr)
    start = tl.program_id(0) * BLOCK
    while start < count:  # mostly once
        e = start + tl.arange(0, BLOCK)
        mask = e < count
        missing = mask & (tl.load(found_ptr + e, mask=mask, other=0) == GONE)
        table = entry_table(tables_ptr, e, missing, ONE)
        missing = of_class(meta_ptr, tables, table, missing, number, ONE_CLASS)
        if tl.max(missing.to(tl.int32), axis=0) > 0:
            ids = tl.load(ids_ptr + e, mask=missing, other=0)
            buckets = bucket_of(hash_id(ids), field(meta_ptr, tables, BUCKETS, table, missing))
            heads = field(meta_ptr, tables, HEADS, table, missing) + buckets * HEAD
            current = tl.load(heads.to(tl.pointer_type(tl.int32)), mask=missing, other=-1)
            rank = tl.zeros([BLOCK], tl.int32)
            length = tl.zeros([BLOCK], tl.int32)
            while tl.max(current, axis=0) >= 0:
                there = current >= 0
                rank += (there & (current < e)).to(tl.int32)
                length += there.to(tl.int32)
                current = tl.load(next_ptr + current, mask=there, other=-1)

            slots = buckets * WIDTH
            digests_at = field(meta_ptr, tables, DIGESTS, table, missing)
            position = tl.full([BLOCK], -1, tl.int32)
            free = tl.zeros([BLOCK], tl.int32)
            begin = 0
            while begin < WIDTH:
                if FREE:
                    low = tl.load(free_ptr + 2 * e, mask=missing, other=0)
                    high = tl.load(free_ptr + 2 * e + 1, mask=missing, other=0)
                else:
                    low, high = matches(digests_at + slots + begin, rank * 0, missing, LINE, BLOCK)
                here = bit_count(low) + bit_count(high)
                skip = rank - free
                inside = missing & (skip >= 0) & (skip < here)
                skip = tl.where(inside, skip, 0)
                while tl.max(skip, axis=0) > 0:
                    fewer_low, fewer_high = without_lowest(low, high)
                    low = tl.where(skip > 0, fewer_low, low)
                    high = tl.where(skip > 0, fewer_high, high)
                    skip -= 1
                position = tl.where(inside, begin + lowest_bit(low, high), position)
                free += here
                begin += LINE

            order = rank - free
            choice = tl.where(order < 0, (slots + position).to(tl.int32), -2 - order)
            if STRATEGY == NO_EVICTION:
                choice = tl.where(order < 0, choice, FAILED)
            leads = missing & (order == 0)
            fresh = tl.zeros([BLOCK], tl.uint8)
            if QUEUED > 0:
                evicting = missing & (order >= 0)
                if tl.max(evicting.to(tl.int32), axis=0) > 0:
                    scores = field(meta_ptr, tables, SCORES, table, missing) + slots * RECORD
                    full = evicting & (free == 0)
                    queues = field(meta_ptr, tables, QUEUES, table, full) + buckets * QUEUE
                    queued, enough = take_queued(queues, scores, order, length, full, QUEUED)
                    served = full & (enough > 0)
                    choice = tl.where(served, (slots + queued).to(tl.int32), choice)
                    fresh = tl.where(served, EVICTED, 0).to(tl.uint8)
                    low = (leads & (enough < 2)).to(tl.int32)
                    lows = tl.sum(low, axis=0)
                    if lows > 0:
                        at = tl.atomic_add(work_ptr + 1, lows, sem="relaxed")
                        tl.store(low_ptr + at + tl.cumsum(low, axis=0) - 1, e, mask=low > 0)
                    leads = leads & (served == 0)
            tl.store(choice_ptr + e, choice, mask=missing)
            tl.store(fresh_ptr + e, fresh, mask=missing)
            if STRATEGY != NO_EVICTION:
                leading = tl.sum(leads.to(tl.int32), axis=0)
                if leading > 0:
                    wanted = tl.where(leads, tl.minimum(length - free, WIDTH), 0)
                    bases = tl.atomic_add(work_ptr, tl.sum(wanted, axis=0), sem="relaxed")
                    bases = bases + tl.cumsum(wanted, axis=0) - wanted
                    tl.store((heads + LISTED_AT).to(tl.pointer_type(tl.int32)), bases, mask=leads)
                    # Leaders side by side: the k-th is picked out by its number.
                    numbers = tl.where(leads, tl.cumsum(leads.to(tl.int32), axis=0) - 1, -1)
                    wanted = tl.where(free > 0, wanted + PARTLY, wanted)
                    k = 0
                    while k < leading:
                        picked = k + tl.arange(0, SCANNED)
                        chosen = numbers[None, :] == picked[:, None]
                        scanned = tl.sum(tl.where(chosen, buckets.to(tl.int32)[None, :], 0), axis=1)
                        base = tl.sum(tl.where(chosen, bases[None, :], 0), axis=1)
                        most = tl.sum(tl.where(chosen, wanted[None, :], 0), axis=1)
                        owner = scanned * 0
                        if not ONE:
                            owner = tl.sum(tl.where(chosen, table[None, :], 0), axis=1)
                        victims_of(
                            scanned.to(tl.int64), owner, picked < leading, most, base, meta_ptr,
                            batch_ptr, tables, victims_ptr, WIDTH, PADDED, MARKED,
                        )  # fmt: skip
                        k += SCANNED
        start += tl.num_programs(0) * BLOCK


@triton.jit
def victims_of(
    buckets, table, mask, wanted, base, meta_ptr, batch_ptr, tables, victims_ptr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, MARKED: tl.constexpr,
):  # fmt: skip
    """victims[base + q] = the position with the q-th smallest (score, slot) of a bucket among those
    that the batch did not touch, or -1, for q below ``wanted``, which is PARTLY more if the bucket
    has free slots. Touched are those with the batch's mark; if not MARKED, those with its score,
    which no other slot has."""
    lane = tl.arange(0, PADDED)
    slots = buckets * WIDTH
    inside = mask[:, None] & (lane < WIDTH)[None, :]
    scores_at = field(meta_ptr, tables, SCORES, table, mask) + slots * RECORD
    scores = scores_at.to(tl.pointer_type(tl.int64))[:, None] + (lane * (RECORD // 8))[None, :]
    score = tl.load(scores, mask=inside, other=0)
    eligible = inside
    partly = wanted >= PARTLY
    if tl.max(partly.to(tl.int32), axis=0) > 0:
        wanted = tl.where(partly, wanted - PARTLY, wanted)
        digests_at = field(meta_ptr, tables, DIGESTS, table, mask) + slots
        digests = digests_at.to(tl.pointer_type(tl.uint8))[:, None] + lane[None, :]
        digest = tl.load(digests, mask=inside & partly[:, None], other=1)
        eligible = eligible & (digest != 0)
    if MARKED:
        marks_at = field(meta_ptr, tables, TOUCHED, table, mask) + slots
        marks = marks_at.to(tl.pointer_type(tl.uint8))[:, None] + lane[None, :]
        mark = field(batch_ptr, tables, MARK, table, mask).to(tl.uint8)
        eligible = eligible & (tl.load(marks, mask=inside, other=0) != mark[:, None])
    else:
        now = field(batch_ptr, tables, SCORE, table, mask)
        eligible = eligible & (score != now[:, None])
    score = score ^ SIGN  # unsigned order by signed comparison
    q = 0
    most = tl.max(wanted, axis=0)
    while q < most:
        candidate = tl.where(eligible, score, 0x7FFFFFFFFFFFFFFF)
        least = tl.min(candidate, axis=1)
        equal = eligible & (candidate == least[:, None])
        position = tl.min(tl.where(equal, lane[None, :], PADDED), axis=1)
        result = tl.where(position < PADDED, position, -1)
        tl.store(victims_ptr + base + q, result, mask=mask & (q < wanted))
        eligible = eligible & (lane[None, :] != position[:, None])
        q += 1


@triton.jit
def first_and_last(table, mask):
    """The smallest and the largest table of some entries; the former is larger if there is none."""
    first = tl.min(tl.where(mask, table, 0x7FFFFFFF), axis=0)
    return first, tl.max(tl.where(mask, table, -1), axis=0)


@triton.jit
def table_counters(meta_ptr, tables, table):
    return tl.load(meta_ptr + COUNTERS * tables + table).to(tl.pointer_type(tl.int64))


@triton.jit
def count_up(counters, row, flags, mask):
    """Add the number of ``flags`` to a counter of one table."""
    total = tl.sum((flags & mask).to(tl.int64), axis=0)
    if total > 0:
        tl.atomic_add(counters + row, total, sem="relaxed")


@kernel
def commit_kernel(
    ids_ptr, tables_ptr, count_ptr, meta_ptr, tables, number, batch_ptr, entry_counts_ptr,
    found_ptr, choice_ptr, work_ptr, victims_ptr, low_ptr, slots_ptr, fresh_ptr, new_ptr,
    new_count_ptr, evicted_ids_ptr, evicted_scores_ptr, evicted_times_ptr, filling,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, ONE_CLASS: tl.constexpr,
    STRATEGY: tl.constexpr, TRAIN: tl.constexpr, KEEP: tl.constexpr, QUEUED: tl.constexpr,
    FILLED: tl.constexpr,
):  # fmt: skip
    """Writes newcomers into the index, clears lists, counts.

    slots[e]: where the entry is now, or why not. fresh[e]: 0 was there or failed, 1 took a free
    slot, 2 evicted. new: the entries that took a slot, in any order. KEEP: ids and scores of the
    evicted. The first ``filling`` programs fill queues instead, FILLED at a time; QUEUED: as of
    ``place_kernel``.
    """
    if QUEUED > 0:
        if tl.program_id(0) < filling:
            lows = tl.load(work_ptr + 1)
            begin = tl.program_id(0) * FILLED
            while begin < lows:
                place = begin + tl.arange(0, FILLED)
                mask = place < lows
                e = tl.load(low_ptr + place, mask=mask, other=0)
                table = entry_table(tables_ptr, e, mask, ONE)
                hashes = hash_id(tl.load(ids_ptr + e, mask=mask, other=0))
                buckets = bucket_of(hashes, field(meta_ptr, tables, BUCKETS, table, mask))
                queues = field(meta_ptr, tables, QUEUES, table, mask) + buckets * QUEUE
                keys = field(meta_ptr, tables, KEYS, table, mask) + buckets * (WIDTH * RECORD)
                now = field(batch_ptr, tables, SCORE, table, mask)
                fill_queues(queues, keys, now, mask, WIDTH, QUEUED, FILLED)
                begin += filling * FILLED
            return
    count = tl.load(count_ptr)
    start = (tl.program_id(0) - filling) * BLOCK
    while start < count:  # mostly once
        e = start + tl.arange(0, BLOCK)
        mask = e < count
        table = entry_table(tables_ptr, e, mask, ONE)
        mask = of_class(meta_ptr, tables, table, mask, number, ONE_CLASS)
        found = tl.load(found_ptr + e, mask=mask, other=FAILED)
        hit = found >= 0
        tl.store(slots_ptr + e, found, mask=hit)
        tl.store(fresh_ptr + e, tl.zeros([BLOCK], tl.uint8), mask=hit)
        if TRAIN:
            first, last = first_and_last(table, hit)
            while first <= last:
                counters = table_counters(meta_ptr, tables, first)
                count_up(counters, HITS, hit, table == first)
                first += 1
        absent = mask & (hit == 0)
        if tl.max(absent.to(tl.int32), axis=0) > 0:
            missing = found == GONE
            ids = tl.load(ids_ptr + e, mask=missing, other=0)
            choice = tl.load(choice_ptr + e, mask=missing, other=FAILED)
            hashes = hash_id(ids)
            buckets = bucket_of(hashes, field(meta_ptr, tables, BUCKETS, table, missing))
            heads = field(meta_ptr, tables, HEADS, table, missing) + buckets * HEAD
            order = -2 - choice
            listed = missing & (order >= 0) & (order < WIDTH)
            bases = (heads + LISTED_AT).to(tl.pointer_type(tl.int32))
            base = tl.load(bases, mask=listed, other=0)
            victim = tl.load(victims_ptr + base + order, mask=listed, other=-1)
            listed = listed & (victim >= 0)
            inserted = listed | (missing & (choice >= 0))
            evicts = listed | (tl.load(fresh_ptr + e, mask=inserted, other=0) == EVICTED)
            free = inserted & (evicts == 0)
            slot = tl.where(listed, buckets * WIDTH + victim, choice.to(tl.int64))
            keys = (field(meta_ptr, tables, KEYS, table, inserted) + slot * RECORD).to(
                tl.pointer_type(tl.int64)
            )
            scores = (field(meta_ptr, tables, SCORES, table, inserted) + slot * RECORD).to(
                tl.pointer_type(tl.int64)
            )
            times = (field(meta_ptr, tables, TIMES, table, inserted) + slot * 8).to(
                tl.pointer_type(tl.int64)
            )
            if KEEP:
                tl.store(evicted_ids_ptr + e, tl.load(keys, mask=evicts, other=0), mask=evicts)
                tl.store(evicted_scores_ptr + e, tl.load(scores, mask=evicts, other=0), mask=evicts)
                if STRATEGY == PAIR:
                    before = tl.load(times, mask=evicts, other=0)
                    tl.store(evicted_times_ptr + e, before, mask=evicts)
            tl.store(heads.to(tl.pointer_type(tl.int32)), -1, mask=missing)
            tl.store(keys, ids, mask=inserted)
            digests = field(meta_ptr, tables, DIGESTS, table, inserted) + slot
            tl.store(
                digests.to(tl.pointer_type(tl.uint8)), digest_of(hashes).to(tl.uint8), mask=inserted
            )
            if STRATEGY == LFU or STRATEGY == PAIR:
                value = tl.load(entry_counts_ptr + e, mask=inserted, other=0)
                tl.store(scores, value, mask=inserted)
            elif STRATEGY != NO_EVICTION:
                value = field(batch_ptr, tables, SCORE, table, inserted)
                tl.store(scores, value, mask=inserted)
            if STRATEGY == PAIR:
                now = field(batch_ptr, tables, TIME, table, inserted)
                tl.store(times, now, mask=inserted)
            result = tl.where(inserted, slot.to(tl.int32), FAILED)
            tl.store(slots_ptr + e, tl.where(missing, result, found), mask=absent)
            tl.store(fresh_ptr + e, inserted.to(tl.uint8) + evicts.to(tl.uint8), mask=absent)
            new = inserted.to(tl.int32)
            total = tl.sum(new, axis=0)
            if total > 0:
                at = tl.atomic_add(new_count_ptr, total, sem="relaxed") + tl.cumsum(new, axis=0) - 1
                tl.store(new_ptr + at, e, mask=inserted)

            rejected = absent & (found <= REJECTED)
            first, last = first_and_last(table, absent)
            while first <= last:
                own = table == first
                counters = table_counters(meta_ptr, tables, first)
                if TRAIN:
                    count_up(counters, MISSES, missing | rejected, own)
                count_up(counters, INSERTS, inserted, own)
                count_up(counters, EVICTIONS, evicts, own)
                count_up(counters, FAILURES, missing & (inserted == 0), own)
                count_up(counters, REJECTIONS, rejected, own)
                count_up(counters, SIZE, free, own)
                first += 1
        start += (tl.num_programs(0) - filling) * BLOCK


@kernel
def number_kernel(
    slots_ptr, fresh_ptr, tables_ptr, count_ptr, ranks_ptr, next_ptr, meta_ptr, tables, wanted,
    BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """NO_EVICTION: the new rows of table ``wanted`` are numbered from next[0] on; ranks[e] counts
    them up to e."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(count_ptr)
    mask = mask & (tl.load(fresh_ptr + e, mask=mask, other=0) > 0)
    table = entry_table(tables_ptr, e, mask, ONE)
    mask = mask & (table == wanted)
    slot = tl.load(slots_ptr + e, mask=mask, other=0).to(tl.int64)
    rank = tl.load(ranks_ptr + e, mask=mask, other=1).to(tl.uint64)
    first = tl.load(next_ptr).to(tl.uint64)
    value = first + (rank - 1)
    value = tl.where(value < first, 0xFFFFFFFFFFFFFFFF, value)
    scores = tl.load(meta_ptr + SCORES * tables + wanted) + slot * RECORD
    tl.store(scores.to(tl.pointer_type(tl.int64)), value.to(tl.int64), mask=mask)
