"""What servers report of each other, and where the keys of commands are."""

from __future__ import annotations

import itertools
from typing import Any

SLOTS = 16384
#: Servers of a cluster, of one range of its slots, and masters that a Sentinel may list.
MOST_NODES, MOST_NODES_OF_RANGE, MOST_MASTERS = 1000, 32, 4096
_LONGEST_HOST = 255

#: Of the commands that a cluster is sent: the last argument that is a key (-1: the last one), and
#: the steps between keys. The first key is argument 1.
KEY_POSITIONS = {
    "get": (1, 1),
    "set": (1, 1),
    "mget": (-1, 1),
    "mset": (-1, 2),
    "exists": (-1, 1),
    "unlink": (-1, 1),
}


def is_slots(reply: object) -> bool:
    """Whether it is what CLUSTER SLOTS answers: disjoint ranges of slots, each its first slot, its
    last slot and its servers. redis-py goes through all slots and servers of it."""
    if not isinstance(reply, list) or not all(map(_is_range, reply)):
        return False
    ranges = sorted((first, last) for first, last, *_ in reply)
    if any(last >= first for (_, last), (first, _) in itertools.pairwise(ranges)):
        return False
    nodes = {(node[0], node[1]) for _, _, *nodes_of_range in reply for node in nodes_of_range}
    return len(nodes) <= MOST_NODES


def _is_range(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and 3 <= len(entry) <= 2 + MOST_NODES_OF_RANGE
        and type(entry[0]) is type(entry[1]) is int
        and 0 <= entry[0] <= entry[1] < SLOTS
        and all(map(_is_node, entry[2:]))
    )


def _is_node(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) >= 2
        and isinstance(entry[0], (bytes, type(None)))
        and len(entry[0] or b"") <= _LONGEST_HOST
        and type(entry[1]) is int
        and 0 <= entry[1] < 65536
    )


def is_masters(reply: object) -> bool:
    """Whether it is what SENTINEL MASTERS answers: names and values, for each master."""
    return isinstance(reply, list) and len(reply) <= MOST_MASTERS and all(map(_is_master, reply))


def _is_master(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) % 2 == 0
        and all(type(text) is bytes for text in entry)
        and {b"name", b"ip", b"port", b"flags", b"num-other-sentinels"} <= set(entry[::2])
    )
