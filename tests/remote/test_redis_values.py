"""Replies to MGET, however they come in."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

redis = pytest.importorskip("redis")

from dynamicemb.tiers.remote.redis_values import (  # noqa: E402
    Replies,
    ValueShape,
    WrongValueError,
)

SHAPE = ValueShape(b"TAG!", 8)


def value(number: int) -> bytes:
    return b"$12\r\nTAG!%08d\r\n" % number


def read(text: bytes, piece: int, *counts: int) -> list[list[int | None]]:
    """What is read of replies with so many values that come in pieces."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for at in range(0, len(text), piece):
            theirs.sendall(text[at : at + piece])
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        replies = Replies(SimpleNamespace(_sock=ours), 20)
        out = []
        for count in counts:
            rows, found = np.zeros((count, 8), np.uint8), np.zeros(count, np.bool_)
            replies.values(SHAPE, rows, found)
            out.append([int(r.tobytes()) if f else None for r, f in zip(rows, found, strict=True)])
        return out
    finally:
        ours.close()
        sender.join()


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 19, 1000])
def test_replies_come_in_any_pieces(piece: int) -> None:
    first = b"*4\r\n" + value(1) + b"$-1\r\n" + value(99_999_999) + b"$-1\r\n"
    second = b"*1\r\n" + value(13)
    assert read(first + second, piece, 4, 1) == [[1, None, 99_999_999, None], [13]]


def test_more_than_fits_the_buffer() -> None:
    many = list(range(30_000))
    text = b"*30000\r\n" + b"".join(map(value, many))
    assert read(text, 100_000, 30_000) == [many]


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize(
    ("wrong", "kind", "size"),
    [
        (b"$13\r\nTAG!123456789\r\n", "size", 13),
        (b"$0\r\n\r\n", "size", 0),
        (b"$12\r\nGAT!12345678\r\n", "tag", 12),
        (b":12\r\n......................", "unknown", 0),
        (b"$12\r\nTAG!12345678......", "unknown", 0),
        (b"$1x\r\n......................", "unknown", 0),
        (b"$" + b"1" * 40, "unknown", 0),
    ],
)
def test_what_is_not_a_row_is_told(wrong: bytes, kind: str, size: int, piece: int) -> None:
    with pytest.raises(WrongValueError) as raised:
        read(b"*3\r\n" + value(1) + wrong + value(2), piece, 3)
    assert (raised.value.index, raised.value.kind) == (1, kind)
    if kind == "size":
        assert raised.value.size == size


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (b"-LOADING it reads its file\r\n", "BusyLoadingError", "reads its file"),
        (b"-READONLY no\r\n", "ReadOnlyError", "no"),
        (b"-ERR something\r\n", "ResponseError", "something"),
        (b"*4\r\n", "InvalidResponse", "Protocol"),
        (b"+OK\r\n", "InvalidResponse", "Protocol"),
        (b"*3\r\n" + value(1), "ConnectionError", "closed by server"),
        (b"", "ConnectionError", "closed by server"),
    ],
)
def test_what_the_server_answers_instead_is_raised(
    text: bytes, error: str, words: str, piece: int
) -> None:
    with pytest.raises(getattr(redis.exceptions, error), match=words):
        read(text, piece, 3)
