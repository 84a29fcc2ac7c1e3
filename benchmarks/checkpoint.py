"""Speed and memory of dumping and loading, as a share of what the disk does with plain bytes.

    python benchmarks/checkpoint.py [--gigabytes 2] [--folder .] [--rounds 3] [--threads N]

`dd` is the yardstick: it writes as many bytes to the same disk with the same durability
(`conv=fdatasync`), and reads the checkpoint's own files. dd reads before every load, so that both
see the same disk; the medians count. Before each read the files are dropped from the page cache.
Dump and load include every checksum. Three loads: into an empty table whose memory is there, which
is the speed of loading; over the rows that a table has, which reads the files twice, first to
verify; and into a new table, whose memory the operating system has yet to give ("touch": what it
takes to write to as much new memory once, by itself).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbDump,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.cli.machine import environment

DIM = 64
STATE = 2 * DIM  # Adam
ROW_BYTES = 8 + 4 * DIM + 8 + 4 * STATE
MB = 1e6
LOADS = ("load new table", "load", "load over rows")


def make(rows: int) -> BatchedDynamicEmbeddingTables:
    options = DynamicEmbTableOptions(
        dim=DIM,
        max_capacity=2 * rows,
        init_capacity=1024,
        score_strategy=DynamicEmbScoreStrategy.STEP,
    )
    return BatchedDynamicEmbeddingTables([options], table_names=["t"], optimizer="adam", seed=1)


def fill(model: BatchedDynamicEmbeddingTables, rows: int) -> None:
    table = model.tables[0]
    table.reserve(rows)
    for ids in torch.arange(rows).split(65536):
        numbers = torch.randn(len(ids), DIM)
        table.insert(ids * -0x61C8864680B583EB, numbers, state=torch.rand(len(ids), STATE))


def files(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()]


def drop_from_cache(path: Path) -> None:
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Peak:
    """Resident memory that a block needs beyond what was there before it."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self._before = self._value("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._value("VmHWM") - self._before

    @staticmethod
    def _value(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {name}")


def timed(work: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def dump(path: Path, model: BatchedDynamicEmbeddingTables) -> None:
    DynamicEmbDump(path, model, optim=True)


def load(path: Path, model: BatchedDynamicEmbeddingTables) -> None:
    DynamicEmbLoad(path, model, optim=True)


def make_empty(model: BatchedDynamicEmbeddingTables) -> None:
    """Erase the rows; the memory stays."""
    for rows in model.tables[0].export():
        model.tables[0].erase(rows.ids)


def touch(size: int) -> None:
    """Write to so much new memory, on huge pages as a table does."""
    with mmap.mmap(-1, size) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, dtype=np.uint8).fill(1)


def dd_write(source: Path, target: Path) -> None:
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fdatasync"]
    subprocess.run(command, check=True, capture_output=True)


def dd_read(path: Path) -> None:
    for file in files(path):
        command = ["dd", f"if={file}", "of=/dev/null", "bs=4M"]
        subprocess.run(command, check=True, capture_output=True)


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round, and peak memory."""
    model = make(rows)
    fill(model, rows)
    size = rows * ROW_BYTES
    random = Path("/dev/shm") / f"dynamicemb-bench-{os.getpid()}"
    seconds: dict[str, list[float]] = {
        name: [] for name in ("dd write", "dump", "dd read", *LOADS, "touch")
    }
    memory: dict[str, int] = {"dump": 0, "load": 0}
    with random.open("wb") as file:
        for begin in range(0, size, 1 << 24):
            file.write(os.urandom(min(1 << 24, size - begin)))
    try:
        for number in range(rounds):
            target = folder / f"c{number}"
            seconds["dd write"].append(timed(dd_write, random, folder / "dd"))
            (folder / "dd").unlink()
            with Peak() as peak:
                seconds["dump"].append(timed(dump, target, model))
            memory["dump"] = max(memory["dump"], peak.bytes)
            other = make(rows)
            for name in LOADS:
                if name == "load":
                    make_empty(other)
                drop_from_cache(target)
                seconds["dd read"].append(timed(dd_read, target))
                drop_from_cache(target)
                with Peak() as peak:
                    seconds[name].append(timed(load, target, other))
                assert len(other.tables[0]) == rows
                if name != "load new table":  # whose own memory would count
                    memory["load"] = max(memory["load"], peak.bytes)
            table = other.tables[0].stats().bytes
            del other
            seconds["touch"].append(timed(touch, table))
            shutil.rmtree(target)
    finally:
        random.unlink()
    threads = torch.get_num_threads()
    return {
        "rows": rows,
        "threads": threads,
        "bytes": size,
        "seconds": seconds,
        "extra_memory_bytes": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="bytes of the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the tables; files have their own")
    parser.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = int(args.gigabytes * 1e9 / ROW_BYTES)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder), rows, args.rounds)
    print(f"{rows} rows of {ROW_BYTES} bytes ({result['bytes'] / 1e9:.2f} GB)")
    median = {name: statistics.median(times) for name, times in result["seconds"].items()}
    for name, times in result["seconds"].items():
        rounds = ", ".join(f"{one:.2f}" for one in times)
        print(f"{name:14} {result['bytes'] / MB / median[name]:7.0f} MB/s   ({rounds} s)")
    dd = median["dd read"]
    result["share_of_dd"] = {
        "dump": median["dd write"] / median["dump"],
        **{name: dd / median[name] for name in LOADS},
        "load new table, of dd read and touch": (dd + median["touch"]) / median["load new table"],
    }
    for name, share in result["share_of_dd"].items():
        print(f"{name}: {100 * share:.0f} % of dd")
    for name, extra in result["extra_memory_bytes"].items():
        print(f"{name}: {extra / MB:.0f} MB of memory beside the table")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
