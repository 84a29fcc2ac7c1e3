"""Memory budgets, measured in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import MAX_BUCKET_CAPACITY
from dynamicemb.table import create_table
from dynamicemb.tiers import HostStore
from dynamicemb.tiers.sizing import rows_within, table_bytes

MIB = 2**20
#: What the C library keeps of freed buffers depends on the moment; it is asked to keep nothing.
GIVE_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


def measure(kind: str, path: Path, mib: int, **changes: Any) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent / "measured.py")]
    done = subprocess.run(
        [*command, kind, str(path / "s"), str(mib), json.dumps(changes)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **GIVE_BACK},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["rows"] == result["asked"]
    return result


@pytest.mark.parametrize("kind", ["local", "global"])
def test_the_cache_takes_its_budget(kind: str, tmp_path: Path) -> None:
    measured = measure(kind, tmp_path, 64)
    index = measured["stores"][0]  # the SSD store's, which grows with the rows on the disk
    assert 0.95 * 64 * MIB <= measured["used"] - index <= 1.05 * 64 * MIB
    assert 0.97 * 64 * MIB <= measured["cache"] <= 64 * MIB


def test_a_cache_over_main_memory_takes_its_budget(tmp_path: Path) -> None:
    measured = measure("caching", tmp_path, 64)
    assert 0.97 * 64 * MIB <= measured["cache"] <= 64 * MIB
    everything = 64 * MIB + measured["stores"][0]
    assert 0.9 * everything <= measured["used"] <= 1.05 * everything


def test_two_budgets_of_a_stack(tmp_path: Path) -> None:
    measured = measure("stack", tmp_path, 40)
    host, index = measured["stores"]
    assert 0.97 * 40 * MIB <= measured["cache"] <= 40 * MIB
    assert 0.97 * 40 * MIB <= host <= 40 * MIB
    assert 0.95 * 80 * MIB <= measured["used"] - index <= 1.05 * 80 * MIB


@pytest.mark.parametrize("kind", list(OptimizerKind))
@pytest.mark.parametrize("bucket", [64, 2048, MAX_BUCKET_CAPACITY])
def test_the_size_is_what_the_engine_says(kind: OptimizerKind, bucket: int) -> None:
    pair = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
    for dtype, dim, strategy in (
        (torch.float32, 7, DynamicEmbScoreStrategy.STEP),
        (torch.bfloat16, 5, pair),
    ):
        options = DynamicEmbTableOptions(
            dim=dim,
            max_capacity=2**16,
            bucket_capacity=bucket,
            embedding_dtype=dtype,
            score_strategy=strategy,
        )
        optimizer = Optimizer(kind, OptimizerArgs())
        rows = rows_within(MIB, options, optimizer)
        options.max_capacity = rows
        table = create_table(options, optimizer=optimizer)
        assert table.capacity == rows
        assert table_bytes(rows, options, optimizer) <= MIB
        table.find_or_insert(torch.arange(50 * rows))  # every position of a bucket is reached
        assert table.stats().bytes == table_bytes(rows, options, optimizer)


def test_a_budget_below_one_bucket_is_refused() -> None:
    options = DynamicEmbTableOptions(dim=64, max_capacity=2**16, external_storage=HostStore)
    options.local_hbm_for_values = 1000
    with pytest.raises(ValueError, match="local_hbm_for_values is 1000; allowed: at least"):
        create_table(options)
