"""Our times over those of HierarchicalKV, which is not built here.

Its times, in microseconds at load 0.5, 0.75 and 1.0, were taken on 2026-11-15 on the same kind of
machine, in its best mode, in the same sizes (see ``table_ops``), with ids that it is told are
distinct. Only these were taken: rows of 64 columns.
"""

from __future__ import annotations

import statistics
from typing import Any

LOADS = (0.5, 0.75, 1.0)
#: By the target: the operations, by their names in ``table_ops``.
TIMES = {
    "find": {
        "find index": (111, 115, 209),
        "find index, Zipf 1.05": (59, 62, 207),
        "find + row copy, dim 64": (245, 247, 246),
    },
    "index insert": {
        "find_or_insert index, 60 % hits, 1M": (378, 393, 729),
    },
    "with rows": {
        "find_or_insert, 60 % hits, dim 64": (487, 508, 745),
        "insert, all misses, distinct ids, dim 64": (487, 524, 872),
        "insert_and_evict, 60 % hits, dim 64": (575, 608, 1630),
        "assign, distinct ids, dim 64": (396, 398, 398),
    },
}
#: Geometric mean of the ratios at most; none of them above 1.
TARGETS = {"find": 0.70, "index insert": 0.60, "with rows": 0.70}


def compare(tables: dict[str, Any]) -> dict[str, Any]:
    """Ratios by operation and load, and their geometric means, of what was measured."""
    result: dict[str, Any] = {}
    for target, operations in TIMES.items():
        ratios = {
            f"{name}, load {load}": tables[f"{name}, load {load}"]["us"] / theirs
            for name, times in operations.items()
            for load, theirs in zip(LOADS, times, strict=True)
            if f"{name}, load {load}" in tables
        }
        result[target] = {
            "geometric_mean": statistics.geometric_mean(ratios.values()),
            "target": TARGETS[target],
            "largest": max(ratios.values()),
            "ratios": ratios,
        }
    return result
