"""The reference itself, on cases small enough to work out by hand."""

from __future__ import annotations

from random import Random

import pytest

from reference import FAILED, INITIALISED, ReferenceTable, hash64, initial_buckets


def test_hash_is_the_published_finaliser() -> None:
    assert hash64(0) == 0
    assert hash64(1) == 0xB456BCFC34C2CB2C
    assert hash64(-1) == 0x64B5720B4B825F21


@pytest.mark.parametrize(
    ("most", "wanted", "expected"),
    [(1, 1, 1), (8, 1, 1), (8, 3, 4), (8, 5, 8), (5, 1, 1), (5, 2, 2), (5, 3, 3), (5, 4, 5)],
)
def test_initial_buckets(most: int, wanted: int, expected: int) -> None:
    assert initial_buckets(most, wanted) == expected


def test_one_bucket_by_hand() -> None:
    table = ReferenceTable(max_capacity=16, bucket_capacity=16, strategy="LFU")
    slots, evicted = table.find_or_insert([7, 7, 5, *range(100, 115)])
    assert slots == [0, 0, *range(1, 16), FAILED]
    assert evicted == []
    slots, evicted = table.find_or_insert([999, 5, 999])  # 100 in slot 2 is the smallest now
    assert slots == [2, 1, 2]
    assert [(e.id, e.row, e.score) for e in evicted] == [(100, INITIALISED, (1,))]
    assert [e.score for e in table.export()][:4] == [(2,), (2,), (2,), (1,)]
    expected = {"hits": 1, "misses": 18, "inserts": 17, "evictions": 1, "failures": 1}
    assert {k: v for k, v in table.stats.items() if v} == expected


@pytest.mark.parametrize("strategy", ["LFU", "NO_EVICTION", "STEP"])
@pytest.mark.parametrize("max_capacity", [16, 64, 80])
def test_invariants(strategy: str, max_capacity: int) -> None:
    table = ReferenceTable(
        max_capacity=max_capacity, init_capacity=16, bucket_capacity=16, strategy=strategy
    )
    rng = Random(max_capacity)
    for _ in range(200):
        ids = [rng.randrange(200) for _ in range(rng.randint(0, 20))]
        if rng.random() < 0.3:
            table.erase(ids)
        else:
            table.find_or_insert(ids)
        assert table.where == {e.id: s for s, e in enumerate(table.slots) if e is not None}
        for id_, slot in table.where.items():
            assert slot // 16 == table.bucket_of(id_)
        assert len(table.slots) == table.capacity <= max_capacity
    stats = table.stats
    assert stats["misses"] == stats["inserts"] + stats["failures"]
