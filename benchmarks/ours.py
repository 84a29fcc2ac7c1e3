"""This library as a contender: the real module, with scores and autograd, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peers import LEARNING_RATE, Contender, NotInstalled
from workload import DIM, Batch, Workload

FILL = 2**18


def build(
    work: Workload, *, pooling: str = "none", optimizer: str = "rowwise_adagrad", load: float = 0.0
) -> Any:
    """A module with one table that holds all ids of ``work``.

    Room for twice the next power of two of ids (load 0.48 for 4,000,000), or for ``load``.
    """
    try:
        from dynamicemb import (
            BatchedDynamicEmbeddingTables,
            DynamicEmbPoolingMode,
            DynamicEmbTableOptions,
            EmbOptimType,
        )
    except ImportError as error:
        raise NotInstalled(f"pip install . in the root of this repository ({error})") from error
    capacity = int(work.n / load) if load else 2 * 2 ** (work.n - 1).bit_length()
    module = BatchedDynamicEmbeddingTables(
        table_options=[
            DynamicEmbTableOptions(dim=DIM, max_capacity=capacity, init_capacity=capacity)
        ],
        table_names=["t"],
        pooling_mode=getattr(DynamicEmbPoolingMode, pooling.upper()),
        optimizer={
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "sgd": EmbOptimType.EXACT_SGD,
            "adam": EmbOptimType.ADAM,
        }[optimizer],
        learning_rate=LEARNING_RATE,
        device="cpu",
    )
    rows = torch.empty(FILL, DIM).uniform_(-0.1, 0.1)
    table = module.tables[0]
    for ids in work.ids.split(FILL):
        table.insert(ids, rows[: ids.numel()])
    return module


class Forward(Contender):
    """Evaluation: ids to rows (or pooled rows)."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @torch.no_grad()
    def run(self, batch: Batch) -> None:
        if self.module.training:
            self.module.eval()
        self.module(batch.ids, batch.offsets)


class Train(Contender):
    """A whole training step: forward with score updates, backward with the fused optimizer."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def run(self, batch: Batch) -> None:
        if not self.module.training:
            self.module.train()
        rows: Tensor = self.module(batch.ids, batch.offsets)
        rows.backward(batch.grad)


class FindSlots(Contender):
    """id to slot, nothing else."""

    def __init__(self, module: Any) -> None:
        self.table = module.tables[0]

    def run(self, batch: Batch) -> None:
        self.table.find_slots(batch.ids)
