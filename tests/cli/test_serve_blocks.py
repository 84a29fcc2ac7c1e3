"""Answers that are computed while they are sent: their content, their state and their end."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PATIENCE_S

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbDump,
    DynamicEmbTableOptions,
)
from dynamicemb.cli.http import HttpServer, serving
from dynamicemb.cli.serving.answers import NUMBERS
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.memory import BLOCK, DEFAULT_BYTES, SMALL_BLOCK, Memory
from dynamicemb.cli.serving.service import Service
from dynamicemb.incremental_dump import dump_delta
from dynamicemb.serving import HttpTable, ServingTable

MAX_IDS = 50_000
#: Columns of the tables. A row of the last is larger than a block.
DIMS = {"wide": 64, "narrow": 7, "row": NUMBERS + 5}
MISSING = -0.25
BYTES = {"Content-Type": "application/octet-stream"}


class Served:
    """A server in this process, and the tables that it should answer from."""

    def __init__(self, folder: Path, idle_seconds: float = PATIENCE_S) -> None:
        settings = {"verify": True, "preload": False, "missing": MISSING, "rank": None}
        self.follower = Follower(folder, 0.0, settings)
        self.follower.look()
        self.memory = Memory(DEFAULT_BYTES, MAX_IDS)
        self.service = Service(self.follower, max_ids=MAX_IDS, memory=self.memory)
        self.server = HttpServer(self.service, idle_seconds=idle_seconds, admit=self.memory.admit)
        self.free = self.memory.reserved

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    def send(self, ids: torch.Tensor, table: str = "wide", kind: str = "json") -> socket.socket:
        """The connection of a request whose answer is not read, and hardly fits into buffers."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", self.port))
        as_json = kind == "json"
        body = json.dumps({"ids": ids.tolist()}).encode() if as_json else ids.numpy().tobytes()
        connection.sendall(
            f"POST /v1/tables/{table}/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            f"application/{'json' if as_json else 'octet-stream'}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return connection


def make_model() -> BatchedDynamicEmbeddingTables:
    options = [
        DynamicEmbTableOptions(
            dim=dim, max_capacity=1024, embedding_dtype=torch.float16 if name == "narrow" else None
        )
        for name, dim in DIMS.items()
    ]
    model = BatchedDynamicEmbeddingTables(options, table_names=list(DIMS), optimizer="sgd", seed=1)
    for table, dim in zip(model.tables, DIMS.values(), strict=True):
        table.insert(torch.arange(500), torch.randn(500, dim).to(table.dtype))
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("checkpoint")
    DynamicEmbDump(folder, make_model())
    served = Served(folder)
    with serving(served.server):
        yield served
    assert served.memory.reserved == served.free


def table_of(served: Served, name: str) -> ServingTable:
    state = served.follower.standing.state
    assert state is not None
    return state.tables[state.names[name]]


def ask(
    served: Served, method: str, path: str, body: Any = None, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    sent = json.dumps(body).encode() if isinstance(body, dict) else body
    connection.request(method, path, sent, {k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def numbers_of_ids(dim: int) -> list[int]:
    """Around the limits of one block and of several, of JSON and of bytes."""
    limits = [NUMBERS // dim, 2 * NUMBERS // dim, SMALL_BLOCK // 4 // dim, BLOCK // 4 // dim]
    around = {limit + more for limit in limits for more in (-1, 0, 1)}
    return sorted(n for n in around | {0, 1, 2, 7, 8, 9} if 0 <= n <= MAX_IDS)


@pytest.mark.parametrize("name", DIMS)
def test_blocks_make_the_document_that_one_piece_would(served: Served, name: str) -> None:
    table, dim = table_of(served, name), DIMS[name]
    for n in numbers_of_ids(dim):
        ids = torch.randint(700, (n,))
        found, rows = table.find(ids)
        answer, content = ask(served, "POST", f"/v1/tables/{name}/lookup", {"ids": ids.tolist()})
        assert answer.status == 200
        document = json.loads(content)
        assert list(document) == ["checkpoint", "delta", "table", "found", "embeddings"]
        assert document["found"] == found.tolist()
        exact = torch.tensor(document["embeddings"], dtype=torch.float32).reshape(n, dim)
        assert torch.equal(exact, rows)
        assert content.endswith(b"]}\n")
        assert (answer.headers["Content-Length"] is None) == (n * dim > NUMBERS)
        assert (answer.headers["Transfer-Encoding"] == "chunked") == (n * dim > NUMBERS)


@pytest.mark.parametrize("name", DIMS)
def test_blocks_of_bytes_have_a_known_length(served: Served, name: str) -> None:
    table = HttpTable(served.server.url, name, timeout=PATIENCE_S)
    for n in numbers_of_ids(DIMS[name]):
        ids = torch.randint(700, (n,))
        for one, expected in zip(table.find(ids), table_of(served, name).find(ids), strict=True):
            assert torch.equal(one, expected)


def test_rows_are_written_into_memory_of_the_right_shape_only(served: Served) -> None:
    ids = torch.tensor([3, 600])
    for name, dim in DIMS.items():
        table = table_of(served, name)
        expected = table.find(ids)
        for dtype in (torch.float32, torch.float16):
            found, rows = torch.empty(2, dtype=torch.bool), torch.empty(2, dim, dtype=dtype)
            table.find_into(ids, found, rows)
            assert torch.equal(found, expected[0])
            assert torch.equal(rows, expected[1].to(dtype))
    table = table_of(served, "wide")
    for shape in ((1, 64), (2, 63), (128,)):
        with pytest.raises(ValueError, match=r"rows is .*allowed: \(2, 64\), contiguous"):
            table.find_into(ids, torch.empty(2, dtype=torch.bool), torch.empty(shape))
    with pytest.raises(ValueError, match=r"rows is \(2, 64\)"):
        table.find_into(ids, torch.empty(2, dtype=torch.bool), torch.empty(64, 2).T)
    with pytest.raises(ValueError, match="found is"):
        table.find_into(ids, torch.empty(3, dtype=torch.bool), torch.empty(2, 64))
    with pytest.raises(TypeError, match="int64"):
        table.find_into(ids.int(), torch.empty(2, dtype=torch.bool), torch.empty(2, 64))


def test_ids_as_bytes_and_rows_as_json_and_the_other_way_round(served: Served) -> None:
    ids = torch.randint(700, (9_000,))
    found, rows = table_of(served, "wide").find(ids)
    path = "/v1/tables/wide/lookup"
    accept = {"Accept": "application/json", "Content_Type": BYTES["Content-Type"]}
    document = json.loads(ask(served, "POST", path, ids.numpy().tobytes(), **accept)[1])
    assert document["found"] == found.tolist()
    assert torch.equal(torch.tensor(document["embeddings"]), rows)
    body = {"ids": ids.tolist()}
    answer, content = ask(served, "POST", path, body, Accept=BYTES["Content-Type"])
    assert answer.headers["X-Rows"] == "9000"
    assert content[: rows.numel() * 4] == rows.numpy().tobytes()


def test_several_tables_in_blocks(served: Served) -> None:
    counts = {"wide": 3_000, "model.narrow": 0, "narrow": 9_001, "row": 2}
    ids = {name: torch.randint(700, (n,)) for name, n in counts.items()}
    body = {"tables": {name: {"ids": some.tolist()} for name, some in ids.items()}}
    answer, content = ask(served, "POST", "/v1/lookup", body)
    assert answer.headers["Transfer-Encoding"] == "chunked"
    document = json.loads(content)
    assert list(document) == ["checkpoint", "delta", "tables"]
    assert list(document["tables"]) == list(counts)
    for name, some in ids.items():
        found, rows = table_of(served, name).find(some)
        assert document["tables"][name]["found"] == found.tolist()
        exact = torch.tensor(document["tables"][name]["embeddings"]).reshape(rows.shape)
        assert torch.equal(exact, rows)
    assert json.loads(ask(served, "POST", "/v1/lookup", {"tables": {}})[1])["tables"] == {}


def test_an_older_client_reads_to_the_end_of_the_connection(served: Served) -> None:
    ids = torch.randint(700, (2_000,))
    body = json.dumps({"ids": ids.tolist()}).encode()
    head = f"POST /v1/tables/wide/lookup HTTP/1.0\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"{head}Connection: keep-alive\r\n\r\n".encode() + body)
        head, _, content = connection.makefile("rb").read().decode().partition("\r\n\r\n")
    assert "Transfer-Encoding" not in head
    assert "Content-Length" not in head
    assert "Connection: close" in head
    rows = table_of(served, "wide")(ids)
    assert torch.equal(torch.tensor(json.loads(content)["embeddings"]), rows)


def test_only_the_head_of_an_answer_in_blocks(served: Served) -> None:
    query = ",".join(map(str, range(500)))
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    for method in ("HEAD", "GET", "HEAD", "GET"):  # on one connection: nothing is left over
        connection.request(method, f"/v1/tables/wide/lookup?ids={query}")
        answer = connection.getresponse()
        assert answer.headers["Transfer-Encoding"] == "chunked"
        content = answer.read()
        assert bool(content) == (method == "GET")
    connection.close()


def test_ids_of_an_answer_in_blocks_are_counted_once(served: Served) -> None:
    def count(name: str) -> float:
        text = ask(served, "GET", "/metrics")[1].decode()
        start = f'dynamicemb_lookup_{name}_total{{table="model.narrow"}} '
        lines = [line for line in text.splitlines() if line.startswith(start)]
        return sum(float(line[len(start) :]) for line in lines)

    for headers in ({}, {"Accept": BYTES["Content-Type"]}):
        ids, misses = count("ids"), count("misses")
        body = {"ids": [1, 600] * 10_000}
        ask(served, "POST", "/v1/tables/narrow/lookup", body, **headers)
        assert count("ids") - ids == 20_000
        assert count("misses") - misses == 10_000


@pytest.mark.parametrize("kind", ["json", "bytes"])
def test_an_answer_is_of_one_state_also_if_another_comes_while_it_is_sent(
    memory_path: Path, kind: str
) -> None:
    ids = torch.arange(500).repeat(40 if kind == "json" else 100)
    model = make_model()
    for table in model.tables:
        table.insert(torch.arange(500), torch.full((500, table.dim), 1 / 3).to(table.dtype))
    dump_delta(memory_path, model)
    served = Served(memory_path)
    with serving(served.server):
        connection = served.send(ids, kind=kind)
        wait_until(lambda: served.memory.reserved > served.free)
        assert connection.recv(9, socket.MSG_WAITALL) == b"HTTP/1.1 "
        for table in model.tables:
            table.insert(torch.arange(500), torch.full((500, table.dim), 2 / 3).to(table.dtype))
        dump_delta(memory_path, model)
        served.follower.look()
        assert table_of(served, "wide")(ids[:1]).unique().tolist() == [pytest.approx(2 / 3)]
        assert served.memory.reserved > served.free  # it is still being sent
        answer = http.client.HTTPResponse(connection)
        answer.fp = connection.makefile("rb")
        rest = answer.fp.read1(3)
        assert rest == b"200"
        head = b"".join(iter(answer.fp.readline, b"\r\n")).decode()
        if kind == "bytes":
            rows = torch.frombuffer(
                bytearray(answer.fp.read(4 * 64 * len(ids))), dtype=torch.float32
            )
        else:
            assert "chunked" in head
            content = b""
            while size := int(answer.fp.readline(), 16):
                content += answer.fp.read(size)
                answer.fp.readline()
            document = json.loads(content)
            assert document["delta"] == 0
            rows = torch.tensor(document["embeddings"])
        assert len(rows.flatten()) == 64 * len(ids)
        assert rows.unique().tolist() == [pytest.approx(1 / 3)]
        answer.close()
        connection.close()
        fresh = json.loads(ask(served, "GET", "/v1/tables/wide/lookup?ids=1")[1])
        assert (fresh["delta"], fresh["embeddings"][0][0]) == (1, pytest.approx(2 / 3))


@pytest.mark.parametrize("kind", ["json", "bytes"])
def test_a_client_that_does_not_read_is_closed_and_holds_nothing(
    memory_path: Path, kind: str
) -> None:
    model = make_model()
    dump_delta(memory_path, model)
    served = Served(memory_path, idle_seconds=1.0)
    with serving(served.server):
        connection = served.send(torch.arange(500).repeat(MAX_IDS // 500), kind=kind)
        wait_until(lambda: served.memory.reserved > served.free)
        model.tables[0].insert(torch.arange(5), torch.ones(5, 64))
        dump_delta(memory_path, model)
        assert served.follower.standing.state is not None
        before = weakref.ref(served.follower.standing.state.tables["model.wide"])
        served.follower.look()
        wait_until(lambda: served.server.connections == 0)
        assert served.memory.reserved == served.free
        gc.collect()
        assert before() is None
        connection.close()


@pytest.mark.parametrize("kind", ["json", "bytes"])
def test_an_error_in_the_middle_breaks_the_answer_off(
    served: Served, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls = ServingTable.find_into, [0]

    def fails(table: ServingTable, *arguments: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise ZeroDivisionError
        real(table, *arguments)

    ids = torch.arange(500).repeat(MAX_IDS // 500)
    monkeypatch.setattr(ServingTable, "find_into", fails)
    if kind == "json":  # the first pass is part of the first block
        answer = ask(served, "POST", "/v1/tables/wide/lookup", {"ids": ids.tolist()})[0]
        assert answer.status == 500
    else:
        with contextlib.closing(served.send(ids, kind=kind)) as connection:
            content = connection.makefile("rb").read()
        assert content.startswith(b"HTTP/1.1 200 ")
        assert len(content) < 64 * 4 * len(ids)
    assert "ZeroDivisionError" in caplog.text
    wait_until(lambda: served.memory.reserved == served.free)


def test_json_that_breaks_off_has_no_end(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls = ServingTable.find, [0]

    def fails(table: ServingTable, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls[0] += 1
        if calls[0] == 20:
            raise ZeroDivisionError
        return real(table, ids)

    monkeypatch.setattr(ServingTable, "find", fails)
    with pytest.raises(http.client.IncompleteRead):
        ask(served, "POST", "/v1/tables/wide/lookup", {"ids": [1] * 20_000})
    assert "an answer broke off" in caplog.text
    assert served.memory.reserved == served.free
