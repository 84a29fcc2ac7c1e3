"""Hours of training and serving together: nothing grows.

A trainer with admission, expiry, an SSD below a cache, chains of deltas, and a server that follows
them, over a fixed set of ids. DYNAMICEMB_LONG_RUN_SECONDS sets how long it runs; the first quarter
is warm-up.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.expiry import expire_rows
from dynamicemb.incremental_dump import dump_delta
from dynamicemb.tiers import SsdStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
from served import PATIENCE_S, ServerProcess, exchange

SECONDS = float(os.environ.get("DYNAMICEMB_LONG_RUN_SECONDS", "600"))
IDS = 20_000
ROWS = 4096
BATCH = 256
STEPS_PER_DELTA = 50
DELTAS_PER_CHAIN = 10
IO_THREADS = 2  # they start at the first read that the page cache does not answer
MOST_KIB = 8192  # 10^4 steps that leak 840 bytes each would be more
MOST_DISK = 1.25
OFFSETS = torch.arange(0, BATCH + 1)


def over_an_ssd(path: Path) -> BatchedDynamicEmbeddingTables:
    options = DynamicEmbTableOptions(
        dim=8,
        max_capacity=2**20,
        bucket_capacity=128,
        score_strategy=DynamicEmbScoreStrategy.LFU,
        admit_strategy=FrequencyAdmissionStrategy(2),
        admission_counter=KVCounter(ROWS),
        caching=True,
        local_hbm_for_values=2**18,
        external_storage=SsdStore.at(path, segment_mb=1, io_threads=IO_THREADS),
    )
    return BatchedDynamicEmbeddingTables([options], table_names=["stored"], optimizer="adam")


def that_expires() -> BatchedDynamicEmbeddingTables:
    options = DynamicEmbTableOptions(
        dim=8,
        max_capacity=ROWS,
        bucket_capacity=128,
        score_strategy=DynamicEmbScoreStrategy.STEP,
        admit_strategy=FrequencyAdmissionStrategy(2),
        admission_counter=KVCounter(ROWS),
    )
    module = BatchedDynamicEmbeddingTables([options], table_names=["expiring"], optimizer="adam")
    expire_rows(module, steps=500, sweep=8)
    return module


@dataclass
class Usage:
    """What two processes hold: KiB that are no file's, descriptors, threads."""

    kib: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, process: int | str) -> Usage:
        status = Path(f"/proc/{process}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in status)
        return cls(
            int(fields["RssAnon"].split()[0]),
            len(os.listdir(f"/proc/{process}/fd")),
            int(fields["Threads"]),
        )


def bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_training_with_deltas_and_a_server_holds_what_it_held(memory_path: Path) -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(7)
    model = torch.nn.ModuleDict(
        {"stored": over_an_ssd(memory_path / "rows"), "expiring": that_expires()}
    )
    chains = memory_path / "chains"

    def one_chain(number: int) -> None:
        """Train and write one chain, then remove the chain before it."""
        for _ in range(DELTAS_PER_CHAIN):
            for _ in range(STEPS_PER_DELTA):
                # Most ids are rare: the square root of a uniform number favours the largest.
                ids = (IDS * torch.rand(BATCH, generator=draw).sqrt()).long()
                for module in model.values():
                    module(ids, OFFSETS).sum().backward()
            dump_delta(chains / f"chain_{number:05}", model)
        shutil.rmtree(chains / f"chain_{number - 1:05}", ignore_errors=True)

    def served(server: ServerProcess, number: int) -> None:
        """Wait until the server has the end of this chain, and look a batch of ids up."""
        end = time.monotonic() + PATIENCE_S
        while True:
            health = server.get("/healthz")[1]
            if f"chain_{number:05}" in str(health) and health["delta"] == DELTAS_PER_CHAIN - 1:
                break
            assert time.monotonic() < end, health
            time.sleep(0.05)
        for name in ("stored", "expiring"):
            body = {"ids": list(range(IDS - 1000, IDS))}
            status, answer = exchange(server.port, "POST", f"/v1/tables/{name}/lookup", body)
            assert status == 200
            assert any(answer["found"])

    one_chain(0)
    with ServerProcess(chains) as server:
        served(server, 0)
        number = 1

        def train_and_serve(seconds: float) -> None:
            nonlocal number
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                one_chain(number)
                served(server, number)
                number += 1

        train_and_serve(SECONDS / 4)
        gc.collect()
        before = Usage.of("self"), Usage.of(server.process.pid)
        disk = bytes_below(memory_path)
        train_and_serve(3 * SECONDS / 4)
        gc.collect()
        after = Usage.of("self"), Usage.of(server.process.pid)
        print(f"{number} chains of {DELTAS_PER_CHAIN * STEPS_PER_DELTA} steps: {before} -> {after}")
        print(f"{disk} -> {bytes_below(memory_path)} bytes on the disk")
        for then, now in zip(before, after, strict=True):
            assert now.kib - then.kib < MOST_KIB
            assert now.descriptors <= then.descriptors + 2  # a connection that is being closed
            assert now.threads <= then.threads + IO_THREADS
        assert bytes_below(memory_path) < MOST_DISK * disk
        assert server.end() == 0
