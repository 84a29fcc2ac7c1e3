"""The bound on memory for requests in flight: who reserves, who waits, who is refused, and that
everything is given back."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import IDS, PATIENCE_S, exchange, make_tables

from dynamicemb import DynamicEmbDump, StoreError
from dynamicemb.cli import http as http_module
from dynamicemb.cli.http import MAX_HEAD, SPARE, HttpServer, serving
from dynamicemb.cli.serving.bodies import ids_of_wish, json_body
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.memory import DEFAULT_BYTES, SMALL, Memory, parsed_bytes
from dynamicemb.cli.serving.service import VITAL, Service
from dynamicemb.errors import UsageError
from dynamicemb.serving import HttpTable

MAX_IDS = 20_000
LOOKUP = "/v1/tables/user/lookup"
#: A body that reserves, and all ids of which are in the table.
LARGE = json.dumps({"ids": IDS[5:].tolist() * 20}).encode()
assert len(LARGE) > SMALL


class Served:
    """A server in this process."""

    def __init__(self, folder: Path, size: int = DEFAULT_BYTES, **settings: Any) -> None:
        follower = Follower(
            folder, 0.0, {"verify": True, "preload": False, "missing": 0.0, "rank": None}
        )
        follower.look()
        self.memory = Memory(size, MAX_IDS, wait_seconds=0.2)
        self.service = Service(follower, max_ids=MAX_IDS, memory=self.memory)
        self.server = HttpServer(
            self.service, vital=VITAL, **{"admit": self.memory.admit, **settings}
        )
        self.free = self.memory.reserved
        self.port = int(self.server.url.rpartition(":")[2])

    def begin(self, size: int = len(LARGE), sent: bytes = LARGE[:1]) -> socket.socket:
        """A connection with a request that has begun."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        head = f"POST {LOOKUP} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        return connection

    @property
    def reserved(self) -> int:
        return self.memory.reserved - self.free


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    DynamicEmbDump(folder, make_tables(1.0))
    return folder


def least(max_ids: int = MAX_IDS) -> int:
    """Bytes that one of the largest requests needs."""
    size = 1
    while True:
        try:
            Memory(size, max_ids)
            return size
        except UsageError:
            size += 2**14


@pytest.fixture
def tight(folder: Path) -> Iterator[Served]:
    """A server with memory for one request of the largest size."""
    served = Served(folder, least())
    with serving(served.server):
        yield served


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, dict(answer.headers), answer.read()


def test_a_request_without_memory_is_refused_for_now_and_small_ones_are_answered(
    tight: Served,
) -> None:
    holding = []
    while tight.memory.size - tight.memory.reserved >= tight.memory._need(len(LARGE)):
        before = tight.reserved
        holding.append(tight.begin())
        wait_until(lambda before=before: tight.reserved > before)  # type: ignore[misc]
    with tight.begin(sent=LARGE) as connection:
        status, headers, content = answer_of(connection)
    assert (status, headers["Retry-After"], headers["Connection"]) == (429, "1", "close")
    assert f"a body of {len(LARGE)} bytes needs" in json.loads(content)["error"]
    with pytest.raises(StoreError, match="429: a body of"):
        HttpTable(tight.server.url, "user")(IDS.repeat(20))
    for path in ("/healthz", "/readyz", "/metrics", "/v1/tables", f"{LOOKUP}?ids=0"):
        assert exchange(tight.port, "GET", path)[0] == 200
    small = {"ids": IDS.tolist()}
    assert exchange(tight.port, "POST", LOOKUP, small)[1]["found"] == [True] * len(IDS)
    for connection in holding:
        connection.close()
    wait_until(lambda: tight.reserved == 0)
    with tight.begin(sent=LARGE) as connection:
        assert answer_of(connection)[0] == 200
    metrics = exchange(tight.port, "GET", "/metrics")[1].decode()
    assert f"dynamicemb_memory_limit_bytes {float(tight.memory.size)}" in metrics
    assert 'dynamicemb_requests_total{route="other",code="429"} 2.0' in metrics


