"""Training with a store below tables of the GPU's kernels: the bits of tables without one.

python tests/gpu/stores_below.py FOLDER                      on a GPU
TRITON_INTERPRET=1 python tests/gpu/stores_below.py FOLDER   under Triton's interpreter
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
import torch  # noqa: E402

from dynamicemb import (  # noqa: E402
    BatchedDynamicEmbeddingTables,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.tiers import CachedTable, HostStore, SsdStore, Stack  # noqa: E402
from dynamicemb.tiers.sizing import table_bytes  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: Distinct ids, ids of a table's batch, slots of a cache, steps.
IDS, BATCH, SLOTS, STEPS = (90, 24, 64, 8) if INTERPRETED else (40_000, 1024, 4096, 60)


def options(
    storage: Any, dim: int, capacity: int = 4 * IDS, strategy: str = "STEP"
) -> DynamicEmbTableOptions:
    made = DynamicEmbTableOptions(
        dim=dim,
        max_capacity=capacity,
        bucket_capacity=32,
        score_strategy=DynamicEmbScoreStrategy[strategy],
    )
    if storage is not None:
        from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind

        adam = Optimizer(OptimizerKind.ADAM, OptimizerArgs())
        made.local_hbm_for_values = table_bytes(SLOTS, made, adam, device=DEVICE, cache=True)
        made.caching = storage == "caching"
        made.external_storage = None if storage == "caching" else storage
    return made


def make(storages: list[Any]) -> BatchedDynamicEmbeddingTables:
    return of_tables(
        [
            options(one, dim, strategy=strategy)
            for one, dim, strategy in zip(
                storages, (8, 4, 8), ("STEP", "NO_EVICTION", "STEP"), strict=True
            )
        ]
    )


def of_tables(tables: list[DynamicEmbTableOptions]) -> BatchedDynamicEmbeddingTables:
    return BatchedDynamicEmbeddingTables(
        tables,
        optimizer=EmbOptimType.ADAM,
        learning_rate=0.1,
        seed=1,
        device=DEVICE,
    )


def train(
    module: BatchedDynamicEmbeddingTables, depth: int, ids_in_all: int = IDS
) -> list[torch.Tensor]:
    """Outputs of all steps, with ``depth`` batches prefetched, on a GPU on a stream of its own."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(0, ids_in_all, (3 * BATCH,), generator=generator).to(DEVICE)
        for _ in range(STEPS)
    ]
    offsets = torch.arange(0, 3 * BATCH + 1, 4).to(DEVICE)
    outputs = []
    side = nullcontext() if INTERPRETED else torch.cuda.stream(torch.cuda.Stream())
    if not INTERPRETED:
        torch.cuda.synchronize()  # the side stream reads the batches
    for ids in batches[:depth]:
        with side:
            module.prefetch(ids, offsets)
    for step, ids in enumerate(batches):
        out = module(ids, offsets)
        if depth and step + depth < STEPS:
            with side:
                module.prefetch(batches[step + depth], offsets)
        (out * out).sum().backward()
        outputs.append(out.detach())
    module.eval()
    outputs.append(module(batches[0], offsets))
    return outputs


def content(module: BatchedDynamicEmbeddingTables) -> list[dict[str, torch.Tensor]]:
    """The rows of every table in ascending order of their ids."""
    tables = []
    for table in module.tables:
        state = table.state_dict()
        order = torch.argsort(state["ids"])
        del state["meta"]
        tables.append({name: tensor[order] for name, tensor in state.items()})
    return tables


def check_full_tables() -> None:
    """Where a table is full that evicts nothing, the same ids fail with a cache and without."""
    capacity = 3 * SLOTS // 2
    both = [
        of_tables([options(one, 4, capacity, "NO_EVICTION") for one in (first, None, None)])
        for first in ("caching", None)
    ]
    for mine, expected in zip(*(train(module, 0, 2 * IDS) for module in both), strict=True):
        assert torch.equal(mine, expected)
    for mine, expected in zip(*map(content, both), strict=True):
        assert all(torch.equal(mine[name], expected[name]) for name in expected)
    cached, plain = (module.tables[0] for module in both)
    assert isinstance(cached, CachedTable)
    assert cached.cache_stats().written_back > 10
    assert cached.progress() == plain.progress()
    for name in ("hits", "misses", "inserts", "failures", "rejections", "dropped_gradients"):
        assert getattr(cached.stats(), name) == getattr(plain.stats(), name), name
    assert plain.stats().failures > 10
    print("full tables equal,", plain.stats().failures, "failures")


def check_budget(folder: str) -> None:
    """The memory of the device that a cached table takes is its budget's."""
    budget = 64 * 2**20
    made = options(SsdStore.at(f"{folder}/c"), 64)
    made.local_hbm_for_values = budget
    before = torch.cuda.memory_allocated()
    module = BatchedDynamicEmbeddingTables(
        [made], optimizer=EmbOptimType.ADAM, seed=1, device=DEVICE
    )
    ids, offsets = torch.arange(150_000), torch.arange(4097).to(DEVICE)
    module(ids[:4096].to(DEVICE), offsets).sum().backward()
    start = time.perf_counter()
    for part in ids.split(4096)[1:-1]:
        module(part.to(DEVICE), offsets).sum().backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    used = torch.cuda.memory_allocated() - before
    print(f"budget {budget}, used {used} bytes of the device; {150_000 / seconds:.0f} new ids/s")
    assert 0.95 * budget <= used <= 1.05 * budget


def main(folder: str) -> None:
    if INTERPRETED:
        import interpreter

        interpreter.use_for_all_tables()
    stacked = Stack.of(HostStore.within(20_000), SsdStore.at(f"{folder}/b"))
    for depth in (0, 2):
        plain = make([None, None, None])
        first = stacked if depth else "caching"
        cached = make([first, SsdStore.at(f"{folder}/a{depth}"), None])
        used = [isinstance(table, CachedTable) for table in cached.tables]
        assert used == [True, True, False]
        for expected, out in zip(train(plain, 0), train(cached, depth), strict=True):
            assert torch.equal(expected, out)
        cached.flush()
        for expected, mine in zip(content(plain), content(cached), strict=True):
            for name, tensor in expected.items():
                assert torch.equal(tensor, mine[name]), name
        for table in cached.tables[:2]:
            stats = table.cache_stats()
            assert stats.brought_up > 5, stats
            assert stats.written_back > 10
            assert stats.bytes <= table.options.local_hbm_for_values
            assert str(table.device).startswith(DEVICE)
        print("depth", depth, "equal", cached.tables[0].cache_stats())
    check_full_tables()
    if not INTERPRETED:
        check_budget(folder)


if __name__ == "__main__":
    main(sys.argv[1])
