"""The values of new rows. Only + - * / and sqrt, so that every device gives the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.launch import kernel
from dynamicemb.kernels.layout import (
    CDF_LOWER,
    CDF_UPPER,
    INITIAL,
    LOWER,
    MEAN,
    ROWS,
    SEED,
    SPREAD,
    STATE,
    UPPER,
    VALUE,
    entry_table,
    field,
    of_class,
)
from dynamicemb.kernels.numbers import bytes_of, narrow, philox, typed

CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL, DEBUG = map(tl.constexpr, range(5))
TINY = tl.constexpr(2.0**-126)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
STEP_OF_UNIT = tl.constexpr(2.0**-24)
HALF_STEP = tl.constexpr(2.0**-25)


@triton.jit
def log_of(value):
    """Natural logarithm of positive normal numbers."""
    bits = value.to(tl.uint32, bitcast=True)
    exponent = ((bits >> 23).to(tl.int32) - 126).to(tl.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = m < 0.70710678
    exponent = tl.where(low, exponent - 1.0, exponent)
    x = tl.where(low, m + m, m) - 1.0
    z = x * x
    y = x * 7.0376836292e-2
    y = (y - 1.1514610310e-1) * x
    y = (y + 1.1676998740e-1) * x
    y = (y - 1.2420140846e-1) * x
    y = (y + 1.4249322787e-1) * x
    y = (y - 1.6668057665e-1) * x
    y = (y + 2.0000714765e-1) * x
    y = (y - 2.4999993993e-1) * x
    y = y + 3.3333331174e-1
    y = y * x * z
    y = y + -2.12194440e-4 * exponent
    y = y - 0.5 * z
    return x + y + 0.693359375 * exponent


@triton.jit
def normal_quantile(p):
    """Quantile of the standard normal distribution: AS 241, PPND7."""
    q = p - 0.5
    r = 0.180625 - q * q
    above = ((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r + 3.3871327179
    below = ((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r + 1.0
    centre = tl.div_rn(q * above, below)
    tail_p = tl.where(q < 0, p, 1.0 - p)
    s = tl.sqrt_rn(-log_of(tail_p))
    t = s - 1.6
    above = ((1.7023821103e-1 * t + 1.3067284816) * t + 2.7568153900) * t + 1.4234372777
    below = (1.2021132975e-1 * t + 7.3700164250e-1) * t + 1.0
    near = tl.div_rn(above, below)
    u = s - 5.0
    above = ((1.7337203997e-2 * u + 4.2868294337e-1) * u + 3.0812263860) * u + 6.6579051150
    below = (1.2258202635e-2 * u + 2.4197894225e-1) * u + 1.0
    far = tl.div_rn(above, below)
    tail = tl.where(s <= 5.0, near, far)
    return tl.where(r >= 0, centre, tl.where(q < 0, -tail, tail))


@triton.jit
def number(floats_ptr, tables, row, table, mask):
    """A number of each element's table, as a column."""
    return tl.load(floats_ptr + row * tables + table, mask=mask, other=0.0)[:, None]


