"""Lookups over real sockets: formats, ids of 64 bits, and requests that are refused."""

from __future__ import annotations

import http.client
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served import DIM, IDS, PATIENCE_S, damage, exchange, make_tables

from dynamicemb import DynamicEmbDump, StoreError, text_id
from dynamicemb.cli.http import HttpServer, Request, Response, serving
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.service import Service
from dynamicemb.serving import HttpTable, ServingTable

MAX_IDS = 1000
BYTES = {"Content-Type": "application/octet-stream"}
#: Numbers whose text is long, small, large or short.
ODD = [[0.1, 1 / 3, 1.17549435e-38, 3.40282347e38], [1e-45, 16777217.0, -2.5e-7, 0.0]]
LOOKUP = "/v1/tables/user/lookup"
TEXT_ID = 5510281697051308262  # of "157"
STORED = [*IDS.tolist(), TEXT_ID, text_id("Jörg, 157")]


class Waiting:
    """A site whose answers wait for ``go``."""

    max_body = 0

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def respond(self, request: Request) -> Response:
        self.asked.set()
        assert self.go.wait(PATIENCE_S)
        return Response((b"done",))

    def done(self, response: Response, seconds: float) -> None:
        pass


def follower_of(folder: Path) -> Follower:
    """Of a checkpoint that does not change."""
    settings = {"verify": True, "preload": False, "missing": -1.0, "rank": None}
    follower = Follower(folder, 0.0, settings)
    follower.look()
    return follower


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server in this process; the row of id ``i`` begins with its place in STORED."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = make_tables()
    user, item = model.tables
    ids = torch.tensor(STORED)
    user.insert(ids, torch.arange(len(ids), dtype=torch.float32)[:, None] + torch.arange(DIM) / 8)
    item.insert(IDS[:1], torch.tensor([[float("nan"), float("inf"), -0.0, 1e-40]]))
    item.insert(torch.tensor([1, -1]), torch.tensor(ODD))
    DynamicEmbDump(folder, model)
    service = Service(follower_of(folder), max_ids=MAX_IDS)
    server = HttpServer(service)
    service.connections = lambda: server.connections
    with serving(server) as url:
        yield int(url.rpartition(":")[2])


def row_of(id_: int) -> list[float]:
    at = STORED.index(id_)
    return [at + n / 8 for n in range(DIM)]


def test_ids_of_64_bits_in_json_as_numbers_texts_and_unsigned(port: int) -> None:
    ids: list[Any] = [2**63 - 1, -(2**63), -1, "-1", 2**64 - 1, str(2**64 - 1), str(2**63), "100"]
    status, answer = exchange(port, "POST", LOOKUP, {"ids": [*ids, 5]})
    assert status == 200
    same = [2**63 - 1, -(2**63), -1, -1, -1, -1, -(2**63), 100]
    assert answer["found"] == [True] * 8 + [False]
    assert answer["embeddings"] == [*map(row_of, same), [-1.0] * DIM]
    query = ",".join(str(one) for one in ids)
    status, got = exchange(port, "GET", f"{LOOKUP}?ids={query}&ids=5")
    assert (status, got) == (200, answer)
    assert exchange(port, "POST", LOOKUP, {"ids": []})[1]["embeddings"] == []


def test_texts_are_looked_up_by_their_ids(port: int) -> None:
    answer = exchange(port, "POST", LOOKUP, {"texts": ["Jörg, 157", "nobody", b"157".decode()]})[1]
    assert answer["found"] == [True, False, True]
    assert answer["embeddings"] == [row_of(text_id("Jörg, 157")), [-1.0] * DIM, row_of(TEXT_ID)]
    query = f"{LOOKUP}?text=J%C3%B6rg,+157&text=nobody&text=157"
    assert exchange(port, "GET", query) == (200, answer)
    several = {"tables": {"user": {"texts": ["157"]}, "item": {"ids": [1]}}}
    tables = exchange(port, "POST", "/v1/lookup", several)[1]["tables"]
    assert tables["user"]["embeddings"] == [row_of(TEXT_ID)]
    assert tables["item"]["found"] == [True]
    assert exchange(port, "POST", LOOKUP, {"texts": []})[1]["found"] == []


