"""The SSD store against RocksDB and a plain memory-mapped file, and training through a cache.

    python benchmarks/tiers.py [--folder .] [--rows 1000000] [--rounds 15] [--steps 30] [--json F]

Stores: batches of 10,000 rows of 256 bytes, random 64-bit ids, all contenders in one process, one
after the other in every round, each call on another batch; medians of wall and of CPU time (other
work on the machine disturbs the second less). "write" is of new ids, "overwrite" of random known
ones, where our store cleans its segments within the calls. "cold read": closed, page cache of the
files dropped, opened again, before every call. RocksDB is used through Python (`rocksdict`), as one
would: bytes as keys, a write batch, a list of keys to read. The mapped file is an array of rows
that is written and read in place, at known places: the floor, without index, checksums or crash
safety.

Training: one table, Zipf 1.05, Adam, cache of 100, 50, 10 and 1 % of the ids, over an SSD store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbTableOptions, EmbOptimType
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import Rows
from dynamicemb.tiers import SsdStore
from dynamicemb.tiers.sizing import table_bytes

BATCH = 10_000
DIM = 62  # with the score, 256 bytes
SGD = Optimizer(OptimizerKind.SGD, OptimizerArgs())


class Ours:
    name = "SsdStore"

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder = folder / "ours"
        self.open()

    def open(self) -> None:
        options = DynamicEmbTableOptions(dim=DIM, max_capacity=1)
        self.store = SsdStore(options, SGD, path=self.folder)

    def write(self, ids: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        scores = rows[:, :2].contiguous().view(torch.int64).squeeze(1)
        self.store.insert(Rows(ids, rows[:, 2:].contiguous(), torch.empty(len(ids), 0), scores))

    def read(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        found = self.store.find(ids)
        assert bool(found.found.all())
        return found.embeddings

    def flush(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.store.close()


class RocksDb:
    name = "RocksDB (rocksdict)"

    def __init__(self, folder: Path, rows: int) -> None:
        import rocksdict

        self.folder = folder / "rocks"
        self._module = rocksdict
        self.open()

    def open(self) -> None:
        options = self._module.Options(raw_mode=True)
        self.store = self._module.Rdict(str(self.folder), options)

    def write(self, ids: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        keys, values = ids.numpy().tobytes(), rows.numpy().tobytes()
        batch = self._module.WriteBatch(raw_mode=True)
        for i in range(len(ids)):
            batch.put(keys[8 * i : 8 * i + 8], values[256 * i : 256 * i + 256])
        self.store.write(batch)

    def read(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        keys = ids.numpy().tobytes()
        values = self.store[[keys[8 * i : 8 * i + 8] for i in range(len(ids))]]
        rows = np.frombuffer(b"".join(values), dtype=np.float32)
        return torch.from_numpy(rows.reshape(len(ids), 64)[:, 2:].copy())

    def flush(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.store.close()


class MappedFile:
    name = "mapped file"

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder = folder / "mapped"
        self.folder.mkdir()
        self.shape = (rows, 64)
        self.rows = np.memmap(self.folder / "rows", np.float32, "w+", shape=self.shape)

    def open(self) -> None:
        self.rows = np.memmap(self.folder / "rows", np.float32, "r+", shape=self.shape)

    def write(self, ids: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        self.rows[places.numpy()] = rows.numpy()

    def read(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.rows[places.numpy()][:, 2:].copy())

    def flush(self) -> None:
        self.rows.flush()

    def close(self) -> None:
        del self.rows


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """(wall, CPU) in ms."""
    wall, cpu = time.perf_counter(), time.process_time()
    call(*arguments)
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def compare_stores(folder: Path, rows: int, rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    values = torch.randn(rows, 64, generator=generator)
    stores = [kind(folder, rows) for kind in (Ours, RocksDb, MappedFile)]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for begin in range(0, rows, BATCH):
        new, places = slice(begin, begin + BATCH), torch.arange(begin, min(rows, begin + BATCH))
        for store in stores:
            spent = timed(store.write, ids[new], values[new], places)
            times.setdefault(("write", store.name), []).append(spent)
    for store in stores:
        store.flush()
    for case in ("overwrite", "warm read", "cold read"):
        for turn in range(rounds + 3):
            places = torch.randperm(rows, generator=generator)[:BATCH]
            picked, other = ids[places], torch.randn(BATCH, 64, generator=generator)
            for store in stores:
                if case == "overwrite":
                    spent = timed(store.write, picked, other, places)
                else:
                    if case == "cold read":
                        store.close()
                        drop_page_cache(store.folder)
                        store.open()
                    spent = timed(store.read, picked, places)
                if turn >= 3:
                    times.setdefault((case, store.name), []).append(spent)
        if case == "overwrite":
            for store in stores:
                store.flush()
    for store in stores:
        store.close()
    return [
        {
            "case": case,
            "store": name,
            "wall_ms": statistics.median(wall for wall, _ in spent),
            "cpu_ms": statistics.median(cpu for _, cpu in spent),
        }
        for (case, name), spent in times.items()
    ]


def draw(edges: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    chances = torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.searchsorted(edges, chances).clamp_(max=len(edges) - 1)


def train_through_a_cache(folder: Path, ids: int, steps: int) -> list[dict[str, Any]]:
    adam = Optimizer(OptimizerKind.ADAM, OptimizerArgs())
    weights = torch.arange(1, ids + 1, dtype=torch.float64) ** -1.05
    edges = torch.cumsum(weights / weights.sum(), 0)
    results = []
    for percent in (100, 50, 10, 1):
        generator = torch.Generator().manual_seed(2)
        options = DynamicEmbTableOptions(dim=64, max_capacity=ids)
        options.external_storage = SsdStore.at(folder / f"train{percent}")
        # 100 %: room for all in every bucket.
        share = 1.5 if percent == 100 else percent / 100
        options.local_hbm_for_values = table_bytes(int(ids * share), options, adam)
        module = BatchedDynamicEmbeddingTables([options], optimizer=EmbOptimType.ADAM, seed=1)
        size = min(8192, max(512, ids * percent // 100 // 8))
        offsets = torch.arange(size + 1)
        for _ in range(max(20, ids // size)):  # fill
            module(draw(edges, size, generator), offsets).sum().backward()
        table = module.tables[0]
        table.reset_stats()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            module(draw(edges, size, generator), offsets).sum().backward()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        stats = table.cache_stats()
        results.append(
            {
                "cache_percent": percent,
                "batch": size,
                "ids_per_second": steps * size / wall,
                "cpu_us_per_id": cpu / (steps * size) * 1e6,
                "hit_rate_of_distinct_ids": stats.hits / max(1, stats.hits + stats.misses),
            }
        )
        table.store.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="tiers-"))
    try:
        stores = compare_stores(folder, arguments.rows, arguments.rounds)
        for one in stores:
            print(f"{one['case']:10} {one['store']:20} {one['wall_ms']:8.2f} ms wall", end="")
            print(f" {one['cpu_ms']:8.2f} ms CPU")
        training = train_through_a_cache(folder, arguments.rows // 4, arguments.steps)
        for one in training:
            print(one)
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        result = {"stores": stores, "training": training, "arguments": vars(arguments)}
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
