"""Gather, pooling and fused updates with known slots, against the bytes they move."""

from __future__ import annotations

from typing import Any

import torch
from measure import Clock

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbPoolingMode, DynamicEmbTableOptions
from dynamicemb.table.cuda import CudaTable
from dynamicemb.table.rows import Pooling

SLOTS, BATCH = 1 << 24, 1 << 20


def run(clock: Clock, bandwidth: float, dims: tuple[int, ...] = (64, 128)) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for dim in dims:
        for kind, words in (
            (OptimizerKind.SGD, 2.0),
            (OptimizerKind.ADAM, 6.0),
            (OptimizerKind.ROWWISE_ADAGRAD, 2.0 + 16 / dim),
        ):
            result |= _one(clock, bandwidth, dim, kind, words)
            torch.cuda.empty_cache()
    return result


def _one(
    clock: Clock, bandwidth: float, dim: int, kind: OptimizerKind, words: float
) -> dict[str, Any]:
    table = CudaTable(
        DynamicEmbTableOptions(dim=dim, max_capacity=SLOTS),
        optimizer=Optimizer(kind, OptimizerArgs()),
        seed=1,
        device="cuda",
    )
    group = table.group
    generator = torch.Generator(device="cuda").manual_seed(3)
    sets = [torch.randint(0, 2**62, (BATCH,), generator=generator, device="cuda") for _ in range(3)]
    gradient = torch.randn(BATCH, dim, device="cuda")
    pooling = Pooling(DynamicEmbPoolingMode.NONE, torch.float32, (1,))
    lookups = [group.find_or_insert(ids, (0, BATCH)) for ids in sets]
    for lookup in lookups:
        group.update(lookup, pooling, gradient)  # finds again and sorts once
    result: dict[str, Any] = {}

    def add(name: str, micros: float, bytes_per_id: float) -> None:
        floor = BATCH * bytes_per_id / bandwidth * 1e6
        result[f"{name}, dim {dim}"] = {
            "us": micros,
            "floor_us": floor,
            "percent_of_floor": 100 * floor / micros,
        }

    if kind is OptimizerKind.SGD:
        out = torch.empty(BATCH, dim, device="cuda")
        add(
            "gather",
            clock.time(lambda i: group.read(lookups[i % 3], pooling, out)),
            8 * dim + 8,
        )
    micros = clock.time(lambda i: group.update(lookups[i % 3], pooling, gradient))
    add(f"update {kind.name}", micros, 4 * dim * (words + 1) + 16)
    return result
