"""The entries that evicted a row, listed in their order, and what is known of those rows."""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.insert import first_and_last
from dynamicemb.kernels.launch import kernel
from dynamicemb.kernels.layout import EVICTED, entry_table


@triton.jit
def evicting(fresh_ptr, e, count):
    return tl.load(fresh_ptr + e, mask=e < count, other=0) == EVICTED


@kernel
def count_kernel(
    fresh_ptr, count_ptr, tiles, totals_ptr, ends_ptr, tables, BLOCK: tl.constexpr
):  # fmt: skip
    """totals[p] = how many entries in the ``tiles`` tiles of program p evicted a row; ends = 0."""
    program = tl.program_id(0)
    count = tl.load(count_ptr)
    total = 0
    tile = 0
    while tile < tiles:
        e = (program * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        total += tl.sum(evicting(fresh_ptr, e, count).to(tl.int32), axis=0)
        tile += 1
    tl.store(totals_ptr + program, total)
    if program == 0:
        place = 0
        while place < tables:
            t = place + tl.arange(0, BLOCK)
            tl.store(ends_ptr + t, tl.zeros([BLOCK], tl.int32), mask=t < tables)
            place += BLOCK


@kernel
def list_kernel(
    fresh_ptr, tables_ptr, count_ptr, tiles, totals_ptr, list_ptr, ends_ptr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Lists the entries that evicted a row. Those of table t, if there are any, end before
    ends[t]: entries are in the order of their tables."""
    program = tl.program_id(0)
    count = tl.load(count_ptr)
    others = tl.arange(0, PROGRAMS)
    before = tl.sum(tl.load(totals_ptr + others, mask=others < program, other=0), axis=0)
    tile = 0
    while tile < tiles:
        e = (program * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        wanted = evicting(fresh_ptr, e, count)
        after = before + tl.cumsum(wanted.to(tl.int32), axis=0)
        tl.store(list_ptr + after - 1, e, mask=wanted)
        if not ONE:
            table = entry_table(tables_ptr, e, wanted, ONE)
            first, last = first_and_last(table, wanted)
            while first <= last:
                end = tl.max(tl.where(wanted & (table == first), after, 0), axis=0)
                if end > 0:
                    tl.atomic_max(ends_ptr + first, end, sem="relaxed")
                first += 1
        before += tl.sum(wanted.to(tl.int32), axis=0)
        tile += 1
    if ONE:
        if program == tl.num_programs(0) - 1:
            tl.store(ends_ptr, before)


@kernel
def pack_kernel(
    list_ptr, first, count, slots_ptr, evicted_ids_ptr, evicted_scores_ptr, evicted_times_ptr,
    out_slots_ptr, out_ids_ptr, out_scores_ptr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Slots, ids and scores of ``count`` listed entries from place ``first`` on. TIMED: a score is
    a time and a count."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    e = tl.load(list_ptr + first + i, mask=mask, other=0)
    tl.store(out_slots_ptr + i, tl.load(slots_ptr + e, mask=mask, other=0), mask=mask)
    tl.store(out_ids_ptr + i, tl.load(evicted_ids_ptr + e, mask=mask, other=0), mask=mask)
    score = tl.load(evicted_scores_ptr + e, mask=mask, other=0)
    if TIMED:
        time = tl.load(evicted_times_ptr + e, mask=mask, other=0)
        tl.store(out_scores_ptr + 2 * i, time, mask=mask)
        tl.store(out_scores_ptr + 2 * i + 1, score, mask=mask)
    else:
        tl.store(out_scores_ptr + i, score, mask=mask)
