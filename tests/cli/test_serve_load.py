"""A server under the largest requests there are: memory below the bound, health answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from served import PATIENCE_S, ServerProcess, exchange

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbDump, DynamicEmbTableOptions
from dynamicemb.cli.serving.memory import (
    BYTES_AROUND,
    BYTES_PER_ID,
    PARSED,
    PER_CONNECTION,
    SMALL,
)

DIM, ROWS, MAX_IDS = 64, 1000, 100_000
MEMORY_MIB = 256  # the default
LOOKUP = "/v1/tables/t/lookup"
JSON, BYTES = "application/json", "application/octet-stream"


def write_checkpoint(folder: Path, dim: int = DIM) -> torch.Tensor:
    """A table ``t`` of ROWS rows of ``dim`` numbers; the rows."""
    options = DynamicEmbTableOptions(dim=dim, max_capacity=2 * ROWS)
    model = BatchedDynamicEmbeddingTables([options], table_names=["t"], optimizer="sgd", seed=1)
    rows = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(1)) / 20
    model.tables[0].insert(torch.arange(ROWS), rows)
    DynamicEmbDump(folder, model)
    return rows


def largest_body(kind: str, ids: torch.Tensor) -> bytes:
    return ids.numpy().tobytes() if kind == BYTES else json.dumps({"ids": ids.tolist()}).encode()


def connect(port: int, buffer: int | None = None) -> socket.socket:
    """With a small ``buffer``, an answer stays at the server until it is read."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", port))
    return connection


def head(kind: str, size: int, more: str = "") -> bytes:
    return (
        f"POST {LOOKUP} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {size}\r\n{more}\r\n"
    ).encode()


def own_mib(process: int) -> float:
    """Memory that is no file's."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def bound_mib(connections: int) -> float:
    """What the documentation says that requests take."""
    return MEMORY_MIB + connections * PER_CONNECTION / 2**20


class Watch:
    """Looks at the memory and the health of a server until the block ends."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._end = server, threading.Event()
        self.before = self.peak = own_mib(server.process.pid)
        self.seconds: list[float] = []
        self.statuses: set[int] = set()

    def _look_at_memory(self) -> None:
        while not self._end.wait(0.02):
            self.peak = max(self.peak, own_mib(self._server.process.pid))

    def _look_at_health(self) -> None:
        """Each time on a connection of its own, as load balancers do."""
        while not self._end.wait(0.05):
            begin = time.monotonic()
            self.statuses.add(exchange(self._server.port, "GET", "/healthz")[0])
            self.seconds.append(time.monotonic() - begin)

    def __enter__(self) -> Watch:
        looks = (self._look_at_memory, self._look_at_health)
        self._threads = [threading.Thread(target=one, daemon=True) for one in looks]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    @property
    def grown(self) -> float:
        """MiB at most above what the server had before."""
        return self.peak - self.before

    def __str__(self) -> str:
        late = sorted(self.seconds)
        return (
            f"memory {self.before:.0f} + {self.grown:.0f} MiB; {len(late)} times /healthz: median "
            f"{statistics.median(late) * 1e3:.1f} ms, p99 {late[len(late) * 99 // 100] * 1e3:.1f} "
            f"ms, slowest {late[-1] * 1e3:.1f} ms"
        )


