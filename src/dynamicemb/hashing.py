"""The hash of an id, as tensors compute it; ``csrc/hash.h`` has the same."""

from __future__ import annotations

import torch


def signed(value: int) -> int:
    """The int64 with the same 64 bits as ``value``."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_MIX_1 = signed(0xFF51AFD7ED558CCD)
_MIX_2 = signed(0xC4CEB9FE1A85EC53)


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 that spreads every bit (the murmur3 finaliser); wraps on overflow."""
    low_31 = 2**31 - 1  # >> copies the sign bit, the mask makes it a logical shift by 33
    x = x ^ (x >> 33).bitwise_and_(low_31)
    x.mul_(_MIX_1)
    x.bitwise_xor_((x >> 33).bitwise_and_(low_31))
    x.mul_(_MIX_2)
    return x.bitwise_xor_((x >> 33).bitwise_and_(low_31))


def bucket_of(ids: torch.Tensor, buckets: int) -> torch.Tensor:
    """int64 [n]: which of ``buckets`` buckets each id lives in."""
    high = (mix(ids.view(torch.int64)) >> 32) & 0xFFFFFFFF
    return (high * buckets) >> 32


_UNMIX_1 = signed(pow(0xFF51AFD7ED558CCD, -1, 2**64))
_UNMIX_2 = signed(pow(0xC4CEB9FE1A85EC53, -1, 2**64))


def unmix(x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`mix`."""
    low_31 = 2**31 - 1
    x = x ^ (x >> 33).bitwise_and_(low_31)
    x.mul_(_UNMIX_2)
    x.bitwise_xor_((x >> 33).bitwise_and_(low_31))
    x.mul_(_UNMIX_1)
    return x.bitwise_xor_((x >> 33).bitwise_and_(low_31))
