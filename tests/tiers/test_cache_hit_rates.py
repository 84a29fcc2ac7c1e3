"""The cache of a table keeps what a least-recently-used cache keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import create_table
from dynamicemb.tiers import HostStore
from dynamicemb.tiers.sizing import table_bytes
from tables import STRATEGY

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from zipf import Zipf

#: alpha, and the hit rates of LRU with 1 % and 10 % of a million ids.
KNOWN = [
    (0.8, 0.2319, 0.4871),
    (1.05, 0.6759, 0.8385),
]


@pytest.mark.parametrize(("alpha", "one", "ten"), KNOWN)
def test_the_expected_rates_are_the_known_ones(alpha: float, one: float, ten: float) -> None:
    stream = Zipf(10**6, alpha, seed=1)
    assert stream.lru_hit_rate(10**4) == pytest.approx(one, abs=1e-4)
    assert stream.lru_hit_rate(10**5) == pytest.approx(ten, abs=1e-4)


@pytest.mark.parametrize("strategy", ["TIMESTAMP", "STEP", "NO_EVICTION"])
def test_a_cache_hits_as_often_as_expected(strategy: str) -> None:
    ids, batch = 20_000, 64
    options = DynamicEmbTableOptions(
        dim=4,
        max_capacity=4 * ids,
        score_strategy=STRATEGY[strategy],
        external_storage=HostStore,
    )
    sgd = Optimizer(OptimizerKind.SGD, OptimizerArgs())
    options.local_hbm_for_values = table_bytes(ids // 10, options, sgd, cache=True)
    table = create_table(options)
    stream = Zipf(ids, 1.05, seed=3)
    for part in torch.arange(2000).flip(0).split(batch):
        table.find_or_insert(part)
    for _ in range(300):
        table.find_or_insert(stream.draw(batch))
    table.reset_stats()
    for _ in range(1000):
        table.find_or_insert(stream.draw(batch))
    misses = table.cache_stats().misses  # type: ignore[attr-defined]
    rate = 1 - misses / (1000 * batch)
    assert rate == pytest.approx(stream.lru_hit_rate(table.cache.capacity), abs=0.01)  # type: ignore[attr-defined]
