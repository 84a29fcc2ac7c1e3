"""Memory budgets, measured in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    get_table_value_bytes,
)
from dynamicemb.errors import InvalidArgumentError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import MAX_BUCKET_CAPACITY
from dynamicemb.table import create_table
from dynamicemb.tiers import CachedTable, HostStore
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


@pytest.mark.parametrize("strategy", ["TIMESTAMP", "NO_EVICTION"])
def test_two_budgets_of_a_stack(strategy: str, tmp_path: Path) -> None:
    measured = measure("stack", tmp_path, 40, score_strategy=strategy)
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


BELOW = DynamicEmbTableOptions(dim=64, max_capacity=2**16, caching=True, local_hbm_for_values=1000)


@pytest.mark.parametrize("store", [None, HostStore])
@pytest.mark.parametrize("bucket", [64, 128, MAX_BUCKET_CAPACITY])
def test_a_budget_below_one_bucket_is_rounded_up_and_says_so(store: Any, bucket: int) -> None:
    options = replace(BELOW, external_storage=store, bucket_capacity=bucket)
    optimizer = Optimizer(OptimizerKind.ADAM, OptimizerArgs())
    with pytest.warns(UserWarning, match=r"table 'users' has 1000 bytes .* which are used") as said:
        table = create_table(options, optimizer=optimizer, name="users")
    assert isinstance(table, CachedTable)
    width = 16 if bucket == MAX_BUCKET_CAPACITY else bucket
    assert table.cache.capacity == width
    assert str(table_bytes(width, options, optimizer)) in str(said[0].message)
    ids = torch.arange(1000)
    for part in ids.split(width // 2):
        table.find_or_insert(part)
    assert len(table) == 1000
    assert bool(table.contains(ids).all())


def test_a_table_whose_rows_all_fit_one_bucket_has_no_cache() -> None:
    """As in upstream's example with a table of two genders."""
    options = replace(BELOW, max_capacity=100)
    with pytest.warns(UserWarning, match="has 1000 bytes for rows in use"):
        table = create_table(options)
    assert not isinstance(table, CachedTable)
    assert table.capacity == 128


def test_upstreams_own_budget_is_taken() -> None:
    """Half of what its helper says: refused before, since ids and scores count here."""
    config = SimpleNamespace(num_embeddings=100, embedding_dim=64, data_type="FP32")
    budget = get_table_value_bytes(config, "adam", 1, 128) // 2
    options = replace(BELOW, max_capacity=128, local_hbm_for_values=budget)
    other = replace(BELOW, max_capacity=2**14, local_hbm_for_values=2**21)
    with pytest.warns(UserWarning, match=f"table 'small' has {budget} bytes"):
        tables = BatchedDynamicEmbeddingTables(
            [options, other], ["small", "large"], optimizer="adam"
        )
    offsets = torch.tensor([0, 50, 500])
    for step in range(3):
        ids = torch.cat([torch.arange(50), torch.arange(450) + 300 * step])
        tables(ids, offsets).sum().backward()
    assert [len(table) for table in tables.tables] == [50, 1050]


def test_a_budget_of_zero_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="local_hbm_for_values is 0; allowed: with cach"):
        create_table(replace(BELOW, local_hbm_for_values=0))


def test_the_budget_of_a_store_is_not_rounded_up() -> None:
    options = replace(BELOW, external_storage=HostStore.within(1000))
    with (
        pytest.warns(UserWarning, match="1000 bytes"),
        pytest.raises(InvalidArgumentError, match="budget is 1000; allowed: at least"),
    ):
        create_table(options)
