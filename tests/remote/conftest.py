"""Fixtures of the tests of remote stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("redis")

from redis_servers import Proxy, RedisServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    """A redis-server for all tests that leave it running."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """The shared redis-server, empty."""
    shared_server.client().flushall()
    return shared_server


@pytest.fixture
def start() -> Iterator[Callable[..., RedisServer]]:
    """Starts redis-servers of the test's own; ends them with it."""
    made: list[RedisServer] = []

    def make(*arguments: str, **settings: str) -> RedisServer:
        made.append(RedisServer(*arguments, **settings))
        return made[-1]

    yield make
    for started in made:
        started.close()


@pytest.fixture
def proxy() -> Iterator[Callable[[RedisServer], Proxy]]:
    """Starts proxies in front of redis-servers."""
    made: list[Proxy] = []

    def make(target: RedisServer) -> Proxy:
        made.append(Proxy(target.port))
        return made[-1]

    yield make
    for started in made:
        started.close()
