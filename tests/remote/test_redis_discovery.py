"""What servers report of each other, before redis-py works on it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("redis")

from dynamicemb.tiers.remote.redis_discovery import MOST_MASTERS, is_masters, is_slots


def node(number: int = 0) -> list[Any]:
    return [b"10.0.0.%d" % number, 6379, b"an-id", [b"hostname", b"h"]]


def ranges(count: int, replicas: int = 0) -> list[Any]:
    ends = [16384 * number // count for number in range(count + 1)]
    nodes = [[node(number) for _ in range(replicas + 1)] for number in range(count)]
    return [[ends[n], ends[n + 1] - 1, *nodes[n]] for n in range(count)]


@pytest.mark.parametrize(
    "slots",
    [
        [],
        ranges(1),
        ranges(3, replicas=2),
        ranges(1000, replicas=5),
        ranges(3)[::-1],
        [[0, 0, node()], [1, 1, node()], [7, 16383, node(1)]],
        [[0, 16383, [None, 6379]]],
        [[at, at, node(at % 3), node(3)] for at in range(16384)],
    ],
)
def test_slots_of_a_cluster_are_taken(slots: list[Any]) -> None:
    assert is_slots(slots)


@pytest.mark.parametrize(
    "slots",
    [
        None,
        b"text",
        [1],
        [[0, 16383]],
        [[0, 16384, node()]],
        [[-1, 5, node()]],
        [[5, 4, node()]],
        [[b"0", 5, node()]],
        [[0, 5, [b"host"]]],
        [[0, 5, [7, 6379]]],
        [[0, 5, [b"host", 65536]]],
        [[0, 5, [b"h" * 256, 1]]],
        [[0, 16383, node()]] * 2,
        [[0, 5, node()], [10, 12, node()], [5, 7, node()]],
        [[0, 16383, *[node()] * 33]],
        [[at, at, [b"h", at]] for at in range(1001)],
    ],
)
def test_slots_as_no_cluster_has_them_are_refused(slots: object) -> None:
    assert not is_slots(slots)


def test_masters() -> None:
    text = b"name m ip 10.0.0.1 port 6379 flags master num-other-sentinels 2".split()
    assert is_masters([text, text])
    assert is_masters([])
    for wrong in (None, [text[:-1]], [text[2:]], [[*text, 1, 2]], [text] * (MOST_MASTERS + 1)):
        assert not is_masters(wrong)
