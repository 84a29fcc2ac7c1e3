"""Unix sockets, TLS, Redis Cluster and Sentinel: the same rows through each."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from row_makers import FORMAT, IDS, make

from dynamicemb.errors import StoreError
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.rows import RemoteRows
from redis_servers import WAIT_S, RedisServer, free_port

Start = Callable[..., RedisServer]


def check(rows: RemoteRows) -> None:
    """Writing, reading, erasing and listing."""
    ids = torch.cat([IDS, torch.arange(100, 400)])
    rows.push(ids, make(ids))
    found, values = rows.pull(torch.cat([ids, torch.tensor([50])]))
    assert found.tolist() == [True] * len(ids) + [False]
    assert torch.equal(values[:-1], make(ids))
    assert rows.erase(torch.tensor([7, 50])).tolist() == [True, False]
    assert rows.count() == len(ids) - 1
    rows.clear()
    assert rows.count() == 0


def test_unix_socket(server: RedisServer) -> None:
    check(open_rows(f"unix://{server.socket_path}?db=1", "t", FORMAT))


def test_tls(start: Start, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out"]
    subprocess.run([*command, str(certificate)], check=True, capture_output=True)
    port = free_port()
    server = start(
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
    )
    trusting = server.url(f"?ssl_ca_certs={certificate}", scheme="rediss", port=port)
    check(open_rows(trusting, "t", FORMAT))
    blind = server.url("?ssl_cert_reqs=none", scheme="rediss", port=port)
    check(open_rows(blind, "t", FORMAT))
    strict = server.url("?retry_limit=0", scheme="rediss", port=port)
    with pytest.raises(StoreError, match="certificate"):
        open_rows(strict, "t", FORMAT).pull(IDS)


@pytest.mark.parametrize("layout", ["packed", "upstream"])
def test_cluster(start: Start, layout: str) -> None:
    buses = [str(free_port()) for _ in "ab"]
    nodes = [start("--cluster-enabled", "yes", "--cluster-port", bus) for bus in buses]
    first, second = (node.client() for node in nodes)
    first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8000)
    second.execute_command("CLUSTER", "ADDSLOTSRANGE", 8001, 16383)
    first.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, buses[1])
    for one in (first, second):
        wait_until(lambda one=one: one.cluster("INFO")["cluster_state"] == "ok")
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    options = f"?chunk_size=100&&timeout=60s&&prefix=m&&layout={layout}"
    rows = open_rows(f"redis+cluster://{hosts}/{options}", "t", FORMAT)
    ids = torch.arange(1000)
    rows.push(ids, make(ids))
    assert min(first.dbsize(), second.dbsize()) > 0  # both have some
    assert torch.equal(rows.pull(ids)[1], make(ids))
    rows.clear()
    check(rows)
    check(open_rows(f"redis+cluster://{hosts}/{options}&&ttl=1h", "t2", FORMAT))


SENTINEL = "sentinel monitor mymaster 127.0.0.1 {} 1\n"


def test_sentinel(start: Start) -> None:
    sentinel = start(sentinel=SENTINEL.format(start().port))
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster?timeout=60s"
    check(open_rows(url, "t", FORMAT))
    with pytest.raises(StoreError, match="'other'"):
        open_rows(url.replace("mymaster", "other") + "&retry_limit=0", "t", FORMAT).pull(IDS)


@pytest.mark.stress
def test_the_master_that_sentinel_chooses_is_followed(start: Start) -> None:
    master = start()
    replica = start("--replicaof", "127.0.0.1", str(master.port))
    sentinel = start(sentinel=SENTINEL.format(master.port))
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster?timeout=60s&&retry_limit=100"
    rows = open_rows(url, "t", FORMAT)
    rows.push(IDS, make(IDS))
    wait_until(lambda: replica.client().dbsize() == len(IDS))
    wait_until(lambda: len(sentinel.client().sentinel_slaves("mymaster")) == 1)
    sentinel.client().execute_command("SENTINEL", "FAILOVER", "mymaster")
    wait_until(lambda: replica.client().role()[0] == b"master")
    wait_until(lambda: master.client().role()[0] == b"slave")  # until then it takes writes
    rows.push(IDS, make(IDS, 1))  # goes to the new master
    assert torch.equal(rows.pull(IDS)[1], make(IDS, 1))
    assert replica.client().get("{:t:07}0000000000000007")[4:] == bytes(make(IDS, 1)[1].tolist())


def wait_until(happened: Callable[[], bool]) -> None:
    """Polls: servers agree among themselves in their own time."""
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
