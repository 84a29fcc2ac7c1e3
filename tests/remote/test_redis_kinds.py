"""Unix sockets, TLS, Redis Cluster and Sentinel: the same rows through each."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hostile_redis import BEHAVIOURS, HostileRedis
from row_makers import FORMAT, IDS, make

from dynamicemb.errors import StoreError
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.rows import RemoteRows
from redis_servers import PATIENT, WAIT_S, RedisServer, free_port

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
    check(open_rows(f"unix://{server.socket_path}?db=1&&{PATIENT}", "t", FORMAT))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1."""
    tmp_path = tmp_path_factory.mktemp("tls")
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
    return certificate, key


def test_tls(start: Start, certificate: tuple[Path, Path]) -> None:
    port, (file, key) = free_port(), certificate
    server = start(
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(file), "--tls-key-file", str(key)),
    )
    trusting = server.url(f"?ssl_ca_certs={file}", scheme="rediss", port=port)
    check(open_rows(trusting, "t", FORMAT))
    blind = server.url("?ssl_cert_reqs=none", scheme="rediss", port=port)
    check(open_rows(blind, "t", FORMAT))
    strict = server.url("?retry_limit=0", scheme="rediss", port=port)
    with pytest.raises(StoreError, match="certificate"):
        open_rows(strict, "t", FORMAT).pull(IDS)


@pytest.mark.parametrize("behaviour", [None, "drips", "silence", "bulk of 2 GB", "integers"])
def test_a_hostile_server_behind_tls_is_an_error_in_bounded_time(
    certificate: tuple[Path, Path], behaviour: str | None
) -> None:
    if behaviour is None:  # nobody shakes hands
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        listener = HostileRedis(BEHAVIOURS[behaviour], tls=context)
        port = listener.port
    options = f"?ssl_ca_certs={certificate[0]}&&timeout=500ms&&retry_limit=0"
    rows = open_rows(f"rediss://127.0.0.1:{port}/{options}", "t", FORMAT)
    for work in (lambda: rows.pull(IDS), lambda: rows.push(IDS, make(IDS)), rows.count):
        begin = time.monotonic()
        with pytest.raises(StoreError, match=r"127\.0\.0\.1"):
            work()
        assert time.monotonic() - begin < 60
    listener.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RedisServer]]:
    """Three nodes that know each other and share the slots out among them."""
    buses = [str(free_port()) for _ in range(3)]
    nodes = [RedisServer("--cluster-enabled", "yes", "--cluster-port", bus) for bus in buses]
    for node, slots in zip(nodes, ((0, 5460), (5461, 10921), (10922, 16383)), strict=True):
        node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
    for node, bus in zip(nodes[1:], buses[1:], strict=True):
        nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
    for node in nodes:
        wait_until(lambda node=node: node.client().cluster("INFO")["cluster_state"] == "ok")
    yield nodes
    for node in nodes:
        node.close()


def cluster_url(nodes: list[RedisServer], options: str) -> str:
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])  # the third is found
    return f"redis+cluster://{hosts}/?{PATIENT}&&chunk_size=100&&{options}"


@pytest.mark.parametrize("layout", ["packed", "upstream"])
def test_cluster(cluster: list[RedisServer], layout: str) -> None:
    url = cluster_url(cluster, f"prefix=m&&layout={layout}")
    rows = open_rows(url, "t", FORMAT)
    ids = torch.arange(1000)
    rows.push(ids, make(ids))
    assert min(node.client().dbsize() for node in cluster) > 0  # all have some
    assert torch.equal(rows.pull(ids)[1], make(ids))
    rows.clear()
    check(rows)
    check(open_rows(f"{url}&&ttl=1h", "t2", FORMAT))


def test_rows_of_a_cluster_are_found_after_their_slots_moved(cluster: list[RedisServer]) -> None:
    rows = open_rows(cluster_url(cluster, "prefix=moving"), "t", FORMAT)
    ids = torch.arange(256)  # in 256 different places
    rows.push(ids, make(ids))
    clients = [node.client() for node in cluster]
    names = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
    keys = clients[0].keys("{moving*")
    assert keys
    for key in keys:  # all that the first node has, to the second
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", key)
        clients[1].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        clients[0].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        clients[0].execute_command(
            "MIGRATE", "127.0.0.1", cluster[1].port, key, 0, int(WAIT_S * 1000)
        )
        for client in (clients[1], clients[0], clients[2]):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])
    assert clients[0].keys("{moving*") == []
    found, values = rows.pull(ids)
    assert bool(found.all())
    assert torch.equal(values, make(ids))
    rows.push(ids, make(ids, 1))
    assert torch.equal(rows.pull(ids)[1], make(ids, 1))
    rows.clear()


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and sends nothing."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    yield listener.getsockname()[1]
    listener.close()


def test_a_cluster_is_found_beside_a_silent_node(cluster: list[RedisServer], silent: int) -> None:
    hosts = f"127.0.0.1:{silent},127.0.0.1:{cluster[0].port}"
    # In one attempt, if the machine is not busy.
    rows = open_rows(f"redis+cluster://{hosts}/?timeout=2s&&retry_limit=30", "t", FORMAT)
    rows.push(IDS, make(IDS))
    assert torch.equal(rows.pull(IDS)[1], make(IDS))
    rows.clear()


def test_a_master_is_found_beside_a_silent_sentinel(start: Start, silent: int) -> None:
    sentinel = start(sentinel=SENTINEL.format(start().port))
    hosts = f"127.0.0.1:{silent},127.0.0.1:{sentinel.port}"
    rows = open_rows(f"redis+sentinel://{hosts}/mymaster?timeout=2s&&retry_limit=30", "t", FORMAT)
    rows.push(IDS, make(IDS))
    assert torch.equal(rows.pull(IDS)[1], make(IDS))


@pytest.mark.parametrize("behaviour", ["garbage", "integers", "errors in arrays", "bulk of 2 GB"])
def test_a_master_is_found_beside_a_sentinel_that_talks_nonsense(
    start: Start, behaviour: str
) -> None:
    sentinel = start(sentinel=SENTINEL.format(start().port))
    hostile = HostileRedis(BEHAVIOURS[behaviour])
    hosts = f"127.0.0.1:{hostile.port},127.0.0.1:{sentinel.port}"
    url = f"redis+sentinel://{hosts}/mymaster?timeout=2s&&retry_limit=30"
    check(open_rows(url, "t", FORMAT))
    hostile.close()


SENTINEL = "sentinel monitor mymaster 127.0.0.1 {} 1\n"


def test_sentinel(start: Start) -> None:
    sentinel = start(sentinel=SENTINEL.format(start().port))
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster?{PATIENT}"
    check(open_rows(url, "t", FORMAT))
    with pytest.raises(StoreError, match="'other'"):
        open_rows(url.replace("mymaster", "other") + "&retry_limit=0", "t", FORMAT).pull(IDS)


@pytest.mark.stress
def test_the_master_that_sentinel_chooses_is_followed(start: Start) -> None:
    master = start()
    replica = start("--replicaof", "127.0.0.1", str(master.port))
    sentinel = start(sentinel=SENTINEL.format(master.port))
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster?{PATIENT}&&retry_limit=100"
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
