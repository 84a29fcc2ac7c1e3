"""Where an id lives, and the bit tricks of a bucket's digests. The same numbers as csrc/hash.h."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hash_id(ids):
    """The 64-bit finaliser of MurmurHash3, uint64."""
    h = ids.to(tl.uint64)
    h = h ^ (h >> 33)
    h = h * 0xFF51AFD7ED558CCD
    h = h ^ (h >> 33)
    h = h * 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def bucket_of(hashes, buckets):
    """int64; ``buckets`` int64."""
    return (((hashes >> 32) * buckets.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def digest_of(hashes):
    """int32 in 1..255."""
    digest = (hashes & 0xFF).to(tl.int32)
    return tl.where(digest == 0, 1, digest)


@triton.jit
def matches(
    lines, digests, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr = False
):
    """Bit masks (low, high), int64, of the bytes of each line that equal its digest.

    ``lines``: addresses of WIDTH bytes each, WIDTH one of 16, 32, 64, 128; ``high`` holds the bytes
    from 64 on. KEEP: lines stay in the cache rather than what else is read; several ids of a batch
    share one.
    """
    words = tl.arange(0, WIDTH // 4)
    pointers = tl.multiple_of(lines.to(tl.pointer_type(tl.int32)), 16)
    pointers = pointers[:, None] + words[None, :]
    if KEEP:
        x = tl.load(pointers, mask=mask[:, None], other=0, eviction_policy="evict_last")
    else:
        x = tl.load(pointers, mask=mask[:, None], other=0)
    x = (x ^ (digests * 0x01010101)[:, None]).to(tl.uint32)
    # 0x80 in every byte that is zero, then those four bits side by side.
    zero = (((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x | 0x7F7F7F7F) ^ 0xFFFFFFFF
    nibbles = (((zero >> 7) * 0x01020408) >> 24) & 0xF
    nibbles = nibbles << ((words & 3) * 4).to(tl.uint32)[None, :]
    parts = tl.sum(tl.reshape(nibbles, (BLOCK, WIDTH // 16, 4)), axis=2).to(tl.int64)
    parts = parts << ((tl.arange(0, WIDTH // 16) & 3) * 16).to(tl.int64)[None, :]
    if WIDTH == 128:
        low, high = tl.split(tl.sum(tl.reshape(parts, (BLOCK, 2, 4)), axis=2))
    else:
        low = tl.sum(parts, axis=1)
        high = low & 0
    return tl.where(mask, low, 0), tl.where(mask, high, 0)


@triton.jit
def lowest_bit(low, high):
    """The number of the lowest set bit of (low, high); the masks must not both be 0."""
    in_low = low != 0
    word = tl.where(in_low, low, high)
    single = (word & (0 - word)).to(tl.uint64).to(tl.float32)
    bit = (single.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(in_low, bit, bit + 64)


@triton.jit
def without_lowest(low, high):
    """(low, high) without their lowest set bit."""
    in_low = low != 0
    return tl.where(in_low, low & (low - 1), low), tl.where(in_low, high, high & (high - 1))


@triton.jit
def bit_count(x):
    """How many bits of int64 x are set, int32."""
    x = x.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)