def test_bytes_have_the_layout_of_the_documentation(port: int) -> None:
    ids = [-1, 5, 2**63 - 1, *range(100, 107)]
    status, body = exchange(port, "POST", LOOKUP, struct.pack(f"<{len(ids)}q", *ids), BYTES)
    assert status == 200
    assert len(body) == 10 * DIM * 4 + 2
    assert struct.unpack(f"<{DIM}f", body[: DIM * 4]) == tuple(row_of(-1))
    assert struct.unpack(f"<{DIM}f", body[DIM * 4 : DIM * 8]) == (-1.0,) * DIM
    assert body[-2:] == bytes([0b11111101, 0b11])
    assert exchange(port, "POST", LOOKUP, b"", BYTES) == (200, b"")


def test_what_is_accepted_decides_over_what_was_sent(port: int) -> None:
    accept = {"Accept": "application/octet-stream"}
    status, body = exchange(port, "POST", LOOKUP, {"ids": [1]}, accept)
    assert np.frombuffer(body[:-1], "<f4").tolist() == row_of(1)
    accept = {"Accept": "application/json"} | BYTES
    status, answer = exchange(port, "POST", LOOKUP, struct.pack("<q", 1), accept)
    assert (status, answer["embeddings"]) == (200, [row_of(1)])


def test_the_client_finds_what_the_table_has(port: int) -> None:
    table = HttpTable(f"http://127.0.0.1:{port}", "model.user")
    ids = IDS[:300].reshape(3, 100)
    found, rows = table.find(ids)
    assert (found.all(), rows.shape, table.dim) == (True, (3, 100, DIM), DIM)
    assert rows[0, 3].tolist() == row_of(2**63 - 1)
    assert torch.equal(table(ids.view(torch.uint64)), rows)
    assert table(torch.empty(0, dtype=torch.int64)).shape == (0, DIM)
    assert table(torch.tensor([5])).tolist() == [[-1.0] * DIM]
    with pytest.raises(TypeError, match="int64"):
        table(torch.tensor([1.0]))
    with pytest.raises(StoreError, match="1001 ids; allowed: at most 1000"):
        table(torch.arange(MAX_IDS + 1))
    with pytest.raises(StoreError, match="there is no table 'users'"):
        HttpTable(f"http://127.0.0.1:{port}", "users")
    with pytest.raises(StoreError, match="does not answer"):
        HttpTable("http://127.0.0.1:1", "user")
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        HttpTable("127.0.0.1:80", "user")


