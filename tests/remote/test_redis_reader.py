"""Replies to MGET, however they come in."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

redis = pytest.importorskip("redis")

from dynamicemb.tiers.remote.redis_exchange import TimedSocket, exchange  # noqa: E402
from dynamicemb.tiers.remote.redis_reader import Reader, ValueShape, WrongValueError  # noqa: E402
from redis_servers import WAIT_S  # noqa: E402

SHAPE = ValueShape(b"TAG!", 8)


def value(number: int) -> bytes:
    return b"$12\r\nTAG!%08d\r\n" % number


def reader_of(ours: socket.socket) -> Reader:
    reader = Reader()
    reader.on_connect(SimpleNamespace(_sock=TimedSocket(ours)))
    return reader


def read(text: bytes, piece: int, *counts: int) -> list[list[int | None]]:
    """What is read of replies with so many values that come in pieces."""
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=lambda: _send(theirs, text, piece))
    sender.start()
    try:
        reader = reader_of(ours)
        out = []
        with exchange(WAIT_S, 0):
            for count in counts:
                rows, found = np.zeros((count, 8), np.uint8), np.zeros(count, np.bool_)
                reader.values(SHAPE, rows, found)
                pairs = zip(rows, found, strict=True)
                out.append([int(r.tobytes()) if f else None for r, f in pairs])
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
def test_what_is_not_a_row_is_reported(wrong: bytes, kind: str, size: int, piece: int) -> None:
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


def reading(text: bytes, piece: int, allowed: int = 0) -> list[object]:
    """The replies of a text that comes in pieces, until the connection ends."""
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=lambda: _send(theirs, text, piece))
    sender.start()
    reader, replies = reader_of(ours), []
    try:
        with exchange(WAIT_S, allowed):
            while True:
                replies += reader.read_many(1)
    except redis.ConnectionError:
        return replies
    finally:
        ours.close()
        sender.join()


def _send(connection: socket.socket, text: bytes, piece: int) -> None:
    """Sends it all, or as much as the reader takes before it gives up."""
    with contextlib.suppress(OSError), connection:
        for at in range(0, len(text), piece):
            connection.sendall(text[at : at + piece])


@pytest.mark.parametrize("piece", [1, 2, 7, 1000, 10**6])
def test_every_kind_of_reply(piece: int) -> None:
    long = b"x" * 400_000  # more than the buffer
    text = b"+OK\r\n:-5\r\n$-1\r\n$0\r\n\r\n*0\r\n$4\r\n\r\n\r\n\r\n"
    text += b"*3\r\n:9223372036854775807\r\n*2\r\n+a\r\n$1\r\nb\r\n$-1\r\n"
    expected: list[object] = [b"OK", -5, None, b"", [], b"\r\n\r\n"]
    expected.append([2**63 - 1, [b"a", b"b"], None])
    if piece > 2:
        text += b"$%d\r\n%s\r\n" % (len(long), long)
        expected.append(long)
    assert reading(text, piece) == expected


def test_many_replies_at_once() -> None:
    text = b"".join(b":%d\r\n$3\r\n%03d\r\n$-1\r\n" % (n, n % 1000) for n in range(50_000))
    replies = reading(text, 10**6, 10**8)
    assert replies == [reply for n in range(50_000) for reply in (n, b"%03d" % (n % 1000), None)]


def test_errors_of_the_server_are_replies() -> None:
    first, second, third = reading(b"-MOVED 1 h:2\r\n-ERR no\r\n*1\r\n-OOM full\r\n", 3)
    assert isinstance(first, redis.exceptions.MovedError)
    assert (type(second), str(second)) == (redis.ResponseError, "no")
    assert isinstance(third, list)
    assert isinstance(third[0], redis.ResponseError)


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        b"?what\r\n",
        b"\r\n",
        b">1\r\n+a\r\n",
        b"_\r\n",
        b":\r\n",
        b":1.5\r\n",
        b": 1\r\n",
        b":+1\r\n",
        b":99999999999999999999\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"*-1\r\n",
        b"*-2\r\n",
        b"$3\r\nabcdef\r\n",
        b"*1\r\n" * 17 + b":1\r\n",
        b"$20000000\r\n" + b"x" * 100,
        b"*1000000\r\n" + b":1\r\n",
        b"+" + b"x" * 300_000,
    ],
)
def test_what_redis_does_not_answer_is_refused(text: bytes, piece: int) -> None:
    with pytest.raises(redis.exceptions.InvalidResponse, match="Protocol Error"):
        reading(text, piece)


def test_what_is_allowed_is_of_the_whole_exchange() -> None:
    text = b"$1000000\r\n" + b"x" * 1_000_000 + b"\r\n"
    with pytest.raises(redis.exceptions.InvalidResponse, match="more than 16777216 bytes"):
        reading(text * 20, 10**6)
    assert len(reading(text * 20, 10**6, 10**8)) == 20


def test_what_is_left_after_the_replies_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, exchange(WAIT_S, 0):
        theirs.sendall(b"+OK\r\n")
        reader = reader_of(ours)
        assert reader.read_many(1) == [b"OK"]
        reader.check_empty()
        theirs.sendall(b"+OK\r\n:1\r\n")
        assert reader.read_many(1) == [b"OK"]
        with pytest.raises(redis.exceptions.InvalidResponse, match="more than it was asked"):
            reader.check_empty()
