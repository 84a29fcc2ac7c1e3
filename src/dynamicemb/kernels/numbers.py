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
def halves(x, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Parts 0, 2, 4, .. and 1, 3, 5, .. of x, [BLOCK, 16, PARTS]."""
    return tl.split(tl.reshape(x, (BLOCK, 16, PARTS // 2, 2)))


@triton.jit
def ordered_dot(a, b, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over columns of a * b in the library's order: column c goes to lane c mod 16, lanes are
    folded in halves. COLUMNS is a power of two, at least 16; columns beyond the row hold 0."""
    PARTS: tl.constexpr = COLUMNS // 16
    products = tl.reshape(a * b, (BLOCK, PARTS, 16))
    if PARTS == 8:  # the parts one by one, without the sums of the general case
        even, odd = halves(tl.permute(products, (0, 2, 1)), BLOCK, 8)
        p04, p26 = halves(even, BLOCK, 4)
        p15, p37 = halves(odd, BLOCK, 4)
        p0, p4 = tl.split(p04)
        p2, p6 = tl.split(p26)
        p1, p5 = tl.split(p15)
        p3, p7 = tl.split(p37)
        lanes = (((((((p0 + 0.0) + p1) + p2) + p3) + p4) + p5) + p6) + p7
    elif PARTS == 4:
        p02, p13 = halves(tl.permute(products, (0, 2, 1)), BLOCK, 4)
        p0, p2 = tl.split(p02)
        p1, p3 = tl.split(p13)
        lanes = (((p0 + 0.0) + p1) + p2) + p3
    else:
        part = tl.arange(0, PARTS)
        lanes = tl.zeros([BLOCK, 16], tl.float32)
        for k in tl.static_range(PARTS):
            # One of the summands is not zero, so their order does not matter.
            lanes = lanes + tl.sum(tl.where(part[None, :, None] == k, products, 0.0), axis=1)
    eight = tl.sum(tl.reshape(lanes, (BLOCK, 2, 8)), axis=1)
    four = tl.sum(tl.reshape(eight, (BLOCK, 2, 4)), axis=1)
    two = tl.sum(tl.reshape(four, (BLOCK, 2, 2)), axis=1)
    return tl.sum(two, axis=1)