def test_the_client_takes_no_memory_for_what_is_only_announced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def announce() -> None:
            for _ in range(2):  # the client tries a second time
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{" % 2**50)

        server = threading.Thread(target=announce, daemon=True)
        server.start()
        with pytest.raises(StoreError, match="127.0.0.1"):
            HttpTable(f"http://127.0.0.1:{listening.getsockname()[1]}", "user")


def test_several_tables_in_one_request(port: int) -> None:
    wanted = {"user": {"ids": [1, 5]}, "model.item": {"ids": ["100"]}}
    status, answer = exchange(port, "POST", "/v1/lookup", {"tables": wanted})
    assert status == 200
    assert answer["tables"]["user"]["embeddings"] == [row_of(1), [-1.0] * DIM]
    assert answer["tables"]["model.item"]["found"] == [True]
    for bad in ({"tables": []}, {"tables": {"user": [1]}}, {"ids": [1]}, []):
        assert exchange(port, "POST", "/v1/lookup", bad)[0] == 400
    assert exchange(port, "POST", "/v1/lookup", {"tables": {"x": {"ids": []}}})[0] == 404
    many = {"user": {"ids": [1] * MAX_IDS}, "item": {"ids": [1]}}
    assert exchange(port, "POST", "/v1/lookup", {"tables": many})[0] == 413


def test_numbers_that_json_does_not_have_are_null(port: int) -> None:
    _, answer = exchange(port, "GET", "/v1/tables/item/lookup?ids=0")
    assert answer["embeddings"] == [[None, None, -0.0, pytest.approx(1e-40, rel=1e-3)]]


def test_every_float32_comes_back_from_json(port: int) -> None:
    _, answer = exchange(port, "GET", "/v1/tables/item/lookup?ids=1,-1")
    exact = torch.tensor(ODD, dtype=torch.float32)
    assert torch.equal(torch.tensor(answer["embeddings"], dtype=torch.float32), exact)


def test_tables_are_listed(port: int) -> None:
    status, answer = exchange(port, "GET", "/v1/tables")
    assert status == 200
    about = {"name": "model.user", "short_name": "user", "dim": DIM, "dtype": "float32"}
    assert answer["tables"][0] == about | {"rows": len(STORED)}
    assert exchange(port, "GET", "/v1/tables/model%2Euser")[1]["rows"] == len(STORED)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 5000, "no JSON"),
        (b'{"ids": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"[1]", "the body is list"),
        (b'{"id": [1]}', "['id']"),
        (b'{"ids": [1], "table": "x"}', "['ids', 'table']"),
        (b'{"ids": 1}', "a list"),
        (b'{"ids": [1.0]}', "ids[0] is 1.0"),
        (b'{"ids": [1, true]}', "ids[1] is true"),
        (b'{"ids": [null]}', "ids[0] is null"),
        (b'{"ids": [1], "texts": ["a"]}', "there are ids and texts"),
        (b'{"texts": "abc"}', "a list of texts"),
        (b'{"texts": ["a", 157]}', "texts[1] is 157"),
        (b'{"texts": ["\\ud800"]}', "UTF-8"),
        (b'{"ids": [[1]]}', "ids[0] is [1]"),
        (b'{"ids": [NaN]}', "ids[0] is NaN"),
        (b'{"ids": ["0x10"]}', 'ids[0] is "0x10"'),
        (b'{"ids": ["1_0"]}', 'ids[0] is "1_0"'),
        (b'{"ids": [18446744073709551616]}', "ids[0] is 18446744073709551616"),
        (b'{"ids": [-9223372036854775809]}', "allowed: integers from -9223372036854775808"),
    ],
)
def test_a_body_that_is_wrong_is_refused_with_a_reason(port: int, body: bytes, said: str) -> None:
    status, answer = exchange(port, "POST", LOOKUP, body)
    assert status == 400
    assert said in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("GET", "/", {}, None, 404),
        ("GET", "/v1/tables/nobody", {}, None, 404),
        ("POST", "/v1/tables/nobody/lookup", {}, b'{"ids": [1]}', 404),
        ("GET", "/v1/tables/user/rows", {}, None, 404),
        ("DELETE", "/v1/tables", {}, None, 405),
        ("POST", "/healthz", {}, b"{}", 405),
        ("GET", "/v1/lookup", {}, None, 405),
        ("GET", LOOKUP, {}, None, 400),
        ("GET", LOOKUP + "?ids=1,,2", {}, None, 400),
        ("GET", LOOKUP + "?id=1", {}, None, 400),
        ("GET", LOOKUP + "?ids=1&text=1", {}, None, 400),
        ("GET", LOOKUP + "?text=%ff", {}, None, 400),
        ("POST", LOOKUP, {}, b'{"texts": [' + b'"a",' * MAX_IDS + b'"a"]}', 413),
        ("POST", LOOKUP, {"Content-Type": "text/csv"}, b"1", 415),
        ("POST", LOOKUP, BYTES, b"1234567", 400),
        ("POST", LOOKUP, BYTES, bytes(8 * (MAX_IDS + 1)), 413),
        ("POST", LOOKUP, BYTES, bytes(10**6), 413),
        ("POST", LOOKUP, {"Transfer-Encoding": "chunked"}, None, 411),
        ("POST", LOOKUP, {"Content-Length": "many"}, None, 400),
        ("POST", LOOKUP, {"Content-Length": "-1"}, None, 400),
        ("POST", LOOKUP, {"Content-Length": "9" * 30}, None, 400),
        ("GET", "/healthz", {"X-Long": "x" * 20_000}, None, 431),
        ("GET", "/healthz?" + "x" * 20_000, {}, None, 414),
    ],
)
def test_requests_that_cannot_be_served_have_their_status(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes | None, status: int
) -> None:
    got, answer = exchange(port, method, path, body, headers)
    assert got == status
    assert answer["error"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (bytes(range(128, 256)) * 1000, 414),
    ],
)
def test_what_is_no_request_is_answered_and_the_connection_closed(
    port: int, sent: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while some := connection.recv(2**16):
            answer += some
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nConnection: close\r\n" in answer


def test_damaged_requests_leave_the_server_as_it_is(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (
        b"POST /v1/tables/user/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n"
        b'{"ids": [1, 2]}'
    )
    draw = random.Random(7)
    for _ in range(300):
        sent = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(sent))
            kind = draw.randrange(3)
            if kind == 0:
                sent[at] = draw.randrange(256)
            elif kind == 1:
                del sent[at : at + draw.randint(1, 9)]
            else:
                sent[at:at] = draw.randbytes(draw.randint(1, 9))
            if not sent:
                break
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile("rb").read()
        assert answer == b"" or re.match(rb"HTTP/1\.1 (200|4\d\d|505) ", answer), bytes(sent)
    assert exchange(port, "GET", "/readyz")[0] == 200
    assert caplog.text == ""  # a client that goes away is not worth a line


def test_an_error_of_the_server_is_told_and_logged(
    memory_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    DynamicEmbDump(memory_path, make_tables())
    service = Service(follower_of(memory_path), max_ids=1)
    monkeypatch.setattr(ServingTable, "find", lambda *_: 1 / 0)
    with serving(HttpServer(service)) as url:
        status, answer = exchange(int(url.rpartition(":")[2]), "GET", f"{LOOKUP}?ids=1")
    assert (status, answer) == (500, {"error": "an error of the server; its log says more"})
    assert "ZeroDivisionError" in caplog.text


def test_a_connection_is_kept_also_after_a_refusal_and_closed_when_asked(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.connect()
    kept = connection.sock
    for _ in range(3):
        for path, status in (("/v1/tables", 200), ("/nothing", 404), ("/healthz", 200)):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)
            assert connection.sock is kept
    connection.request("HEAD", "/healthz")
    answer = connection.getresponse()
    assert (int(answer.headers["Content-Length"]) > 0, answer.read()) == (True, b"")
    connection.request("GET", "/healthz", headers={"Connection": "close"})
    answer = connection.getresponse()
    answer.read()
    assert answer.headers["Connection"] == "close"
    assert connection.sock is None


def test_requests_that_come_at_once_are_answered_in_order(port: int) -> None:
    host = "HTTP/1.1\r\nHost: localhost\r\n\r\n"
    text = "".join(f"GET {LOOKUP}?ids={id_} {host}" for id_ in (100, 101, 102))
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(text.encode())
        connection.shutdown(socket.SHUT_WR)
        answers = connection.makefile("rb").read()
    starts = (f"[[{row_of(id_)[0]:g}, {row_of(id_)[1]:g}, " for id_ in (100, 101, 102))
    places = [answers.index(start.encode()) for start in starts]
    assert places == sorted(places)


def test_more_connections_than_allowed_are_told_so(memory_path: Path) -> None:
    DynamicEmbDump(memory_path, make_tables())
    service = Service(follower_of(memory_path), max_ids=1)
    with serving(server := HttpServer(service, max_connections=1)) as url:
        port = int(url.rpartition(":")[2])
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        for _ in range(2):
            kept.request("GET", "/readyz")
            answer = kept.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
            assert exchange(port, "GET", "/readyz") == (503, {"error": "too many connections"})
        kept.close()
        wait_until(lambda: server.connections == 0)
        assert exchange(port, "GET", "/readyz")[0] == 200


def test_an_idle_connection_is_closed_and_the_client_opens_another(memory_path: Path) -> None:
    DynamicEmbDump(memory_path, make_tables(3.0))
    service = Service(follower_of(memory_path), max_ids=10)
    with serving(server := HttpServer(service, idle_seconds=0.05)) as url:
        table = HttpTable(url, "user")
        for _ in range(3):
            assert table(IDS[:1]).tolist() == [[3.0] * DIM]
            wait_until(lambda: server.connections == 0)
    with pytest.raises(StoreError, match="does not answer"):
        table(IDS[:1])


@pytest.mark.parametrize("in_time", [True, False])
def test_the_end_waits_for_requests_that_were_begun_but_not_for_ever(in_time: bool) -> None:
    site = Waiting()
    server = HttpServer(site)
    server.start()
    connection = socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE_S
    )
    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert site.asked.wait(PATIENCE_S)
    if in_time:
        threading.Timer(0.1, site.go.set).start()
    assert server.stop(PATIENCE_S if in_time else 0.0) is in_time
    site.go.set()
    assert connection.makefile("rb").read().endswith(b"done")
    connection.close()


def test_what_is_verified_before_it_is_served_and_what_is_not(memory_path: Path) -> None:
    DynamicEmbDump(memory_path, make_tables(1.0))
    damage(memory_path)
    settings = {"preload": True, "missing": 0.0, "rank": None}
    careful = Follower(memory_path, 0.0, settings | {"verify": True})
    careful.look()
    assert careful.standing.state is None
    assert "item" in str(careful.standing.problem)
    hasty = Follower(memory_path, 0.0, settings | {"verify": False})
    hasty.look()
    assert hasty.standing.state is not None
    assert hasty.standing.state.tables["model.user"](IDS[:1]).tolist() == [[1.0] * DIM]


def test_metrics_count_requests_ids_and_misses(port: int) -> None:
    def numbers() -> dict[str, float]:
        text = exchange(port, "GET", "/metrics")[1].decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def more(name: str, **labels: str) -> float:
        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
        key = f"dynamicemb_{name}{{{shown}}}"
        return after[key] - before.get(key, 0.0)

    exchange(port, "GET", "/metrics")
    before = numbers()
    assert exchange(port, "POST", LOOKUP, {"ids": [1, 2, 3]})[0] == 200
    assert exchange(port, "POST", LOOKUP, {"ids": "?"})[0] == 400
    after = numbers()
    assert more("lookup_ids_total", table="model.user") == 3
    assert more("lookup_misses_total", table="model.user") == 2
    assert more("requests_total", route="lookup", code="200") == 1
    assert more("requests_total", route="lookup", code="400") == 1
    assert more("request_seconds_count", route="lookup") == 2
    assert more("request_seconds_bucket", route="lookup", le="+Inf") == 2
    assert after['dynamicemb_table_rows{table="model.user"}'] == len(STORED)
    assert after["dynamicemb_delta"] == 0
    assert after["dynamicemb_following"] == 1
    assert after["dynamicemb_connections"] >= 1


class StopsBeforeSending:
    """A site whose answer is sent, to a connection that is kept, when ``go`` says so."""

    max_body = 0

    def __init__(self) -> None:
        self.answered, self.go = threading.Event(), threading.Event()

    def respond(self, request: Request) -> Response:
        return Response((b"done",))

    def done(self, response: Response, seconds: float) -> None:
        self.answered.set()
        assert self.go.wait(PATIENCE_S)


class Awaited(threading.Event):
    """Says that somebody waits for it."""

    def __init__(self, said: threading.Event) -> None:
        super().__init__()
        self.said = said

    def wait(self, timeout: float | None = None) -> bool:
        self.said.set()
        return super().wait(timeout)


def test_a_connection_that_becomes_free_while_the_server_stops_is_closed() -> None:
    site = StopsBeforeSending()
    server = HttpServer(site, idle_seconds=PATIENCE_S)
    server.start()
    client = http.client.HTTPConnection(
        "127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE_S
    )
    client.request("GET", "/")
    assert site.answered.wait(PATIENCE_S)
    (connection,) = server._connections
    connection.ended = Awaited(site.go)  # stop() waits when it has looked
    assert server.stop(grace_seconds=10.0)
    assert client.getresponse().read() == b"done"
    client.close()
