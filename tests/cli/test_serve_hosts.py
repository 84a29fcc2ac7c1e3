"""Whom a server takes itself for: a web page whose name points at it must not read the tables."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import IDS, PATIENCE_S, ServerProcess, exchange, make_tables

from dynamicemb import DynamicEmbDump
from dynamicemb.cli.http import HttpServer, Request, Response, serving
from dynamicemb.serving import HttpTable


class Site:
    """Answers everything."""

    max_body = 100

    def respond(self, request: Request) -> Response:
        return Response((b"mine",))

    def done(self, response: Response, seconds: float) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(HttpServer(Site(), names=["tables.example"])) as url:
        yield int(url.rpartition(":")[2])


def sent(port: int, text: str) -> tuple[int, bytes]:
    """Status and body of the answer to a request as it stands."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(text.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:80",
        "some.localhost:8642",
        "127.0.0.1:8642",
        "127.8.9.10",
        "10.1.2.3:8642",  # Kubernetes probes, and the address of a container from outside
        "[::1]:8642",
        "[::1]",
        "[fe80::1%eth0]:80",
        "tables.example",
        "Tables.Example.:443",
        socket.gethostname(),
    ],
)
def test_addresses_and_names_of_this_server_are_answered(port: int, host: str) -> None:
    assert sent(port, f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n") == (200, b"mine")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "localhost.evil.example",
        "notlocalhost",
        "127.0.0.1.evil.example",
        "1.2.3",
        "x.tables.example",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_names_are_refused(port: int, host: str, method: str) -> None:
    status, body = sent(port, f"{method} / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n")
    assert status == 421
    assert f"Host is '{host}'; allowed: an address, localhost, ".encode() in body
    assert b"--allow-host" in body
    assert b"tables.example" not in body.replace(host.encode(), b"")  # the page would read it


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("", "there is no Host"),
        ("Host:\r\n", "Host is ''"),
        ("Host: ::1\r\n", "Host is '::1'; allowed: NAME or NAME:PORT"),
        ("Host: [::1\r\n", "Host is '[::1'"),
        ("Host: localhost:http\r\n", "Host is 'localhost:http'"),
        ("Host: localhost\r\nHost: localhost\r\n", "two Host"),
        ("Host: localhost\r\nhost: evil.example\r\n", "two Host"),
    ],
)
def test_a_request_without_one_host_is_malformed(port: int, head: str, said: str) -> None:
    status, body = sent(port, f"GET / HTTP/1.1\r\n{head}\r\n")
    assert status == 400
    assert said.encode() in body


def test_older_clients_need_no_host_but_may_not_have_a_foreign_one(port: int) -> None:
    assert sent(port, "GET / HTTP/1.0\r\n\r\n") == (200, b"mine")
    assert sent(port, "GET / HTTP/1.0\r\nHost: evil.example\r\n\r\n")[0] == 421


def test_a_star_allows_every_name() -> None:
    with serving(HttpServer(Site(), names=["*"])) as url:
        port = int(url.rpartition(":")[2])
        assert sent(port, "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n") == (200, b"mine")
        assert sent(port, "GET / HTTP/1.1\r\n\r\n")[0] == 400


def test_the_command_refuses_foreign_names_and_is_told_of_its_own(memory_path: Path) -> None:
    DynamicEmbDump(memory_path, make_tables(1.0))
    lookup = "/v1/tables/user/lookup?ids=0"
    names = ("--allow-host", "one.example", "--allow-host", "two.example")
    with ServerProcess(memory_path, *names) as server:
        server.wait_for(status="ok")
        for host in ("one.example", "two.example:99", "127.0.0.1", "localhost"):
            assert exchange(server.port, "GET", lookup, headers={"Host": host})[0] == 200
        for path in (lookup, "/metrics", "/healthz", "/"):
            status, answer = exchange(server.port, "GET", path, headers={"Host": "a.example"})
            assert status == 421
            assert "--allow-host" in answer["error"]
        assert HttpTable(server.url, "user")(IDS[:1]).tolist() == [[1.0] * 4]
