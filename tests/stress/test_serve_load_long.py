"""Ninety of the largest requests read to their ends, a thousand announced bodies, and a health
check beside them that is answered within half a second."""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
from served import PATIENCE_S, ServerProcess, exchange
from test_serve_load import (
    BYTES,
    DIM,
    JSON,
    LOOKUP,
    MAX_IDS,
    ROWS,
    Watch,
    announce,
    bound_mib,
    connect,
    descriptors,
    head,
    largest_body,
    own_mib,
    write_checkpoint,
)

from dynamicemb.cli.serving.memory import BYTES_AROUND, BYTES_PER_ID

HEALTH_SECONDS = 0.5
LARGEST = BYTES_AROUND + BYTES_PER_ID * MAX_IDS


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100]


def read_all(port: int, kind: str, body: bytes) -> tuple[int, int]:
    """Status and bytes of an answer, which is thrown away: reading must not take the time."""
    buffer, size = bytearray(2**18), 0
    with connect(port) as connection:
        connection.sendall(head(kind, len(body), "Connection: close\r\n") + body)
        status = int(connection.recv(12, socket.MSG_WAITALL)[9:])
        while some := connection.recv_into(buffer):
            size += some
            end = bytes(buffer[max(0, some - 5) : some])
    assert kind == BYTES or status != 200 or end == b"0\r\n\r\n"
    return status, size


def look_up(port: int, rows: torch.Tensor, end: threading.Event, seconds: list[float]) -> None:
    """A few ids, again and again."""
    while not end.wait(0.1):
        begin = time.monotonic()
        answer = exchange(port, "POST", LOOKUP, {"ids": [3, 5, 999_999]})[1]
        seconds.append(time.monotonic() - begin)
        assert answer["found"] == [True, True, False]
        assert torch.equal(torch.tensor(answer["embeddings"][:2]), rows[[3, 5]])


@pytest.mark.stress
@pytest.mark.parametrize("kind", [JSON, BYTES])
def test_ninety_of_the_largest_requests_are_answered_and_health_beside_them(
    memory_path: Path, kind: str
) -> None:
    rows = write_checkpoint(memory_path)
    body = largest_body(kind, torch.arange(MAX_IDS) % ROWS)
    rounds = 1 if kind == JSON else 20
    with ServerProcess(memory_path) as server:
        server.wait_for(status="ok")
        end, seconds = threading.Event(), list[float]()
        small = threading.Thread(target=look_up, args=(server.port, rows, end, seconds))
        with Watch(server) as watch, ThreadPoolExecutor(90) as pool:
            small.start()
            for _ in range(rounds):
                ends = list(pool.map(lambda _: read_all(server.port, kind, body), range(90)))
                assert {status for status, _ in ends} == {200}
                assert len({size for _, size in ends}) <= 40  # frames differ a little
                assert min(size for _, size in ends) > 4 * DIM * MAX_IDS
            end.set()
            small.join(PATIENCE_S)
        sys.stderr.write(f"\n{kind}: {watch}\nsmall: median {statistics.median(seconds):.4f} s\n")
        assert watch.grown < bound_mib(92)
        assert watch.statuses == {200}
        assert p99(watch.seconds) < HEALTH_SECONDS
        assert statistics.median(seconds) < HEALTH_SECONDS
        time.sleep(1.0)
        assert own_mib(server.process.pid) - watch.before < 100  # it is given back
        assert server.end() == 0
    assert "Traceback" not in server.log


@pytest.mark.stress
@pytest.mark.parametrize("connections", [256, 1200])
def test_a_thousand_announced_bodies_with_and_without_the_largest_requests(
    memory_path: Path, connections: int
) -> None:
    """With 256 connections the health check has a spare one; with 1,200, ninety of the largest
    requests are answered as well."""
    rows = write_checkpoint(memory_path)
    body = largest_body(JSON, torch.arange(MAX_IDS // 5) % ROWS)
    with (
        descriptors(4096) as allowed,
        ServerProcess(
            memory_path, "--grace-seconds", "0", "--max-connections", str(connections)
        ) as server,
    ):
        number = min(1000, allowed // 3)
        server.wait_for(status="ok")
        with Watch(server) as watch:
            announced = announce(server.port, number, LARGEST)
            for _ in range(3):  # again and again, beyond what is held
                for connection in announce(server.port, number, LARGEST):
                    connection.close()
            assert watch.grown < 100
            if connections > 1000:
                with ThreadPoolExecutor(90) as pool:
                    ends = list(pool.map(lambda _: read_all(server.port, JSON, body), range(90)))
                assert {status for status, _ in ends} == {200}
                assert exchange(server.port, "GET", f"{LOOKUP}?ids=7")[1]["embeddings"] == [
                    pytest.approx(rows[7].tolist(), rel=1e-7)
                ]
            time.sleep(2.0)
        sys.stderr.write(f"\n{connections} connections: {watch}\n")
        for connection in announced:
            connection.close()
        assert watch.grown < bound_mib(91)
        assert watch.statuses == {200}
        assert p99(watch.seconds) < HEALTH_SECONDS


@pytest.mark.stress
def test_memory_does_not_grow_over_many_answers(memory_path: Path) -> None:
    write_checkpoint(memory_path)
    body = largest_body(JSON, torch.arange(MAX_IDS // 5) % ROWS)
    with ServerProcess(memory_path) as server:
        server.wait_for(status="ok")
        seen = []
        with ThreadPoolExecutor(16) as pool:
            for _ in range(10):
                ends = list(pool.map(lambda _: read_all(server.port, JSON, body), range(32)))
                assert {status for status, _ in ends} == {200}
                time.sleep(0.5)
                seen.append(own_mib(server.process.pid))
        sys.stderr.write(f"\n{[round(one) for one in seen]} MiB\n")
        assert max(seen[5:]) - min(seen[:5]) < 16
