"""Calls of several exchanges: none begins after one has failed, and waiting is on the clock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("redis")

from hostile_redis import HostileRedis, always
from row_makers import FORMAT, make

from dynamicemb.errors import StoreError
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.redis_calls import AbandonedError, Call
from dynamicemb.tiers.remote.redis_client import RedisClient
from dynamicemb.tiers.remote.url import RedisUrl
from redis_servers import WAIT_S, RedisServer

CHUNKS = 200


@pytest.mark.parametrize("operation", ["find", "insert", "contains"])
def test_no_exchange_begins_after_one_has_failed(operation: str) -> None:
    ids = torch.arange(CHUNKS)
    for _ in range(20):
        hostile = HostileRedis(always(b"-ERR no\r\n"))
        url = f"redis://127.0.0.1:{hostile.port}/?chunk_size=1&&num_threads=2"
        rows = open_rows(url, "t", FORMAT)
        work = {
            "find": partial(rows.pull, ids),
            "insert": partial(rows.push, ids, make(ids)),
            "contains": partial(rows.contains, ids),
        }[operation]
        with pytest.raises(StoreError, match="no"):
            work()
        # One for each thread; a thread that reads sends the next command ahead.
        assert len(hostile.commands) <= (4 if operation == "find" else 2)
        hostile.close()


def test_a_failure_ends_the_attempts_of_the_other_threads() -> None:
    client = RedisClient(RedisUrl("redis", (("127.0.0.1", 1),), retry_limit=100))
    tries, tried = 0, threading.Event()

    def work(item: str) -> None:
        nonlocal tries
        if item == "fails":
            assert tried.wait(WAIT_S)
            raise StoreError(None, "as it should", "here")

        def attempt() -> None:
            nonlocal tries
            tries += 1
            tried.set()
            raise ConnectionError

        client.retry("working", attempt, 0)

    with pytest.raises(StoreError, match="as it should"):
        client.run_all(work, ["retries", "fails", "waits", "waits"])
    assert tries < 101  # all 101 attempts take 100 s


def test_the_first_error_in_order_is_raised_and_never_that_of_a_part_that_did_not_begin() -> None:
    client = RedisClient(RedisUrl("redis", (("127.0.0.1", 1),), num_threads=3))
    begun = threading.Barrier(3)

    def work(item: int) -> None:
        begun.wait(WAIT_S)
        raise StoreError(None, f"item {item}", "here")

    for _ in range(20):
        with pytest.raises(StoreError, match="item 0"):
            client.run_all(work, range(9))


def test_a_call_that_waited_while_the_server_answered_nobody_does_not_begin() -> None:
    client = RedisClient(RedisUrl("redis", (("127.0.0.1", 1),), timeout_ms=1000, retry_limit=0))
    call, now = Call(), time.monotonic()
    call.submitted, client._process.gave_up = now - 1.5, now
    with pytest.raises(StoreError, match="waited for its turn"), call.part():
        client.retry("working", lambda: pytest.fail("began"), 0)
    with pytest.raises(AbandonedError), call.part():
        pytest.fail("began")


@pytest.mark.parametrize("waits", ["for others that were answered", "for a thread"])
def test_a_call_that_waited_for_a_healthy_server_begins(waits: str) -> None:
    client = RedisClient(RedisUrl("redis", (("127.0.0.1", 1),), timeout_ms=1000, retry_limit=0))
    call, now = Call(), time.monotonic()
    call.submitted = now - 1000
    if waits == "for others that were answered":
        client._process.gave_up, client._process.answered = now - 1, now
    with call.part():
        assert client.retry("working", lambda: "done", 0) == "done"


def test_calls_of_several_threads_at_a_silent_server_take_the_time_of_one() -> None:
    hostile = HostileRedis(always())
    url = f"redis://127.0.0.1:{hostile.port}/?timeout=300ms&&retry_limit=0&&chunk_size=1"
    ids, errors = torch.arange(10), []

    def call(number: int) -> None:
        try:
            open_rows(url, f"t{number}", FORMAT).pull(ids)
        except StoreError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(100)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 15  # 100 times 0.3 s, one after the other; 0.4 s when idle
    assert len(errors) == 100
    hostile.close()


def test_memory_that_runs_out_is_a_store_error() -> None:
    client = RedisClient(RedisUrl("redis", (("127.0.0.1", 1),)))

    def work() -> None:
        raise MemoryError

    with pytest.raises(StoreError, match="MemoryError"):
        client.retry("working", work, 0)


def test_replies_that_nobody_asked_for_are_an_error_and_end_the_connection() -> None:
    extra = True

    def answer(command: list[bytes]) -> Iterator[bytes]:
        count = len(command) - 1
        yield b"*%d\r\n" % count + b"$-1\r\n" * count + (b":1\r\n" if extra else b"")

    hostile = HostileRedis(answer)
    rows = open_rows(f"redis://127.0.0.1:{hostile.port}/?chunk_size=2", "t", FORMAT)
    with pytest.raises(StoreError, match="more than it was asked"):
        rows.pull(torch.arange(2))
    extra = False
    assert not rows.pull(torch.arange(9))[0].any()
    hostile.close()


FORKS = """
import os, sys, torch
from dynamicemb.tiers.remote import redis_client
from dynamicemb.tiers.remote.open import open_rows
from row_makers import FORMAT, make

torch.set_num_threads(1)
url, ids = sys.argv[1], torch.arange(100)
rows = open_rows(url, "t", FORMAT)
rows.push(ids, make(ids))
process = rows._client._process
process.connecting.acquire()  # as another thread would hold them
process.lock.acquire()
redis_client._lock.acquire()
child = os.fork()
if not child:
    right = rows._client._process.client is None
    for table in (rows, open_rows(url, "t", FORMAT)):
        right = right and torch.equal(table.pull(ids)[1], make(ids))
    right = right and rows._client._process is not process
    rows.close()
    del rows, table
    os._exit(not right)
_, status = os.waitpid(child, 0)
process.connecting.release()
process.lock.release()
assert torch.equal(rows.pull(ids)[1], make(ids))
sys.exit(status != 0)
"""


def test_a_forked_child_starts_afresh_whatever_locks_its_parent_held(server: RedisServer) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    command = [
        sys.executable,
        "-c",
        FORKS,
        server.url("?chunk_size=10&&timeout=60s&&retry_limit=0"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
