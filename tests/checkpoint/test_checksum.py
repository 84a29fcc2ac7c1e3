"""The checksum of blocks is XXH64 with seed 0, as common tools compute it."""

from __future__ import annotations

import ctypes

import pytest

from dynamicemb import _engine


def checksum(data: bytes) -> int:
    buffer = ctypes.create_string_buffer(data, len(data))
    return _engine.xxh64(ctypes.addressof(buffer), len(data))


# Published test vectors.
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_known_values(data: bytes, expected: int) -> None:
    assert checksum(data) == expected


def test_every_bit_counts_at_every_length() -> None:
    for size in (*range(1, 41), 63, 64, 65, 100):
        data = bytes(range(size))
        seen = {checksum(data)}
        for bit in range(8 * size):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            seen.add(checksum(bytes(changed)))
        assert len(seen) == 8 * size + 1