def test_a_request_that_waits_is_answered_when_another_has_ended(folder: Path) -> None:
    served = Served(folder, least())
    served.memory._wait_seconds = PATIENCE_S
    largest = served.service.max_body
    with serving(served.server):
        first = served.begin(largest)
        wait_until(lambda: served.reserved > 0)
        with served.begin(sent=LARGE) as second:
            wait_until(lambda: len(served.memory._pool._waiting) == 1)
            first.close()
            assert answer_of(second)[0] == 200


def test_what_is_only_announced_reserves_nothing(tight: Served) -> None:
    announced = [tight.begin(tight.service.max_body, b"") for _ in range(20)]
    wait_until(lambda: sum(one.busy for one in tight.server._connections) == 20)
    time.sleep(0.05)
    assert tight.reserved == 0
    for connection in announced:
        connection.close()


@pytest.mark.parametrize(
    ("size", "sent", "status"),
    [
        (len(LARGE), LARGE, 200),
        (len(LARGE), LARGE[:-1] + b"?", 400),
        (len(LARGE), LARGE[:-2], None),  # it goes away
        (len(LARGE), LARGE[:1], None),
        (SMALL + 8, b"\0" * (SMALL + 8), 400),
        (400_000, b"[" + b"[]," * 133_333, 413),
    ],
)
def test_memory_is_given_back_however_a_request_ends(
    tight: Served, size: int, sent: bytes, status: int | None
) -> None:
    for _ in range(3):
        with tight.begin(size, sent) as connection:
            if status is None:
                wait_until(lambda: tight.reserved > 0)
            else:
                assert answer_of(connection)[0] == status
        wait_until(lambda: tight.reserved == 0)


def test_an_answer_keeps_less_than_its_request_reserved(folder: Path) -> None:
    memory = Memory(DEFAULT_BYTES, MAX_IDS)
    free = memory.reserved
    lease = memory.admit(memory.max_body)
    large = memory.reserved - free
    assert large > memory.max_body
    memory.keep(lease, MAX_IDS)
    assert 10 * MAX_IDS < memory.reserved - free < large
    memory.keep(lease, 10 * MAX_IDS)  # never more again
    assert memory.reserved - free < large
    lease.keep(0)
    lease.keep(0)
    assert memory.reserved == free
    memory.admit(SMALL)
    assert memory.reserved == free


def test_a_limit_that_no_request_fits_into_is_a_mistake() -> None:
    size = least()
    Memory(size, MAX_IDS)
    with pytest.raises(UsageError, match="--memory-mb is 11; allowed: at least 12 for --max-ids"):
        Memory(size - 2**15, MAX_IDS)


