"""A process that trains within budgets and says how much memory that took; see test_budgets.py."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from typing import Any

import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.tiers import HostStore, SsdStore, Stack

BATCH = 4096
MIB = 2**20


def private_bytes() -> int:
    """Memory of the process that is no file's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")) * 1024


def options(
    kind: str, path: str, mib: int, score_strategy: str = "TIMESTAMP", **changes: Any
) -> DynamicEmbTableOptions:
    layouts: dict[str, dict[str, Any]] = {
        "local": {
            "external_storage": SsdStore.at(path),
            "local_hbm_for_values": mib * MIB,
        },
        "global": {
            "external_storage": SsdStore.at(path),
            "global_hbm_for_values": mib * MIB,
        },
        "caching": {  # all rows in main memory too: counted apart
            "caching": True,
            "local_hbm_for_values": mib * MIB,
        },
        "stack": {
            "external_storage": Stack.of(HostStore.within(mib * MIB), SsdStore.at(path)),
            "local_hbm_for_values": mib * MIB,
        },
    }
    strategy = DynamicEmbScoreStrategy[score_strategy]
    fields = layouts[kind] | changes
    return DynamicEmbTableOptions(dim=64, max_capacity=2**20, score_strategy=strategy, **fields)


def train(module: BatchedDynamicEmbeddingTables, ids: int) -> None:
    offsets = torch.arange(BATCH + 1)
    for part in torch.arange(ids).split(BATCH):
        if len(part) == BATCH:
            module(part, offsets).sum().backward()
    module(torch.arange(BATCH), offsets).sum().backward()  # and some come back


def main(kind: str, path: str, mib: int, changes: dict[str, Any]) -> None:
    def make(suffix: str, mib: int) -> BatchedDynamicEmbeddingTables:
        one = options(kind, path + suffix, mib, **changes)
        return BatchedDynamicEmbeddingTables([one], optimizer=EmbOptimType.ADAM, seed=1)

    warm = make("-warm", 8)
    train(warm, 20 * BATCH)  # the buffers of a batch exist from now on
    del warm
    before = private_bytes()
    module = make("-measured", mib)
    rows = (4 if kind == "stack" else 2) * mib * MIB // 800
    train(module, rows)
    used = private_bytes() - before
    table: Any = module.tables[0]
    stats = table.store.stats()
    levels = [stats.details[name] for name in ("upper", "lower")] if kind == "stack" else [stats]
    print(
        json.dumps(
            {
                "used": used,
                "cache": table.cache_stats().bytes,
                "stores": [one.bytes_in_memory for one in levels],
                "rows": len(table),
                "asked": rows // BATCH * BATCH,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
