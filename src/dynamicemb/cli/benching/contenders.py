"""What is timed: this library's module, and static tables that do the same work.

Each contender is built once and then runs one batch at a time. One that cannot be had here raises
``NotInstalled`` with what to install. Static tables get row numbers instead of ids (they cannot
look ids up), all memory is touched before the first call, and every option is the one that makes a
peer faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
)
from dynamicemb.cli.benching.timing import Sample
from dynamicemb.cli.benching.workload import Batch, Workload

LEARNING_RATE = 1e-4


class NotInstalled(Exception):
    """The peer is missing on this machine; the message says how to get it."""


class Contender(ABC):
    """Something that is timed: ``run`` is one call."""

    @abstractmethod
    def run(self, batch: Batch) -> Sample | None:
        """Do one call; return its Sample if it was timed elsewhere."""

    def close(self) -> None:
        """Give back what the garbage collector does not; most contenders own only memory."""
        return


def random_rows(work: Workload) -> Tensor:
    """``[n, dim]`` float32, every page written."""
    return torch.empty(work.n, work.dim, device=work.device).uniform_(-0.1, 0.1)


class FunctionalEmbedding(Contender):
    """``torch.nn.functional.embedding``."""

    def __init__(self, work: Workload) -> None:
        self.weight = random_rows(work)

    @torch.no_grad()
    def run(self, batch: Batch) -> None:
        nn.functional.embedding(batch.rows, self.weight)


class EmbeddingBag(Contender):
    """``torch.nn.EmbeddingBag`` with mode sum."""

    def __init__(self, work: Workload) -> None:
        self.module = nn.EmbeddingBag.from_pretrained(
            random_rows(work), mode="sum", include_last_offset=True
        )

    @torch.no_grad()
    def run(self, batch: Batch) -> None:
        self.module(batch.rows, batch.offsets)


class SparseEmbedding(Contender):
    """``torch.nn.Embedding(sparse=True)`` trained by ``torch.optim``."""

    def __init__(self, work: Workload, optimizer: str) -> None:
        self.module = nn.Embedding.from_pretrained(random_rows(work), freeze=False, sparse=True)
        make = {"adam": "SparseAdam", "sgd": "SGD", "adagrad": "Adagrad"}[optimizer]
        self.optimizer = getattr(torch.optim, make)(self.module.parameters(), lr=LEARNING_RATE)
        self.step(work.ids.new_zeros(1), torch.zeros(1, work.dim, device=work.device))
        for state in self.optimizer.state[self.module.weight].values():
            if isinstance(state, Tensor) and state.ndim:
                state.add_(0)  # zeros are not backed by memory until written

    def step(self, rows: Tensor, grad: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.module(rows).backward(grad)
        self.optimizer.step()

    def run(self, batch: Batch) -> None:
        self.step(batch.rows, batch.grad)


class Tbe(Contender):
    """FBGEMM's table-batched embedding: forward only, or a whole fused training step.

    ``pooling`` is "none" (what TorchRec's EmbeddingCollection uses) or "sum".
    """

    def __init__(self, work: Workload, pooling: str, optimizer: str | None = None) -> None:
        try:
            import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe
            from fbgemm_gpu.split_embedding_configs import EmbOptimType as Kind
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                BoundsCheckMode,
                EmbeddingLocation,
                PoolingMode,
            )
        except (ImportError, OSError) as error:
            package = "fbgemm-gpu-cpu" if work.device.type == "cpu" else "fbgemm-gpu"
            raise NotInstalled(f"pip install {package} ({error})") from error
        kinds = {
            None: Kind.EXACT_SGD,
            "sgd": Kind.EXACT_SGD,
            "adagrad": Kind.EXACT_ADAGRAD,
            "rowwise_adagrad": Kind.EXACT_ROWWISE_ADAGRAD,
            "adam": Kind.ADAM,
        }
        if work.device.type == "cpu":
            if optimizer == "adam":
                raise NotInstalled("FBGEMM has no Adam on the CPU")
            place = EmbeddingLocation.HOST, tbe.ComputeDevice.CPU
        else:
            place = EmbeddingLocation.DEVICE, tbe.ComputeDevice.CUDA
        try:
            self.module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
                [(work.n, work.dim, *place)],
                optimizer=kinds[optimizer],
                learning_rate=LEARNING_RATE,
                pooling_mode=PoolingMode.NONE if pooling == "none" else PoolingMode.SUM,
                bounds_check_mode=BoundsCheckMode.NONE,
                device=work.device,
            )
        except (AssertionError, RuntimeError, AttributeError) as error:
            if work.device.type == "cuda":
                why = str(error).partition(".")[0].partition("\n")[0][:200]
                raise NotInstalled(f"pip install fbgemm-gpu, for CUDA ({why})") from error
            raise
        self.module.init_embedding_weights_uniform(-0.1, 0.1)
        self.training = optimizer is not None

    def run(self, batch: Batch) -> None:
        with torch.set_grad_enabled(self.training):
            rows = self.module(batch.rows, batch.offsets)
        if self.training:
            rows.backward(batch.grad)


FILL = 2**18
OPTIMIZERS = {
    "rowwise_adagrad": "exact_row_wise_adagrad",
    "adagrad": "exact_adagrad",
    "sgd": "exact_sgd",
    "adam": "adam",
}


def build(
    work: Workload, *, pooling: str = "none", optimizer: str = "rowwise_adagrad", load: float = 0.0
) -> BatchedDynamicEmbeddingTables:
    """A module with one table that holds all ids of ``work``.

    Room for twice the next power of two of ids (load 0.48 for 4,000,000), or for ``load``.
    """
    capacity = int(work.n / load) if load else 2 * 2 ** (work.n - 1).bit_length()
    module = BatchedDynamicEmbeddingTables(
        table_options=[
            DynamicEmbTableOptions(dim=work.dim, max_capacity=capacity, init_capacity=capacity)
        ],
        table_names=["t"],
        pooling_mode=getattr(DynamicEmbPoolingMode, pooling.upper()),
        optimizer=OPTIMIZERS[optimizer],
        learning_rate=LEARNING_RATE,
        device=work.device,
    )
    rows = torch.empty(FILL, work.dim, device=work.device).uniform_(-0.1, 0.1)
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
