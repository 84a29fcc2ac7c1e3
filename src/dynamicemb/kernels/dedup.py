"""Distinct ids of a batch in the order of their first occurrence, and the occurrences of each."""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.hashing import hash_id
from dynamicemb.kernels.launch import kernel
from dynamicemb.kernels.layout import table_of

#: Places that compare-and-swap goes to where there is nothing to do: it has no mask.
DUMMIES = 4096


@triton.jit
def pointed_ids(ids_ptr, POINTED: tl.constexpr):
    """Where ids are; POINTED: their address is at ``ids_ptr``."""
    if POINTED:
        return tl.load(ids_ptr).to(tl.pointer_type(tl.int64))
    else:
        return ids_ptr


@kernel
def claim_kernel(
    ids_ptr, bounds_ptr, bounds_step, count, tables, cells_ptr, last_cell, dummies_ptr, cell_of_ptr,
    BLOCK: tl.constexpr, ONE: tl.constexpr, POINTED: tl.constexpr,
):  # fmt: skip
    """Open addressing: cells (-1: free) hold the first occurrence of the id that owns them, and
    cell_of[i] is the cell of occurrence i. Which cell an id gets depends on the order of programs;
    the occurrence in it does not. POINTED: see ``pointed_ids``."""
    ids_ptr = pointed_ids(ids_ptr, POINTED)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pending = i < count
    inside = pending
    ids = tl.load(ids_ptr + i, mask=pending, other=0)
    table = table_of(i, bounds_ptr, bounds_step, tables, pending, ONE)
    hashes = hash_id(ids)
    begin = i * 0
    end = begin + count
    if not ONE:
        hashes = hashes ^ (table.to(tl.uint64) * 0x9E3779B97F4A7C15 >> 20)
        limits = bounds_ptr + table * bounds_step
        # As ``table_of`` sees it: ids before the first bound and after the last have a table, too.
        inner = pending & (table > 0)
        begin = tl.load(limits, mask=inner, other=0).to(tl.int32)
        inner = pending & (table + 1 < tables)
        end = tl.load(limits + bounds_step, mask=inner, other=count).to(tl.int32)
    cell = (hashes & last_cell.to(tl.uint64)).to(tl.int32)
    nobody = tl.full([BLOCK], -1, tl.int32)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        owner = tl.load(cells_ptr + cell, mask=pending, other=0)
        free = pending & (owner < 0)
        if tl.max(free.to(tl.int32), axis=0) > 0:
            place = tl.where(free, cells_ptr + cell, dummies_ptr + (i & 4095))
            before = tl.atomic_cas(place, nobody, i, sem="relaxed")
            owner = tl.where(free, tl.where(before < 0, i, before), owner)
        other = tl.load(ids_ptr + owner, mask=pending, other=0)
        same = pending & (other == ids) & (owner >= begin) & (owner < end)
        tl.atomic_min(cells_ptr + cell, i, mask=same & (i < owner), sem="relaxed")
        pending = pending & (same == 0)
        cell = tl.where(pending, (cell + 1) & last_cell, cell)
    tl.store(cell_of_ptr + i, cell, mask=inside)


