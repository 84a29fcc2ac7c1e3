"""Units that threads share: in order, within the bound, and never lost."""

from __future__ import annotations

import random
import threading
import time

import pytest
from served import PATIENCE_S

from dynamicemb.cli.serving.pool import Pool


class Taker(threading.Thread):
    """Takes units; ``got`` says what came of it."""

    def __init__(self, pool: Pool, amount: int, seconds: float = -1.0) -> None:
        super().__init__(daemon=True)
        self._take = (pool, amount, seconds)
        self.got: bool | None = None
        waiting = len(pool._waiting)
        self.start()
        end = time.monotonic() + PATIENCE_S
        while self.got is None and len(pool._waiting) == waiting:
            assert time.monotonic() < end
            time.sleep(0.001)

    def run(self) -> None:
        pool, amount, seconds = self._take
        self.got = pool.take(amount, seconds)

    def ended(self) -> bool | None:
        self.join(PATIENCE_S)
        return self.got


def test_units_are_taken_and_given_back() -> None:
    pool = Pool(10)
    assert pool.take(10)
    assert not pool.take(1, 0.01)
    pool.give(4)
    assert pool.take(4, 0.01)
    assert pool.taken == 10


def test_who_waits_longer_comes_first_also_if_another_needs_less() -> None:
    pool = Pool(10)
    assert pool.take(10)
    large, small = Taker(pool, 8), Taker(pool, 1)
    pool.give(2)
    assert (large.got, small.got) == (None, None)
    assert not pool.take(1, 0.01)
    pool.give(6)
    assert large.ended() is True
    assert small.got is None
    pool.give(8)
    assert small.ended() is True
    assert pool.taken == 10 - 2 - 6 + 8 - 8 + 1


def test_those_behind_one_that_gives_up_are_served() -> None:
    pool = Pool(10)
    assert pool.take(8)
    large = Taker(pool, 5, 0.5)
    small = Taker(pool, 2)
    assert large.ended() is False
    assert small.ended() is True
    assert pool.taken == 10


def test_a_turn_is_given_back_when_the_block_fails() -> None:
    pool = Pool(1)
    with pytest.raises(ZeroDivisionError), pool.turn():
        _ = 1 / 0
    assert pool.take(1, 0.01)


def test_many_threads_never_take_more_than_there_is() -> None:
    pool, most, wrong = Pool(20), [0], []
    draws = [random.Random(seed) for seed in range(12)]
    lock, used = threading.Lock(), [0]

    def run(draw: random.Random) -> None:
        for _ in range(200):
            amount = draw.randint(1, 20)
            if not pool.take(amount, draw.choice([-1.0, 0.0005])):
                continue
            with lock:
                used[0] += amount
                most[0] = max(most[0], used[0])
            time.sleep(draw.random() / 2000)
            with lock:
                used[0] -= amount
            pool.give(amount)
        if pool.taken > 20:
            wrong.append(pool.taken)

    threads = [threading.Thread(target=run, args=(draw,), daemon=True) for draw in draws]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert wrong == []
    assert most[0] <= 20
    assert pool.taken == 0
    assert not pool._waiting
