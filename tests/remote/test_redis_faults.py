"""Redis refuses, stalls, resets, restarts, is full: no wrong value, bounded waits, named causes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from row_makers import FORMAT, IDS, make

from dynamicemb.errors import StoreError
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.rows import RemoteRows
from redis_servers import Proxy, RedisServer

Start = Callable[..., RedisServer]


def connect(rows: RemoteRows) -> None:
    """Opens a connection; rows with a short timeout may need several tries on a busy machine."""
    while True:
        try:
            rows.pull(IDS[:1])
            return
        except StoreError:
            continue


def test_a_server_that_is_not_there_is_named(start: Start) -> None:
    server = start()
    server.stop()
    rows = open_rows(server.url("?retry_limit=2"), "t", FORMAT)
    for work in (lambda: rows.pull(IDS), lambda: rows.push(IDS, make(IDS)), rows.count):
        with pytest.raises(StoreError, match="3 attempts.*refused") as caught:
            work()
        assert f"127.0.0.1:{server.port}" in str(caught.value)


def test_a_stalled_server_is_given_up_after_a_bounded_wait(start: Start) -> None:
    server = start()
    rows = open_rows(server.url("?timeout=200ms&&retry_limit=1&&chunk_size=1"), "t", FORMAT)
    patient = open_rows(server.url(), "t", FORMAT)
    patient.push(IDS, make(IDS))
    connect(rows)
    server.stall()
    waited = []
    for _ in range(5):  # the clock runs on while this process is stopped
        begin = time.monotonic()
        with pytest.raises(StoreError, match="2 attempts.*[Tt]imeout"):
            rows.pull(IDS)
        waited.append(time.monotonic() - begin)
        if waited[-1] < 60:  # 0.5 s on a machine that does nothing else
            break
    assert min(waited) < 60
    server.resume()
    found, values = patient.pull(IDS)  # late replies are not taken for these
    assert bool(found.all())
    assert torch.equal(values, make(IDS))


def test_a_reply_that_drips_is_given_up_when_its_time_is_over(
    server: RedisServer, proxy: Callable[[RedisServer], Proxy]
) -> None:
    """Every piece comes in time, the full reply does not."""
    between = proxy(server)
    patient = open_rows(server.url(), "t", FORMAT)
    patient.push(IDS, make(IDS))
    url = server.url("?timeout=300ms&&retry_limit=1", port=between.port)
    rows = open_rows(url, "t", FORMAT)
    connect(rows)
    between.pieces, between.pause_s = 2, 0.1
    for work in (lambda: rows.pull(IDS), lambda: rows.contains(IDS), rows.count):
        begin = time.monotonic()
        with pytest.raises(StoreError, match="2 attempts.*Timeout"):
            work()
        assert time.monotonic() - begin < 60  # 0.7 s on a machine that does nothing else
    between.pieces = 0
    connect(rows)
    assert torch.equal(patient.pull(IDS)[1], make(IDS))


def test_a_slow_server_that_answers_in_time_is_waited_for(
    server: RedisServer, proxy: Callable[[RedisServer], Proxy]
) -> None:
    between = proxy(server)
    between.pieces, between.pause_s = 5, 0.002
    rows = open_rows(server.url(port=between.port), "t", FORMAT)
    rows.push(IDS, make(IDS))
    found, values = rows.pull(IDS)
    assert bool(found.all())
    assert torch.equal(values, make(IDS))
    assert rows.contains(IDS).tolist() == [True] * len(IDS)
    assert rows.count() == len(IDS)
    assert rows.erase(IDS[:2]).tolist() == [True, True]


def test_a_short_stall_is_waited_for(start: Start) -> None:
    server = start()
    rows = open_rows(server.url(), "t", FORMAT)
    rows.push(IDS, make(IDS))
    server.stall()
    waker = threading.Timer(0.3, server.resume)
    waker.start()
    assert torch.equal(rows.pull(IDS)[1], make(IDS))
    waker.join()


def test_late_replies_are_never_taken_for_others(start: Start) -> None:
    """A request that timed out gets its reply later; the next request must not read it."""
    server = start()
    patient = open_rows(server.url(), "t", FORMAT)
    hasty = open_rows(server.url("?timeout=100ms&&retry_limit=0"), "t", FORMAT)
    ids = torch.arange(100)
    patient.push(ids, make(ids))
    connect(hasty)
    server.stall()
    with pytest.raises(StoreError):
        hasty.pull(ids[:50])
    server.resume()
    for _ in range(20):
        try:
            assert torch.equal(hasty.pull(ids[50:])[1], make(ids[50:]))
        except StoreError:  # a busy machine; never a wrong value
            continue


def test_resets_in_the_middle_of_replies_are_retried(
    server: RedisServer, proxy: Callable[[RedisServer], Proxy]
) -> None:
    between = proxy(server)
    rows = open_rows(server.url("?chunk_size=100&&retry_limit=5", port=between.port), "t", FORMAT)
    ids = torch.arange(1000)
    between.cut_after(0, 3)  # before and within the answer to MSET
    rows.push(ids, make(ids))
    for cut in (0, 1, 100, 2000):
        between.cut_after(cut, cut)
        found, values = rows.pull(ids)
        assert bool(found.all())
        assert torch.equal(values, make(ids))
    assert between.resets == 10


def test_resets_that_do_not_end_are_an_error(
    server: RedisServer, proxy: Callable[[RedisServer], Proxy]
) -> None:
    between = proxy(server)
    rows = open_rows(server.url("?retry_limit=2", port=between.port), "t", FORMAT)
    between.cut_after(*[0] * 50)
    with pytest.raises(StoreError, match="3 attempts"):
        rows.push(IDS, make(IDS))
    with pytest.raises(StoreError, match="3 attempts"):
        rows.pull(IDS)


def test_a_restart_is_waited_for(start: Start) -> None:
    server = start("--appendonly", "yes", "--appendfsync", "always")
    rows = open_rows(server.url("?retry_limit=60"), "t", FORMAT)
    rows.push(IDS, make(IDS))
    server.stop()
    back = threading.Timer(0.2, server.start)
    back.start()
    found, values = rows.pull(IDS)
    back.join()
    assert bool(found.all())
    assert torch.equal(values, make(IDS))


def test_a_server_without_memory_is_named_and_nothing_is_half_written(start: Start) -> None:
    server = start("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    rows = open_rows(server.url("?chunk_size=1000"), "t", FORMAT)
    ids = torch.arange(1000)
    rows.push(ids, make(ids))
    server.client().config_set("maxmemory", "1mb")
    with pytest.raises(StoreError, match="OutOfMemory|OOM"):
        rows.push(ids, make(ids, 1))
    assert torch.equal(rows.pull(ids)[1], make(ids))  # the old rows, all of them
    server.client().config_set("maxmemory", "100mb")
    rows.push(ids, make(ids, 1))
    assert torch.equal(rows.pull(ids)[1], make(ids, 1))


@pytest.mark.parametrize("user", ["", "bob"])
def test_a_wrong_password_is_named_and_not_shown(
    start: Start, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start("--requirepass", "right")
    client = server.client(password="right")
    client.execute_command("ACL", "SETUSER", "bob", "on", ">right", "~*", "+@all")
    good = open_rows(server.url("", user=f"{user}:right@"), "t", FORMAT)
    good.push(IDS, make(IDS))
    assert torch.equal(good.pull(IDS)[1], make(IDS))
    for wrong in (f"{user}:hunter2@", ""):
        rows = open_rows(server.url("?retry_limit=50", user=wrong), "t", FORMAT)
        with pytest.raises(StoreError, match="(?i)pass|auth") as caught:
            rows.pull(IDS)  # at once: more attempts cannot help
        shown = f"{caught.value!r} {caught.value} {caught.value.__cause__} {rows!r} {caplog.text}"
        assert "hunter2" not in shown
        assert "attempts" not in str(caught.value)


def test_a_failing_chunk_ends_the_others(start: Start) -> None:
    server = start()
    rows = open_rows(server.url("?chunk_size=1&&num_threads=2&&retry_limit=0"), "t", FORMAT)
    server.stop()
    ids = torch.arange(10_000)
    begin = time.process_time()
    with pytest.raises(StoreError, match="refused"):
        rows.push(ids, make(ids))
    assert time.process_time() - begin < 30  # 10,000 refusals would take longer


def test_threads_share_a_table(server: RedisServer) -> None:
    rows = open_rows(server.url("?chunk_size=7&&num_threads=3"), "t", FORMAT)
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(5):
                ids = torch.arange(100) + 1000 * number
                rows.push(ids, make(ids, round_))
                assert torch.equal(rows.pull(ids)[1], make(ids, round_))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_listing_of_many_pages(server: RedisServer) -> None:
    rows = open_rows(server.url("?chunk_size=20000"), "t", FORMAT)
    others = open_rows(server.url("?chunk_size=20000"), "others", FORMAT)
    ids = torch.arange(35_000)
    rows.push(ids, make(ids))
    others.push(ids, make(ids))
    assert rows.count() == len(ids)
    assert torch.equal(rows.ids().sort().values, ids)
