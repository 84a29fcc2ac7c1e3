"""Listing the keys of a table: however long it takes while keys come, and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("redis")

from hostile_redis import BEHAVIOURS, HostileRedis, endless, page
from row_makers import FORMAT

from dynamicemb.errors import StoreError
from dynamicemb.tiers.remote import redis_rows
from dynamicemb.tiers.remote.open import open_rows
from redis_servers import WAIT_S

OURS, OTHER = b"{:t:07}0000000000000007", b"{:u:07}0000000000000007"


@pytest.mark.parametrize("keys", [(), (OTHER,), (b"{:t:0", b"{:t:07}000000000000000x")])
def test_a_listing_ends_when_no_key_of_the_table_comes(keys: tuple[bytes, ...]) -> None:
    hostile = HostileRedis(endless(*keys))
    url = f"redis://127.0.0.1:{hostile.port}/?timeout=200ms&&retry_limit=1"
    with pytest.raises(StoreError, match=r"listed no key of the table in 0\.45 s"):
        open_rows(url, "t", FORMAT).count()
    hostile.close()


def test_a_listing_of_the_same_key_for_ever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rows, "MERGED_IDS", 100)
    hostile = HostileRedis(endless(OURS, OTHER))
    rows = open_rows(f"redis://127.0.0.1:{hostile.port}/?timeout={WAIT_S:.0f}s", "t", FORMAT)
    with pytest.raises(StoreError, match="the same keys again and again"):
        rows.count()
    assert hostile.commands.count(b"SCAN") < 150
    hostile.close()


def test_keys_that_come_twice_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_rows, "MERGED_IDS", 5)
    keys = [b"{:t:%02x}%016x" % (number, number) for number in range(100)]

    def answer(command: list[bytes]) -> Iterator[bytes]:
        if command[0] == b"DBSIZE":
            yield b":100\r\n"
            return
        begin = int(command[1])
        yield page(b"%d" % ((begin + 10) % 100), keys[begin : begin + 13])

    hostile = HostileRedis(answer)
    rows = open_rows(f"redis://127.0.0.1:{hostile.port}/?timeout={WAIT_S:.0f}s", "t", FORMAT)
    assert torch.equal(rows.ids().sort().values, torch.arange(100))
    hostile.close()


def test_a_listing_may_take_longer_than_an_exchange_while_keys_come() -> None:
    def answer(command: list[bytes]) -> Iterator[bytes]:
        if command[0] == b"DBSIZE":
            yield b":20\r\n"
            return
        time.sleep(0.1)
        number = int(command[1]) + 1
        yield page(b"%d" % (number % 15), [b"{:t:%02x}%016x" % (number, number)])

    hostile = HostileRedis(answer)
    url = f"redis://127.0.0.1:{hostile.port}/?timeout=1s&&retry_limit=0"
    rows, deadline = open_rows(url, "t", FORMAT), time.monotonic() + WAIT_S
    while True:
        try:
            assert rows.count() == 15
            break
        except StoreError:  # a busy machine: a page took longer than 1 s
            assert time.monotonic() < deadline
    hostile.close()


def test_a_database_larger_than_any_is_refused() -> None:
    hostile = HostileRedis(BEHAVIOURS["a large database"])
    with pytest.raises(StoreError, match="the reply to DBSIZE"):
        open_rows(f"redis://127.0.0.1:{hostile.port}/", "t", FORMAT).count()
    hostile.close()
