"""Number formats and random numbers, bit for bit those of the engine."""

from __future__ import annotations

import triton
import triton.language as tl

#: Data types of rows, outputs and gradients. The third, bfloat16, is handled by its bits, as int16.
FLOAT32 = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)

ROUNDING_STREAM = tl.constexpr(0x80000000)


@triton.jit
def typed(addresses, TYPE: tl.constexpr):
    """Addresses of rows, multiples of 16 bytes, as pointers."""
    if TYPE == FLOAT32:
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.float32)), 16)
    elif TYPE == FLOAT16:
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.float16)), 16)
    else:
        return tl.multiple_of(addresses.to(tl.pointer_type(tl.int16)), 16)


@triton.jit
def row_starts(places, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Places where rows start, in elements. ALIGNED: they are multiples of 16 bytes, and said in a
    way that tells the compiler, which then moves so many at once."""
    if ALIGNED and TYPE == FLOAT32:
        return (places >> 2) << 2
    elif ALIGNED:
        return (places >> 3) << 3
    else:
        return places


@triton.jit
def bytes_of(TYPE: tl.constexpr):
    if TYPE == FLOAT32:
        return 4
    else:
        return 2


@triton.jit
def widen(x, TYPE: tl.constexpr):
    """float32 of stored numbers."""
    if TYPE == FLOAT32:
        return x
    elif TYPE == FLOAT16:
        return x.to(tl.float32)
    else:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """Stored numbers of float32, rounded to nearest, ties to even."""
    if TYPE == FLOAT32:
        return x
    elif TYPE == FLOAT16:
        return x.to(tl.float16)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def narrow_stochastic(x, random, TYPE: tl.constexpr):
    """Stored numbers of float32, rounded up or down by 32 random bits each."""
    bits = x.to(tl.uint32, bitcast=True)
    if TYPE == FLOAT32:
        return x
    elif TYPE == FLOAT16:
        magnitude = bits & 0x7FFFFFFF
        small = magnitude.to(tl.float32, bitcast=True) * 16777216.0
        small = tl.where(magnitude < 0x38800000, small, 0.0)
        unit = (random >> 8).to(tl.float32) * 5.9604644775390625e-08
        subnormal = (small + unit).to(tl.int32).to(tl.uint32)
        normal = (magnitude + (random & 0x1FFF) - 0x38000000) >> 13
        half = tl.where(magnitude < 0x38800000, subnormal, normal)
        half = ((bits >> 16) & 0x8000) | half
        drawn = half.to(tl.uint16).to(tl.float16, bitcast=True)
        return tl.where(magnitude >= 0x477FE000, x.to(tl.float16), drawn)
    else:
        drawn = ((bits + (random & 0xFFFF)) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
        return tl.where((bits & 0x7F800000) == 0x7F800000, narrow(x, TYPE), drawn)


@triton.jit
def philox(seeds, ids, streams, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """32 random bits per column, uint32 [BLOCK, COLUMNS]: Philox4x32-10 with counter
    (column / 4, stream, id) and key ``seeds``. COLUMNS is a power of two, at least 4."""
    groups = tl.arange(0, COLUMNS // 4).to(tl.uint32)
    zero = tl.zeros([BLOCK, COLUMNS // 4], tl.uint32)
    ids = ids.to(tl.uint64)
    seeds = seeds.to(tl.uint64)
    c0 = zero + groups[None, :]
    c1 = zero + streams.to(tl.uint32)[:, None]
    c2 = zero + (ids & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c3 = zero + (ids >> 32).to(tl.uint32)[:, None]
    k0 = (seeds & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seeds >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0[:, None]
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1[:, None]
        c1 = (second & 0xFFFFFFFF).to(tl.uint32)
        c3 = (first & 0xFFFFFFFF).to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (BLOCK, COLUMNS))


@triton.jit
def ordered_dot(a, b, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over columns of a * b in the library's order: the products of four columns, two and two;
    these sums folded in halves. COLUMNS is a power of two, at least 16; columns beyond the row
    hold 0."""
    even, odd = tl.split(tl.reshape(a * b, (BLOCK, COLUMNS // 2, 2)))
    low, high = tl.split(tl.reshape(even + odd, (BLOCK, COLUMNS // 4, 2)))
    sums = low + high
    LEVELS: tl.constexpr = (COLUMNS // 4).bit_length() - 1
    for level in tl.static_range(LEVELS):
        # Two summands each, so the compiler cannot choose an order.
        sums = tl.sum(tl.reshape(sums, (BLOCK, 2, COLUMNS >> (level + 3))), axis=1)
    return tl.reshape(sums, (BLOCK,)) + 0.0  # not -0.0: zeros beyond the row may be added or not
