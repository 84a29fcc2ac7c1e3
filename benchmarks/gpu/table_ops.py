"""Operations of one table: 2^26 slots, batches of 2^20 distinct random ids, cold L2 cache.

``index``: without rows. Bytes are what an operation cannot avoid: digests of a bucket, one sector
for a key or score, the row read and written. ``distinct ids``: the table is told that no id occurs
twice, as HierarchicalKV always is; ``insert_and_evict`` is, and hands evicted rows back packed.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from measure import Clock, power_law

from dynamicemb.options import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.table.cuda import CudaTable

SLOTS, BATCH = 1 << 26, 1 << 20
SECTOR = 32


def random_ids(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(
        -(2**63), 2**63 - 1, (count,), generator=generator, device="cuda", dtype=torch.int64
    )


class Filled:
    """A table of a given load, and ids that are in it."""

    def __init__(
        self, dim: int, load: float, *, rowless: bool, slots: int = SLOTS, width: int = 128
    ) -> None:
        options = DynamicEmbTableOptions(
            dim=dim,
            max_capacity=slots,
            score_strategy=DynamicEmbScoreStrategy.TIMESTAMP,
            bucket_capacity=width,
        )
        self.table = CudaTable(options, seed=1, device="cuda", rowless=rowless)
        self.generator = torch.Generator(device="cuda").manual_seed(int(load * 100))
        self.known: list[torch.Tensor] = []
        inserted = 0
        target = int(load * slots) if load < 1 else int(1.5 * slots)
        while inserted < target:
            count = min(BATCH, target - inserted)
            ids = random_ids(count, self.generator)
            self.insert(ids)
            self.known.append(ids)
            inserted += count
        self.known = self.known[-16:]
        self.full = load >= 1
        self._new: list[torch.Tensor] = []

    def restore(self) -> None:
        """Back to the load, if there were free slots."""
        for ids in [] if self.full else self._new:
            self.table.erase(ids)
        self._new = []

    def insert(self, ids: torch.Tensor) -> Any:
        group = self.table.group
        score = [self.table.batch_score()]
        batch, _ = group.insert_batch(
            ids, None, score, counts=None, codes=None, train=True, distinct=True
        )
        return batch

    def present(self, count: int) -> torch.Tensor:
        """Distinct ids, nearly all of them in the table."""
        everything = torch.cat(self.known)
        order = torch.randperm(len(everything), generator=self.generator, device="cuda")
        return everything[order[:count]].clone()

    def skewed(self, count: int) -> torch.Tensor:
        """Ids of the table, some much more often than others."""
        everything = torch.cat(self.known)
        return everything[power_law(count, len(everything), 1.05, self.generator)]

    def mixed(self, count: int, hits: float) -> torch.Tensor:
        self._new.append(random_ids(count - int(count * hits), self.generator))
        ids = torch.cat([self.present(int(count * hits)), self._new[-1]])
        return ids[torch.randperm(count, generator=self.generator, device="cuda")].clone()


def run(clock: Clock, bandwidth: float, loads: tuple[float, ...], dims: tuple[int, ...]) -> Any:
    result: dict[str, Any] = {}
    for load in loads:
        result |= _index_only(clock, load)
        torch.cuda.empty_cache()
        for dim in dims:
            result |= _with_rows(clock, bandwidth, load, dim)
            torch.cuda.empty_cache()
    return result


def _index_only(clock: Clock, load: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    index = Filled(1, load, rowless=True)
    for kind, ids in (("", index.present), (", Zipf 1.05", index.skewed)):
        sets = [ids(BATCH) for _ in range(4)]

        def find(i: int, sets: list[torch.Tensor] = sets) -> None:
            index.table.group.find_slots(sets[i % 4], None)

        result[f"find index{kind}, load {load}"] = {"us": clock.time(find, warm_up=10)}
    result |= _inserts(clock, index, f"load {load}")
    if index.full:
        del index
        narrow = Filled(1, load, rowless=True, width=64)
        result |= _inserts(clock, narrow, f"load {load}, buckets of 64")
    return result


def _inserts(clock: Clock, index: Filled, name_of_table: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for batch, name in ((BATCH, "1M"), (1 << 16, "64k")):
        fresh = [index.mixed(batch, 0.6) for _ in range(12)]

        def insert(i: int, fresh: list[torch.Tensor] = fresh) -> None:
            index.insert(fresh[i % 12])

        micros = clock.time(insert, repeats=10, warm_up=2)
        result[f"find_or_insert index, 60 % hits, {name}, {name_of_table}"] = {"us": micros}
        index.restore()
    fresh = [index.mixed(1 << 16, 0.6) for _ in range(20)]
    replay, ready = _replayed(index, fresh[0])
    times = [clock.time(replay, repeats=1, warm_up=0, before=ready(ids)) for ids in fresh[1:]]
    micros = statistics.median(times)
    result[f"find_or_insert index, 60 % hits, 64k, as a graph, {name_of_table}"] = {"us": micros}
    return result


def _replayed(index: Filled, ids: torch.Tensor) -> tuple[Any, Any]:
    """The launches of an insert as a CUDA graph: what starts it, and what gives it other ids and
    their score before."""
    numbers, here = index.table.group.layout.batch_numbers, ids.clone()
    for _ in range(4):
        index.insert(here)
    while numbers._next % (numbers.ROUNDS // 2) == 0:  # where it would wait for the device
        index.insert(here)
    place, graph = numbers._next, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index.insert(here)

    def ready(ids: torch.Tensor) -> Any:
        def copy() -> None:
            here.copy_(ids)
            score = index.table.group.layout.start_batch([index.table.batch_score()])
            numbers._arrays[place][:] = score
            torch.cuda.synchronize()

        return copy

    return lambda _: graph.replay(), ready


def _with_rows(clock: Clock, bandwidth: float, load: float, dim: int) -> dict[str, Any]:
    filled = Filled(dim, load, rowless=False)
    table, group = filled.table, filled.table.group
    sets = [filled.present(BATCH) for _ in range(4)]
    out = torch.empty(BATCH, dim, device="cuda")
    values = torch.randn(BATCH, dim, device="cuda")
    result: dict[str, Any] = {}

    def add(name: str, micros: float, bytes_per_id: float) -> None:
        floor = BATCH * bytes_per_id / bandwidth * 1e6
        result[f"{name}, dim {dim}, load {load}"] = {
            "us": micros,
            "floor_us": floor,
            "percent_of_floor": 100 * floor / micros,
        }

    index_bytes = 8 + 128 + SECTOR
    micros = clock.time(lambda i: group.find_rows(sets[i % 4], out), warm_up=10)
    add("find + row copy", micros, index_bytes + 8 * dim)

    fresh = [filled.mixed(BATCH, 0.6) for _ in range(10)]

    def find_or_insert(i: int) -> None:
        batch = filled.insert(fresh[i % 10])
        batch.initialize(embeddings=True)
        table.gather(batch.slots, out, missing=False)

    micros = clock.time(find_or_insert, repeats=8, warm_up=2)
    add("find_or_insert, 60 % hits", micros, index_bytes + SECTOR + 8 * dim + 0.4 * 4 * dim)

    filled.restore()
    fresh = [filled.mixed(BATCH, 0.6) for _ in range(10)]

    def insert_and_evict(i: int) -> None:
        table._write(fresh[i % 10], values, None, None, True, distinct=True)

    micros = clock.time(insert_and_evict, repeats=8, warm_up=2)
    evicted = 8 * dim + 2 * SECTOR if load == 1 else 0
    add("insert_and_evict, 60 % hits", micros, index_bytes + SECTOR + 8 * dim + 0.4 * evicted)
    filled.restore()
    micros = clock.time(lambda i: table.assign(sets[i % 4], values), repeats=8)
    add("assign", micros, index_bytes + SECTOR + 8 * dim)
    micros = clock.time(
        lambda i: table._assign(sets[i % 4], values, None, None, distinct=True), repeats=8
    )
    add("assign, distinct ids", micros, index_bytes + SECTOR + 8 * dim)
    misses = [filled.mixed(BATCH, 0.0) for _ in range(10)]
    micros = clock.time(lambda i: table.insert(misses[i % 10], values), repeats=8, warm_up=2)
    add("insert, all misses", micros, index_bytes + 3 * SECTOR + 8 * dim)
    filled.restore()
    misses = [filled.mixed(BATCH, 0.0) for _ in range(10)]
    micros = clock.time(
        lambda i: table._write(misses[i % 10], values, None, None, False, distinct=True),
        repeats=8,
        warm_up=2,
    )
    add("insert, all misses, distinct ids", micros, index_bytes + 3 * SECTOR + 8 * dim)
    return result