@triton.jit
def initial_values(
    ids, seeds, floats_ptr, tables, table, mask, MODE: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK, COLUMNS]: a function of (seed, id, column)."""
    zero = tl.zeros([BLOCK, COLUMNS], tl.float32)
    if MODE == CONSTANT:
        return zero + number(floats_ptr, tables, VALUE, table, mask)
    elif MODE == DEBUG:
        return zero + (ids.to(tl.uint64) % 100000).to(tl.float32)[:, None]
    else:
        random = philox(seeds, ids, (ids * 0).to(tl.uint32), BLOCK, COLUMNS)
        unit = (random >> 8).to(tl.float32) * STEP_OF_UNIT
        if MODE == UNIFORM:
            lower = number(floats_ptr, tables, LOWER, table, mask)
            return lower + (number(floats_ptr, tables, UPPER, table, mask) - lower) * unit
        else:
            unit = unit + HALF_STEP
            mean = number(floats_ptr, tables, MEAN, table, mask)
            spread = number(floats_ptr, tables, SPREAD, table, mask)
            if MODE == NORMAL:
                return mean + spread * normal_quantile(unit)
            else:
                lower = number(floats_ptr, tables, CDF_LOWER, table, mask)
                upper = number(floats_ptr, tables, CDF_UPPER, table, mask)
                p = lower + (upper - lower) * unit
                p = tl.where(p < TINY, TINY, p)
                p = tl.where(p > BELOW_ONE, BELOW_ONE, p)
                value = mean + spread * normal_quantile(p)
                lower = number(floats_ptr, tables, LOWER, table, mask)
                upper = number(floats_ptr, tables, UPPER, table, mask)
                value = tl.where(value < lower, lower, value)
                return tl.where(value > upper, upper, value)


@kernel
def rows_kernel(
    ids_ptr, count, meta_ptr, floats_ptr, tables, out_ptr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    TYPE: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = what the initialiser of table 0 makes of ids[i]: rows outside a table."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    table = i * 0
    ids = tl.load(ids_ptr + i, mask=mask, other=0)
    seeds = field(meta_ptr, tables, SEED, table, mask)
    values = initial_values(ids, seeds, floats_ptr, tables, table, mask, MODE, BLOCK, COLUMNS)
    column = tl.arange(0, COLUMNS)
    inside = mask[:, None] & (column < DIM)[None, :]
    places = out_ptr + i.to(tl.int64)[:, None] * DIM + column[None, :]
    tl.store(places, narrow(values, TYPE), mask=inside)


@kernel
def fresh_kernel(
    ids_ptr, tables_ptr, new_ptr, new_count_ptr, slots_ptr, meta_ptr, floats_ptr, tables, number_,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TYPE: tl.constexpr,
    MODE: tl.constexpr, STATE_DIM: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    STATE_STRIDE: tl.constexpr, STATE_FROM: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
    ONE_CLASS: tl.constexpr, EMBEDDINGS: tl.constexpr,
):  # fmt: skip
    """Initialises the rows (if EMBEDDINGS) and the states of the entries in ``new``. State columns
    before STATE_FROM start at 0, the others at the optimizer's initial value."""
    count = tl.load(new_count_ptr)
    first = tl.program_id(0) * BLOCK
    while first < count:
        place = first + tl.arange(0, BLOCK)
        mask = place < count
        e = tl.load(new_ptr + place, mask=mask, other=0)
        table = entry_table(tables_ptr, e, mask, ONE)
        mask = of_class(meta_ptr, tables, table, mask, number_, ONE_CLASS)
        if tl.max(mask.to(tl.int32), axis=0) > 0:
            slot = tl.load(slots_ptr + e, mask=mask, other=0).to(tl.int64)
            if EMBEDDINGS:
                ids = tl.load(ids_ptr + e, mask=mask, other=0)
                seeds = field(meta_ptr, tables, SEED, table, mask)
                values = initial_values(
                    ids, seeds, floats_ptr, tables, table, mask, MODE, BLOCK, COLUMNS
                )
                at = field(meta_ptr, tables, ROWS, table, mask) + slot * (STRIDE * bytes_of(TYPE))
                column = tl.arange(0, COLUMNS)
                inside = mask[:, None] & (column < DIM)[None, :]
                places = typed(at, TYPE)[:, None] + column[None, :]
                tl.store(places, narrow(values, TYPE), mask=inside)
            if STATE_DIM > 0:
                at = field(meta_ptr, tables, STATE, table, mask) + slot * (STATE_STRIDE * 4)
                column = tl.arange(0, STATE_COLUMNS)
                inside = mask[:, None] & (column < STATE_DIM)[None, :]
                start = tl.load(floats_ptr + INITIAL * tables + table, mask=mask, other=0.0)
                values = tl.where((column >= STATE_FROM)[None, :], start[:, None], 0.0)
                if STATE_DIM == 1:
                    places = at.to(tl.pointer_type(tl.float32))[:, None] + column[None, :]
                else:
                    places = typed(at, 0)[:, None] + column[None, :]
                tl.store(places, values, mask=inside)
        first += tl.num_programs(0) * BLOCK
