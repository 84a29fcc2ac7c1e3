"""A server that answers anything, in any way and at any speed: typed errors, in bounded time and
memory, and never a row that it did not send. All of it: tests/stress/test_hostile_redis_long.py."""

from __future__ import annotations

import pytest

pytest.importorskip("redis")

from hostile_redis import (
    BEHAVIOURS,
    CLUSTERS,
    HONEST_OF_CLUSTERS,
    HostileRedis,
    check,
    of_a_cluster,
    tried,
)

QUICK = "timeout=100ms&&retry_limit=0"
#: Those of which the others are variations.
TYPICAL = [
    "drips",
    "silence",
    "bulk of 2 GB",
    "array of 10^8",
    "integers",
    "status",
    "garbage",
    "nil",
]
#: On a busy machine; without a bound many of them never end.
PATIENCE_S = 60


def test_every_operation_has_typed_errors_in_bounded_time_and_memory() -> None:
    names = [
        *TYPICAL,
        "drips a line",
        "half an array",
        "values",
        "the wrong number",
        "an empty array",
    ]
    names += ["a page that does not go on", "pages of new keys", "empty pages", "a page of numbers"]
    names += ["a large database", "200,000 levels", "empty arrays", "negative lengths", "a push"]
    names += ["pages of another table", "more replies than commands"]
    servers = {
        name: (f"redis://127.0.0.1:PORT/?{QUICK}", HostileRedis(BEHAVIOURS[name])) for name in names
    }
    check(tried(servers), PATIENCE_S)


def test_a_server_that_is_hostile_from_the_first_command_on() -> None:
    urls = ["redis://bob:secret@127.0.0.1:PORT/3?", "redis+sentinel://127.0.0.1:PORT/name?"]
    urls += ["redis+cluster://127.0.0.1:PORT/?"]
    servers = {
        f"{name} {url}": (url + QUICK, HostileRedis(BEHAVIOURS[name], honest_start=False))
        for name in ("drips", "bulk of 2 GB", "integers", "garbage", "errors in arrays")
        for url in urls
    }
    outcomes = tried(servers)
    assert not any("secret" in outcome["what"] for outcome in outcomes.values())
    check(outcomes, PATIENCE_S)


def test_a_cluster_that_is_hostile_when_keys_are_asked_for() -> None:
    names = ["drips", "array of 10^8", "integers", "status", "ASK for ever", "MOVED for ever"]
    names += ["more replies than commands"]
    servers = {
        name: (f"redis+cluster://127.0.0.1:PORT/?{QUICK}", HostileRedis(of_a_cluster(behaviour)))
        for name, behaviour in BEHAVIOURS.items()
        if name in names
    }
    check(tried(servers), PATIENCE_S)


def test_a_cluster_that_describes_itself_as_none_is() -> None:
    servers = {
        name: (f"redis+cluster://127.0.0.1:PORT/?{QUICK}", HostileRedis(behaviour))
        for name, behaviour in CLUSTERS.items()
    }
    check(tried(servers), PATIENCE_S, HONEST_OF_CLUSTERS)