@contextlib.contextmanager
def descriptors(wanted: int) -> Iterator[int]:
    """Allow so many in this process and those it starts, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    try:
        yield max(soft, allowed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def announce(port: int, number: int, size: int) -> list[socket.socket]:
    """Connections whose request is a head and a promise; those that the server still holds and
    those that it refused."""
    connections = []
    for _ in range(number):
        connections.append(connect(port))
        with contextlib.suppress(ConnectionError):  # one more than allowed, and refused by now
            connections[-1].sendall(head(JSON, size))
    return connections


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder)


@pytest.mark.parametrize("kind", [JSON, BYTES])
def test_ninety_of_the_largest_requests_at_once_stay_below_the_bound(
    checkpoint: tuple[Path, torch.Tensor], kind: str
) -> None:
    """All answers have begun, and none is read: the server holds as much as it ever will."""
    folder, rows = checkpoint
    ids = torch.arange(MAX_IDS) % ROWS
    body = largest_body(kind, ids)
    with ServerProcess(folder, "--idle-seconds", str(PATIENCE_S)) as server:
        server.wait_for(status="ok")
        with Watch(server) as watch, contextlib.ExitStack() as connections:

            def begin(_: int) -> tuple[socket.socket, bytes]:
                connection = connections.enter_context(connect(server.port, 2**14))
                connection.sendall(head(kind, len(body)) + body)
                return connection, connection.recv(12, socket.MSG_WAITALL)

            with ThreadPoolExecutor(90) as pool:
                begun = list(pool.map(begin, range(90)))
            assert {first for _, first in begun} == {b"HTTP/1.1 200"}
            small = exchange(server.port, "GET", f"{LOOKUP}?ids=7")[1]
            assert torch.equal(torch.tensor(small["embeddings"]), rows[7:8])
            assert watch.grown < bound_mib(91)
            _read_one(begun[45][0], kind, rows)
        assert watch.statuses == {200}
        assert statistics.median(watch.seconds) < 0.5
        assert max(watch.seconds) < 5.0  # before: 16 s beside eight of them
        assert watch.grown < bound_mib(92), str(watch)
        assert server.end() == 0
    assert "Traceback" not in server.log


def _read_one(connection: socket.socket, kind: str, rows: torch.Tensor) -> None:
    """The end of an answer of which a part is on its way."""
    stream = connection.makefile("rb")
    lines = b"".join(iter(stream.readline, b"\r\n"))
    if kind == BYTES:
        assert b"X-Rows: 100000" in lines
        content = stream.read(4 * DIM * MAX_IDS + MAX_IDS // 8)
        assert content[-MAX_IDS // 8 :] == b"\xff" * (MAX_IDS // 8)
        assert content[: rows.numel() * 4] == rows.numpy().tobytes()
        return
    pieces = []
    while size := int(stream.readline(), 16):
        pieces.append(stream.read(size))
        assert stream.readline() == b"\r\n"
    assert max(map(len, pieces)) < 2**19
    text = b"".join(pieces)
    assert text.endswith(b"]]}\n")
    last = json.loads(text[text.rindex(b"[") : -3])
    assert torch.equal(torch.tensor(last), rows[(MAX_IDS - 1) % ROWS])


@pytest.mark.parametrize("accept", [JSON, BYTES])
def test_a_connection_with_a_small_request_takes_what_is_documented(
    tmp_path: Path, accept: str
) -> None:
    """Small requests reserve nothing, though their answers may be large; here 32 MB each as bytes,
    of which nothing is read."""
    write_checkpoint(tmp_path, dim=1024)
    ids = ",".join(str(n % 10) for n in range(8000))
    body = f'{{"ids":[{ids}]}}'.encode()
    assert len(body) <= SMALL
    headers = f"Accept: {accept}\r\n" + "".join(f"X-{n}: {'x' * 600}\r\n" for n in range(80))
    with (
        ServerProcess(tmp_path, "--grace-seconds", "0") as server,
        contextlib.ExitStack() as connections,
    ):
        server.wait_for(status="ok")
        with Watch(server) as watch:
            for _ in range(60):
                connection = connections.enter_context(connect(server.port, 2**12))
                connection.sendall(head(JSON, len(body), headers) + body)
                assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
            time.sleep(1.0)
        metrics = ""
        end = time.monotonic() + PATIENCE_S
        while "dynamicemb_connections 61.0" not in metrics:  # the last one for /healthz is closed
            assert time.monotonic() < end, metrics
            metrics = server.get("/metrics")[1].decode()
        least = PARSED * (BYTES_AROUND + BYTES_PER_ID * MAX_IDS)
        assert f"dynamicemb_memory_reserved_bytes {float(least)}" in metrics
        assert watch.grown < 61 * PER_CONNECTION / 2**20, str(watch)


def test_bodies_that_are_only_announced_take_no_memory_and_health_is_answered(
    checkpoint: tuple[Path, torch.Tensor],
) -> None:
    """Also beyond the connections that are allowed."""
    size = BYTES_AROUND + BYTES_PER_ID * MAX_IDS
    with (
        descriptors(2048) as allowed,
        ServerProcess(checkpoint[0], "--grace-seconds", "0") as server,
    ):
        server.wait_for(status="ok")
        before = own_mib(server.process.pid)
        connections = announce(server.port, min(1000, allowed - 200), size)
        try:
            for _ in range(20):
                begin = time.monotonic()
                assert exchange(server.port, "GET", "/healthz")[0] == 200
                assert time.monotonic() - begin < 5.0
            assert exchange(server.port, "GET", "/readyz")[0] == 503
            assert "dynamicemb_connections 256.0" in server.get("/metrics")[1].decode()
            assert own_mib(server.process.pid) - before < 64  # 256 bodies would be 784
        finally:
            for connection in connections:
                connection.close()


def test_the_bound_holds_for_bodies_that_come_beyond_it(
    checkpoint: tuple[Path, torch.Tensor],
) -> None:
    """Bodies of the largest size, all but their last byte: some are held, the others refused."""
    size = BYTES_AROUND + BYTES_PER_ID * MAX_IDS
    body = b'{"ids": [' + b" " * (size - 10)
    with (
        ServerProcess(checkpoint[0], "--grace-seconds", "0") as server,
        contextlib.ExitStack() as connections,
    ):
        server.wait_for(status="ok")

        def send(_: int) -> bytes:
            connection = connections.enter_context(connect(server.port))
            with contextlib.suppress(ConnectionError):  # refused meanwhile
                connection.sendall(head(JSON, size) + body)
            connection.settimeout(5.0)
            try:
                answer = http.client.HTTPResponse(connection)
                answer.begin()
            except TimeoutError:
                return b"held"
            assert answer.headers["Retry-After"] == "1"
            return b"%d" % answer.status

        with Watch(server) as watch, ThreadPoolExecutor(120) as pool:
            ends = list(pool.map(send, range(120)))
        assert set(ends) == {b"held", b"429"}
        assert ends.count(b"held") * size > 100 * 2**20  # the memory is used
        assert watch.grown < bound_mib(121), str(watch)
        assert watch.statuses == {200}