@kernel
def first_kernel(
    count, tiles, cells_ptr, cell_of_ptr, first_ptr, totals_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """first[i] = 1 where occurrence i is the first of its id, else 0; totals[p] = how many there
    are in the ``tiles`` tiles of program p."""
    program = tl.program_id(0)
    total = 0
    tile = 0
    while tile < tiles:
        i = (program * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        mask = i < count
        cell = tl.load(cell_of_ptr + i, mask=mask, other=0)
        owner = tl.load(cells_ptr + cell, mask=mask, other=-1)
        first = (owner == i).to(tl.int32)
        tl.store(first_ptr + i, first.to(tl.uint8), mask=mask)
        total += tl.sum(first, axis=0)
        tile += 1
    tl.store(totals_ptr + program, total)


@kernel
def emit_kernel(
    ids_ptr, bounds_ptr, bounds_step, count, tables, tiles, first_ptr, totals_ptr, cell_of_ptr,
    cells_ptr, entry_ids_ptr, entry_first_ptr, entry_tables_ptr, spans_ptr, work_ptr, words,
    hint_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, ONE: tl.constexpr,
    POINTED: tl.constexpr,
):  # fmt: skip
    """Numbers entries by first occurrence: their ids, first occurrences and tables; cells of first
    occurrences get the number. Their spans become empty. work[0] = how many; the other ``words`` of
    it become 0. The host may read (entries, occurrences) from ``hint``, at any time. POINTED: see
    ``pointed_ids``."""
    ids_ptr = pointed_ids(ids_ptr, POINTED)
    program = tl.program_id(0)
    others = tl.arange(0, PROGRAMS)
    before = tl.sum(tl.load(totals_ptr + others, mask=others < program, other=0), axis=0)
    tile = 0
    while tile < tiles:
        i = (program * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        mask = i < count
        first = tl.load(first_ptr + i, mask=mask, other=0).to(tl.int32)
        entry = before + tl.cumsum(first, axis=0) - 1
        new = first > 0
        cell = tl.load(cell_of_ptr + i, mask=new, other=0)
        tl.store(cells_ptr + cell, entry, mask=new)
        ids = tl.load(ids_ptr + i, mask=new, other=0)
        tl.store(entry_ids_ptr + entry, ids, mask=new)
        tl.store(entry_first_ptr + entry, i, mask=new)
        tl.store(spans_ptr + 2 * entry, 0, mask=new)
        tl.store(spans_ptr + 2 * entry + 1, 0, mask=new)
        if not ONE:
            table = table_of(i, bounds_ptr, bounds_step, tables, mask, ONE)
            tl.store(entry_tables_ptr + entry, table, mask=new)
        before += tl.sum(first, axis=0)
        tile += 1
    if program == tl.num_programs(0) - 1:
        reset_work(work_ptr, words, before)
        tl.store(hint_ptr, before)
        tl.store(hint_ptr + 1, count)


@triton.jit
def reset_work(work_ptr, words, entries):
    """work[0] = entries, the other words 0."""
    k = 0
    while k < words:
        place = k + tl.arange(0, 16)
        tl.store(work_ptr + place, tl.where(place == 0, entries, 0), mask=place < words)
        k += 16


@kernel
def stage_kernel(
    ids_ptr, out_ptr, bounds_ptr, bounds_step, bounds, numbers_ptr, words, addresses_ptr,
    to_bounds_ptr, to_numbers_ptr, BLOCK: tl.constexpr, OUT_ADDRESS: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """Copies the addresses of ids and of an output, ``bounds`` bounds (int64) and ``words`` words
    of numbers (int32) to where the kernels of a batch expect them; a single program. OUT: the type
    of the output, or -1 where there is none."""
    tl.store(addresses_ptr, ids_ptr.to(tl.int64))
    if OUT >= 0:
        tl.store(addresses_ptr + OUT_ADDRESS, out_ptr.to(tl.int64))
    place = 0
    while place < bounds:
        k = place + tl.arange(0, BLOCK)
        value = tl.load(bounds_ptr + k * bounds_step, mask=k < bounds, other=0)
        tl.store(to_bounds_ptr + k, value, mask=k < bounds)
        place += BLOCK
    copy_words(numbers_ptr, to_numbers_ptr, words, BLOCK)


@triton.jit
def copy_words(from_ptr, to_ptr, words, BLOCK: tl.constexpr):
    place = 0
    while place < words:
        k = place + tl.arange(0, BLOCK)
        tl.store(to_ptr + k, tl.load(from_ptr + k, mask=k < words, other=0), mask=k < words)
        place += BLOCK


@kernel
def numbers_kernel(from_ptr, to_ptr, words, BLOCK: tl.constexpr):
    """Copies a few int32."""
    copy_words(from_ptr, to_ptr, words, BLOCK)


@kernel
def entries_kernel(count, cells_ptr, cell_of_ptr, entry_of_ptr, BLOCK: tl.constexpr):
    """entry_of[i] = the entry of occurrence i."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    cell = tl.load(cell_of_ptr + i, mask=mask, other=0)
    tl.store(entry_of_ptr + i, tl.load(cells_ptr + cell, mask=mask, other=0), mask=mask)


@kernel
def distinct_kernel(
    count, entry_of_ptr, work_ptr, words, from_ptr, to_ptr, numbers, BLOCK: tl.constexpr
):  # fmt: skip
    """Every occurrence is an entry. Also copies ``numbers`` numbers of the batch (int32)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(entry_of_ptr + i, i, mask=i < count)
    if tl.program_id(0) == 0:
        reset_work(work_ptr, words, count)
        copy_words(from_ptr, to_ptr, numbers, BLOCK)


@kernel
def last_kernel(count, entry_of_ptr, last_ptr, BLOCK: tl.constexpr):
    """last[e] = the last occurrence of entry e; 0 before."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    entry = tl.load(entry_of_ptr + i, mask=mask, other=0)
    known = tl.load(last_ptr + entry, mask=mask, other=0)
    tl.atomic_max(last_ptr + entry, i, mask=mask & (i > known), sem="relaxed")


@kernel
def spans_kernel(
    sorted_ptr, order_ptr, entry_of_ptr, count, spans_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """spans[2 * e] and the number after it = where the occurrences of entry e begin and end in
    their ``order``, which is by the ``sorted`` cells of their ids. Spans of entries that occur once
    stay empty: most do, and their occurrence is known."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    cell = tl.load(sorted_ptr + i, mask=mask, other=-1)
    begins = cell != tl.load(sorted_ptr + i - 1, mask=mask & (i > 0), other=-1)
    ends = cell != tl.load(sorted_ptr + i + 1, mask=i + 1 < count, other=-1)
    mask = mask & (begins != ends)
    occurrence = tl.load(order_ptr + i, mask=mask, other=0)
    entry = tl.load(entry_of_ptr + occurrence, mask=mask, other=0)
    tl.store(spans_ptr + 2 * entry + ends.to(tl.int32), i + ends.to(tl.int32), mask=mask)


@triton.jit
def span_of(spans_ptr, e, mask):
    """(begin, end) of the occurrences of entries in their order; (0, 0) where there is one."""
    begin = tl.load(spans_ptr + 2 * e, mask=mask, other=0)
    return begin, tl.load(spans_ptr + 2 * e + 1, mask=mask, other=0)


@kernel
def hot_kernel(
    spans_ptr, count_ptr, room, hot_base_ptr, hot_entry_ptr, work_ptr, HOT: tl.constexpr,
    LONG: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries with more than HOT occurrences: hot_entry lists their blocks of LIMIT, hot_base[e]
    is the first of them. Those with more than LONG are listed from the front, work[0] of them, and
    the others from the end of the ``room`` places, work[1]. LONG is at most LIMIT."""
    count = tl.load(count_ptr)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < count:
        mask = e < count
        begin, end = span_of(spans_ptr, e, mask)
        occurrences = tl.where(mask, end - begin, 0)
        parts = tl.where(occurrences > LONG, (occurrences + LIMIT - 1) // LIMIT, 0)
        total = tl.sum(parts, axis=0)
        if total > 0:
            base = tl.atomic_add(work_ptr, total, sem="relaxed") + tl.cumsum(parts, axis=0) - parts
            tl.store(hot_base_ptr + e, base, mask=parts > 0)
            k = 0
            most = tl.max(parts, axis=0)
            while k < most:
                tl.store(hot_entry_ptr + base + k, e, mask=k < parts)
                k += 1
        short = ((occurrences > HOT) & (occurrences <= LONG)).to(tl.int32)
        total = tl.sum(short, axis=0)
        if total > 0:
            after = tl.atomic_add(work_ptr + 1, total, sem="relaxed") + tl.cumsum(short, axis=0)
            tl.store(hot_base_ptr + e, room - after, mask=short > 0)
            tl.store(hot_entry_ptr + room - after, e, mask=short > 0)


@kernel
def counts_kernel(
    spans_ptr, first_ptr, order_ptr, count_ptr, given_ptr, totals_ptr, BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """totals[e] = occurrences of entry e, or the sum of the counts given with them (stops at the
    largest unsigned number)."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(count_ptr)
    begin, end = span_of(spans_ptr, e, mask)
    if GIVEN:
        first = tl.load(first_ptr + e, mask=mask, other=0)
        total = tl.load(given_ptr + first, mask=mask, other=0).to(tl.uint64)
        k = begin + 1
        while tl.max((end - k), axis=0) > 0:
            more = k < end
            place = tl.load(order_ptr + k, mask=more, other=0)
            value = tl.load(given_ptr + place, mask=more, other=0).to(tl.uint64)
            added = total + value
            total = tl.where(added < total, 0xFFFFFFFFFFFFFFFF, added)
            k += 1
        tl.store(totals_ptr + e, total.to(tl.int64), mask=mask)
    else:
        tl.store(totals_ptr + e, tl.maximum(end - begin, 1).to(tl.int64), mask=mask)
