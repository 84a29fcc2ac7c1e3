"""From the same rows, dynamic tables train like TorchRec's own row-wise tables."""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import PoolingType

from ranks import Ranks

STEPS = 20
BATCH = 12
OPTIMIZERS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.3},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6},
    "rowwise": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1},
}
MIXED = {"users": PoolingType.MEAN, "goods": PoolingType.SUM}


def compare(
    rank: int,
    world_size: int,
    *,
    bags: bool,
    weighted: bool = False,
    pooling: Any = None,
    dist_type: str = "roundrobin",
    names: list[str],
) -> None:
    tables = sharded.configs(bags, pooling)
    start = sharded.rows_at_start(tables)
    whole = [sharded.batch(step, BATCH, weighted=weighted) for step in range(STEPS)]
    sizes = sharded.even(BATCH, world_size)
    batches = [sharded.share(one, sizes, rank) for one in whole]
    ids = torch.arange(sharded.ROWS)
    options = {one.name: sharded.DynamicEmbTableOptions(dist_type=dist_type) for one in tables}
    for name in names:
        fused_params = OPTIMIZERS[name]
        static = sharded.static_model(
            sharded.Net(tables, weighted=weighted), fused_params, world_size
        )
        sharded.set_static(static, start)
        expected = sharded.train(static, batches)
        expected_rows = sharded.static_rows(static)
        for dedup in (False,) if bags else (False, True):
            dynamic = sharded.dynamic_model(
                sharded.Net(tables, weighted=weighted),
                fused_params,
                world_size,
                dedup=dedup,
                options=options,
            )
            sharded.insert_owned(dynamic, start)
            losses = sharded.train(dynamic, batches)
            torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
            rows = sharded.dynamic_rows(dynamic, ids)
            torch.testing.assert_close(rows, expected_rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sequences(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, compare, bags=False, names=list(OPTIMIZERS))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bags(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, compare, bags=True, names=list(OPTIMIZERS))
    ranks.run(world_size, compare, bags=True, pooling=MIXED, names=["sgd"])
    ranks.run(world_size, compare, bags=True, weighted=True, pooling=MIXED, names=["rowwise"])


@pytest.mark.parametrize("dist_type", ["continuous", "hash_roundrobin"])
def test_other_routings(ranks: Ranks, dist_type: str) -> None:
    ranks.run(2, compare, bags=False, dist_type=dist_type, names=["sgd"])
    ranks.run(2, compare, bags=True, dist_type=dist_type, names=["sgd"])