HOSTILE = {
    "lists": b"[" + b"[]," * 30_000 + b"[]]",
    "objects": b"[" + b"{}," * 30_000 + b"{}]",
    "members": b"[" + b'{"":0},' * 20_000 + b"0]",
    "nested": b"[" + b"[[[[1]]]]," * 20_000 + b"0]",
    "one object": b"{" + b",".join(b'"%d":%d' % (n, n + 300) for n in range(43_700)) + b"}",
    "numbers": b'{"ids":[' + b"1," * 90_000 + b"1]}",
    "floats": b'{"ids":[' + b"1.5," * 50_000 + b"1]}",
    "texts of numbers": b'{"ids":[' + b",".join(b'"%d"' % n for n in range(40_000)) + b"]}",
    "unsigned": b'{"ids":[' + b",".join(b"%d" % (2**64 - 1 - n) for n in range(20_000)) + b"]}",
    "texts": ('{"texts":[' + ",".join(f'"é{n}"' for n in range(30_000)) + "]}").encode(),
    "wide characters": ('{"texts":["😀' + "a" * 400_000 + '"]}').encode(),
    "an escape": b'{"texts":["' + b"a" * 400_000 + rb'\ud83d\ude00"]}',
    "escapes": b'{"texts":["' + rb"aaaa\n" * 80_000 + rb'\ud83d\ude00"]}',
    "doubled": b'{"tables":{' + b",".join(b'"t":{"ids":[1]}' for _ in range(20_000)) + b"}}",
    "tables": b'{"tables":{' + b",".join(b'"%d":{"ids":[1]}' % n for n in range(20_000)) + b"}}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_objects_take_no_more_than_is_said_of_their_text(name: str) -> None:
    body = bytearray(HOSTILE[name])
    tracemalloc.start()
    try:
        value = json_body(body)
        with contextlib.suppress(http_module.Refused):
            ids_of_wish(value, 10**9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= parsed_bytes(body)


def test_every_body_of_the_documented_size_can_be_read() -> None:
    """The largest ids that fit into 32 bytes each, with characters of four bytes."""
    memory = Memory(DEFAULT_BYTES, MAX_IDS)
    texts = [f"😀{n:018}" for n in range(MAX_IDS)]
    body = bytearray(json.dumps({"texts": texts}, ensure_ascii=False).encode())
    assert len(body) > 0.8 * memory.max_body
    ids = memory.read(body, lambda some: ids_of_wish(json_body(some), MAX_IDS))
    assert (len(ids), len(body)) == (MAX_IDS, 0)


def test_health_is_answered_when_all_connections_are_taken(folder: Path) -> None:
    served = Served(folder, max_connections=3)
    with serving(served.server):
        held = [served.begin(len(LARGE), b"") for _ in range(3)]
        wait_until(lambda: served.server.connections == 3)
        for _ in range(2 * SPARE):
            for path in VITAL:
                assert exchange(served.port, "GET", path)[0] == 200
        for method, path in (("GET", "/readyz"), ("GET", f"{LOOKUP}?ids=0"), ("POST", LOOKUP)):
            status, answer = exchange(served.port, method, path, b"" if method == "POST" else None)
            assert (status, answer) == (503, {"error": "too many connections"})
        assert exchange(served.port, "GET", "/healthz", b"{}")[0] == 503  # a body is not read
        for connection in held:
            connection.close()
        wait_until(lambda: served.server.connections == 0)
        assert exchange(served.port, "GET", f"{LOOKUP}?ids=0")[0] == 200


def test_spare_connections_are_few_and_end_soon(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "SPARE_SECONDS", 0.1)
    served = Served(folder, max_connections=1)
    with serving(served.server):
        first = served.begin(len(LARGE), b"")
        wait_until(lambda: served.server.connections == 1)
        silent = [
            socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
            for _ in range(2 * SPARE + 4)
        ]
        answers = [connection.makefile("rb").read() for connection in silent]  # to their ends
        assert [answer for answer in answers if answer and b"HTTP/1.1 503" not in answer] == []
        assert answers.count(b"") >= SPARE
        assert len(served.server._spare) <= SPARE
        wait_until(lambda: not served.server._spare)
        assert exchange(served.port, "GET", "/healthz")[0] == 200
        for connection in (*silent, first):
            connection.close()


def test_a_connection_without_a_thread_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    served = Served(folder)
    with serving(served.server):
        with monkeypatch.context() as patch:
            patch.setattr(http_module._thread, "start_new_thread", fails)
            assert exchange(served.port, "GET", "/healthz")[0] == 503
        assert served.server.connections == 0
        assert exchange(served.port, "GET", "/healthz")[0] == 200


def test_all_headers_together_are_bounded(folder: Path) -> None:
    served = Served(folder)
    with serving(served.server):
        for number, status in ((3, 200), (5, 431)):
            headers = {f"X-{n}": "x" * 15_000 for n in range(number)}
            assert exchange(served.port, "GET", "/healthz", headers=headers)[0] == status
    assert 3 * 15_000 < MAX_HEAD < 5 * 15_000


def test_the_bound_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from dynamicemb.cli.app import main

    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--memory-mb N memory for large requests and their answers, in MiB" in text
    assert "Each connection takes up to 0.75 beside it (default: 256)" in text
    assert "--allow-host TEXT" in text
