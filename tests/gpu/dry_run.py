"""The kernels that real calls start, without a GPU: launches are written down, not carried out.

Run in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from typing import Any

import eager_graph
import torch

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.table import cuda, cuda_group, cuda_replay
from dynamicemb.table.cuda_evicted import Evicted
from dynamicemb.table.rows import Pooling

POINTERS = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments, its constants and its warps."""

    function: Any
    types: tuple[str, ...]
    constants: tuple[Any, ...]
    warps: int

    @property
    def name(self) -> str:
        words = "-".join(str(int(c)) for c in self.constants)
        return f"{self.function.fn.__name__}/{words}/{self.warps}"


class Recorder:
    """Stands in for the launcher."""

    def __init__(self) -> None:
        self.launches: dict[Launch, None] = {}

    def __call__(
        self,
        function: Any,
        programs: int,
        args: tuple[Any, ...],
        constants: tuple[Any, ...] = (),
        *,
        warps: int = 4,
        device: torch.device,
    ) -> None:
        types = tuple(POINTERS[a.dtype] if isinstance(a, torch.Tensor) else "i32" for a in args)
        self.launches[Launch(function, types, constants, warps)] = None


def pretend() -> Recorder:
    """From now on there is a GPU in the place of the CPU, which carries nothing out."""
    recorder = Recorder()
    for name, module in list(sys.modules.items()):
        if name.startswith("dynamicemb.table.cuda") and hasattr(module, "launch"):
            module.launch = recorder
    cuda._checked_device = torch.device  # type: ignore[assignment]
    torch.empty = torch.zeros  # what kernels would have written is read as 0
    return recorder


def record() -> list[Launch]:
    """The launches of training and evaluation with the usual shapes, and with every optimizer,
    initialiser, strategy, data type and pooling at least once; then those of everything else."""
    recorder = pretend()
    torch.manual_seed(1)
    kinds = itertools.cycle(cuda.KINDS)
    modes = itertools.cycle(DynamicEmbInitializerMode)
    strategies: Any = itertools.cycle(
        [*DynamicEmbScoreStrategy, (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)]
    )
    poolings = itertools.cycle(DynamicEmbPoolingMode)
    plain = DynamicEmbScoreStrategy.TIMESTAMP
    uniform = DynamicEmbInitializerMode.UNIFORM
    cases = [
        (128, torch.float32, 1, kind, uniform, plain, DynamicEmbPoolingMode.SUM)
        for kind in (OptimizerKind.SGD, OptimizerKind.ADAM, OptimizerKind.ROWWISE_ADAGRAD)
    ]
    cases += [
        (dim, dtype, tables, next(kinds), next(modes), next(strategies), next(poolings))
        for dim in (8, 32, 64, 100, 128)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for tables in (1, 3)
    ]
    for dim, dtype, tables, kind, mode, strategy, pooling in cases:
        _train((dim,) * tables, dtype, kind, mode, strategy, pooling)
    for kind in cuda.KINDS:  # tables of several classes
        summed = DynamicEmbPoolingMode.SUM
        _train((4, 64, 20), torch.float32, kind, uniform, plain, summed)
    for tables in (1, 3):
        _other_calls(tables)
    return list(recorder.launches)


def _other_calls(tables: int) -> None:
    """Given rows, protected rows, marks of changes, summed gradients, a batch that is replayed."""
    options = DynamicEmbTableOptions(dim=64, max_capacity=1 << 16)
    members = [cuda.CudaTable(options, name=f"t{t}", seed=t, device="cpu") for t in range(tables)]
    ids, bounds = torch.arange(600), tuple(600 * t // tables for t in range(tables + 1))
    group = cuda_group.CudaTableGroup(members)
    table = members[0]
    table.insert(ids, torch.zeros(600, 64), scores=ids)
    table.group.insert_batch(
        ids, None, [table.batch_score()], counts=None, codes=None, train=True, distinct=True
    )
    batch, _ = table.group.insert_batch(
        ids, None, [table.batch_score()], counts=None, codes=None, train=True, keep_evicted=True
    )
    Evicted(batch)._packed(table, 0, 1)
    table.initial_rows(ids)
    table.buckets_of(ids)
    table.mark_changes()
    lookup = group.find_or_insert(ids, bounds)
    group.find_or_insert(ids, bounds, protect=[lookup])
    pooling = Pooling(DynamicEmbPoolingMode.NONE, torch.float32, (1,) * tables)
    group.reduce(lookup, pooling, torch.zeros(600, 64))
    eager_graph.use_for(group._replay)
    for out in (None, torch.zeros(600, 64)):
        for _ in range(cuda_replay.SEEN_BEFORE + 1):
            group.find_or_insert(ids, bounds, out=out)


def _train(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    kind: OptimizerKind,
    mode: DynamicEmbInitializerMode,
    strategy: Any,
    pooling_mode: DynamicEmbPoolingMode,
) -> None:
    tables = len(dims)
    options = DynamicEmbTableOptions(
        max_capacity=1 << 16,
        embedding_dtype=dtype,
        initializer_args=DynamicEmbInitializerArgs(mode=mode),
        score_strategy=strategy,
    )
    args = OptimizerArgs(stochastic_rounding=True)
    members = [
        cuda.CudaTable(
            replace(options, dim=dim),
            optimizer=Optimizer(kind, args),
            name=f"t{t}",
            seed=t,
            device="cpu",
        )
        for t, dim in enumerate(dims)
    ]
    if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
        for table in members:
            table.set_score(1)
    group = cuda_group.CudaTableGroup(members)
    n, features = 600, (1,) * tables
    ids = torch.arange(n)
    bounds = tuple(n * t // tables for t in range(tables + 1))
    bags = 20 * tables
    offsets = torch.arange(bags + 1) * (n // bags)
    weighted = pooling_mode is DynamicEmbPoolingMode.SUM and tables > 1
    pooling = Pooling(
        pooling_mode,
        torch.float32,
        features,
        batch_size=20,
        offsets=offsets,
        weights=torch.ones(n) if weighted else None,
    )
    shape = (20, sum(dims)) if pooling.pooled else (n, dims[0])
    out = torch.zeros(shape)
    group.evaluate(ids, bounds, pooling, out)
    lookup = group.find_or_insert(ids, bounds)
    group.read(lookup, pooling, out)
    group.update(lookup, pooling, out)
    if weighted:
        group.weight_gradient(lookup, pooling, out)
