"""Fixtures of the tests of the documentation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from page_runner import PageRunner


@pytest.fixture(scope="session")
def page_runner() -> Iterator[PageRunner]:
    runner = PageRunner()
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The URL of a real redis-server; skips where there is none."""
    pytest.importorskip("redis")
    from redis_servers import RedisServer

    server = RedisServer()
    yield f"redis://127.0.0.1:{server.port}/"  # without options: pages add their own
    server.close()
