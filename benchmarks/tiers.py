"""The SSD store against RocksDB and a plain memory-mapped file, and training through a cache.

    python benchmarks/tiers.py [--folder .] [--only stores|open|training] [--json F]
        [--rows 1000000] [--rounds 15] [--open-rows 10000000] [--ids 250000] [--steps 300]
    python benchmarks/tiers_plot.py F docs/tiers_training.svg

Stores: batches of 10,000 rows of 256 bytes, random 64-bit ids, all contenders in one process, one
after the other in every round, each call on another batch; medians of wall and of CPU time (other
work on the machine disturbs the second less). "write" is of new ids, "overwrite" of random known
ones, where our store cleans its segments within the calls. "cold read": closed, page cache of the
files dropped, opened again, before every call. RocksDB is used through Python (`rocksdict`), as one
would: bytes as keys, a write batch, a list of keys to read. The mapped file is an array of rows
that is written and read in place, at known places: the floor, without index, checksums or crash
safety.

Open: a store of many rows is closed and opened again; bytes of its index and on the disk.

Training: one table, Zipf 1.05, 64 columns, Adam, batches of 1,024 ids, a cache of 100, 50, 10 and
1 % of the ids, over main memory and over an SSD store. First every id is used once, the most
frequent last, then as many steps as are measured. The hit rate counts every id of a batch that is
in the cache when the batch comes or occurred in it before; expected is that of a
least-recently-used cache of the same number of rows (Che's approximation).
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
from dynamicemb.tiers import HostStore, SsdStore
from dynamicemb.tiers.sizing import table_bytes
from zipf import Zipf

BATCH = 10_000
TRAIN_BATCH = 1024
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


def open_large(folder: Path, rows: int) -> dict[str, Any]:
    """Write rows, close, and open again; what the index and the disk take, also after overwriting
    every third row."""
    ours = Ours(folder, rows)
    values = torch.randn(BATCH, 64)
    for begin in range(0, rows, BATCH):
        ours.write(torch.arange(begin, begin + BATCH) * 0x9E3779B97F4A7C1, values, values)
    ours.close()
    wall, _ = timed(ours.open)
    opened = ours.store.stats()
    for begin in range(0, rows, 3 * BATCH):
        ours.write(torch.arange(begin, begin + BATCH) * 0x9E3779B97F4A7C1, values, values)
    after = ours.store.stats()
    live = rows * (8 + ours.store.layout.row_bytes)
    ours.close()
    return {
        "rows": rows,
        "open_s": wall / 1e3,
        "index_bytes_per_row": opened.bytes_in_memory / rows,
        "disk_over_live_rows": opened.bytes_on_disk / live,
        "disk_over_live_rows_after_overwriting": after.bytes_on_disk / live,
    }


def train_through_a_cache(folder: Path, ids: int, steps: int) -> list[dict[str, Any]]:
    adam = Optimizer(OptimizerKind.ADAM, OptimizerArgs())
    results = []
    offsets = torch.arange(TRAIN_BATCH + 1)
    for kind in ("no store", "host", "ssd"):
        for percent in (100, 50, 10, 1):
            if kind == "no store" and percent < 100:
                continue
            stream = Zipf(ids, 1.05, seed=2)
            options = DynamicEmbTableOptions(dim=64, max_capacity=2 * ids)
            # 100 %: room for all in every bucket.
            slots = int(ids * (1.5 if percent == 100 else percent / 100))
            if kind != "no store":
                store = HostStore if kind == "host" else SsdStore.at(folder / f"train{percent}")
                options.external_storage = store
                options.local_hbm_for_values = table_bytes(slots, options, adam)
            module = BatchedDynamicEmbeddingTables([options], optimizer=EmbOptimType.ADAM, seed=1)

            def step(batch: torch.Tensor, module: Any = module) -> None:
                module(batch, offsets[: len(batch) + 1]).sum().backward()

            for part in torch.arange(ids).flip(0).split(TRAIN_BATCH):  # the most frequent last
                step(part)
            for _ in range(steps):
                step(stream.draw(TRAIN_BATCH))
            table: Any = module.tables[0]
            table.reset_stats()
            batches = [stream.draw(TRAIN_BATCH) for _ in range(steps)]
            start = time.perf_counter()
            for batch in batches:
                step(batch)
            wall = time.perf_counter() - start
            one = {
                "store": kind,
                "cache_percent": percent,
                "batch": TRAIN_BATCH,
                "ids_per_second": steps * TRAIN_BATCH / wall,
            }
            if kind != "no store":
                misses = table.cache_stats().misses  # an id that is missing is missed once a batch
                one["hit_rate"] = 1 - misses / (steps * TRAIN_BATCH)
                one["hit_rate_expected"] = stream.lru_hit_rate(table.cache.capacity)
                table.store.close()
            results.append(one)
    return results


def show(results: dict[str, Any]) -> None:
    for one in results.get("stores", ()):
        print(f"{one['case']:10} {one['store']:20} {one['wall_ms']:8.2f} ms wall", end="")
        print(f" {one['cpu_ms']:8.2f} ms CPU")
    for one in [results.get("open"), *results.get("training", ())]:
        if one:
            print(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".")
    parser.add_argument("--only", choices=("stores", "open", "training"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--open-rows", type=int, default=10_000_000)
    parser.add_argument("--ids", type=int, default=250_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", help="written, or what was measured now is replaced in it")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="tiers-"))
    results: dict[str, Any] = {}
    try:
        if arguments.only in (None, "stores"):
            results["stores"] = compare_stores(folder, arguments.rows, arguments.rounds)
        if arguments.only in (None, "open"):
            results["open"] = open_large(folder / "large", arguments.open_rows)
        if arguments.only in (None, "training"):
            results["training"] = train_through_a_cache(folder, arguments.ids, arguments.steps)
    finally:
        shutil.rmtree(folder)
    show(results)
    if arguments.json:
        path = Path(arguments.json)
        known = json.loads(path.read_text()) if path.exists() else {}
        known.setdefault("arguments", {}).update(
            {part: {k: v for k, v in vars(arguments).items() if k != "json"} for part in results}
        )
        path.write_text(json.dumps(known | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
