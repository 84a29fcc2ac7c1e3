"""Two groups of tables that must stay equal, step by step: the engine's and the kernels'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynamicemb.admission import FrequencyAdmissionStrategy, KVCounter
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.table import Table, create_group
from dynamicemb.table.group import TableGroup
from dynamicemb.table.rows import Pooling
from tables import Clock, contents

MakeTable = Callable[..., Table]
COUNTED = (
    "hits",
    "misses",
    "inserts",
    "evictions",
    "failures",
    "rejections",
    "dropped_gradients",
    "size",
)


@dataclass(frozen=True)
class Shape:
    """What the tables of a life are and how they are used."""

    dims: tuple[int, ...] = (8,)
    capacity: int = 256
    width: int = 16
    strategy: Any = DynamicEmbScoreStrategy.TIMESTAMP
    dtype: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    kind: OptimizerKind = OptimizerKind.SGD
    args: OptimizerArgs = field(default_factory=OptimizerArgs)
    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    pooling: DynamicEmbPoolingMode = DynamicEmbPoolingMode.NONE
    weighted: bool = False
    start: int | None = None
    threshold: int = 0  # of admission by frequency
    ids: int = 100  # per table and step
    bag: int = 5
    spread: int = 400
    skew: float = 1.0


def tables_of(shape: Shape, make: MakeTable) -> list[Table]:
    options = DynamicEmbTableOptions(
        max_capacity=shape.capacity,
        init_capacity=shape.start,
        bucket_capacity=shape.width,
        embedding_dtype=shape.dtype,
        score_strategy=shape.strategy,
        initializer_args=DynamicEmbInitializerArgs(mode=shape.mode),
    )
    if shape.threshold:
        rejected = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL)
        options.admit_strategy = FrequencyAdmissionStrategy(shape.threshold, rejected)
        options.admission_counter = KVCounter(capacity=4096)
    tables = []
    for t, dim in enumerate(shape.dims):
        optimizer = Optimizer(shape.kind, replace(shape.args))
        table = make(
            replace(options, dim=dim),
            optimizer=optimizer,
            name=f"t{t}",
            seed=77 + t,
            clock=Clock(step=1),
        )
        if shape.strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
            table.set_score(5)
        tables.append(table)
    return tables


class Life:
    """One group through training and evaluation. Everything it returns is on the CPU."""

    def __init__(self, shape: Shape, make: MakeTable) -> None:
        self.shape = shape
        self.tables = tables_of(shape, make)
        self.device = self.tables[0].device
        self.group: TableGroup = create_group(self.tables)

    def _ids(self, generator: torch.Generator) -> torch.Tensor:
        shape = self.shape
        n = shape.ids * len(shape.dims)
        draws = torch.rand(n, generator=generator, dtype=torch.float64, device="cpu")
        places = (shape.spread * draws ** (1.0 + shape.skew)).to(torch.int64)
        return places * -0x0123456789ABCDEF - 4

    def step(self, generator: torch.Generator) -> list[torch.Tensor]:
        """One training step, one evaluation: outputs and gradients of weights."""
        shape, count = self.shape, len(self.shape.dims)
        ids = self._ids(generator).to(self.device)
        bounds = tuple(shape.ids * t for t in range(count + 1))
        bag = min(shape.bag, shape.ids)
        bags = shape.ids // bag
        starts = torch.arange(count * bags + 1, device="cpu") * bag
        starts[-1] = len(ids)
        weights = None
        if shape.weighted:
            weights = torch.randn(len(ids), generator=generator, device="cpu").to(self.device)
        pooling = Pooling(
            shape.pooling, shape.output, (1,) * count, bags, starts.to(self.device), weights
        )
        columns = (bags, sum(shape.dims)) if pooling.pooled else (len(ids), shape.dims[0])
        out = torch.empty(columns, dtype=shape.output, device=self.device)
        evaluated = torch.empty_like(out)
        self.group.evaluate(ids, bounds, pooling, evaluated)
        lookup = self.group.train(ids, bounds, pooling, out)
        gradient = torch.randn(columns, generator=generator, device="cpu").to(shape.output)
        gradient = gradient.to(self.device)
        results = [evaluated, out]
        if weights is not None:
            results.append(self.group.weight_gradient(lookup, pooling, gradient))
        self.group.update(lookup, pooling, gradient)
        return [one.cpu() for one in results]

    def slow_down(self) -> None:
        """Halve the learning rate of the last table."""
        self.tables[-1].optimizer.args.learning_rate /= 2

    def state(self) -> list[torch.Tensor]:
        """All rows, scores and counts."""
        parts: list[torch.Tensor] = []
        for table in self.tables:
            rows = contents(table)
            parts += [rows.ids, rows.embeddings, rows.state, rows.scores]
            stats = table.stats()
            counts = [getattr(stats, name) for name in COUNTED]
            parts.append(torch.tensor([*counts, table.capacity], device="cpu"))
        return [one.cpu() for one in parts]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}
    if a.dtype.is_floating_point:
        return torch.equal(a.view(views[a.element_size()]), b.view(views[b.element_size()]))
    return torch.equal(a, b)


def live(shape: Shape, makes: tuple[MakeTable, MakeTable], steps: int, every: int = 1) -> None:
    """Run both for some steps; raise at the first difference."""
    lives = [Life(shape, make) for make in makes]
    for number in range(steps):
        results = [one.step(torch.Generator().manual_seed(number)) for one in lives]
        for place, (a, b) in enumerate(zip(*results, strict=True)):
            assert same_bits(a, b), f"step {number}, result {place}: {difference(a, b)}"
        if number == 1:
            for one in lives:
                one.slow_down()
        if number % every == every - 1 or number == steps - 1:
            for place, (a, b) in enumerate(zip(*(one.state() for one in lives), strict=True)):
                assert same_bits(a, b), f"step {number}, state {place}: {difference(a, b)}"


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Where two tensors differ, in words."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    places = (a != b).nonzero()
    if len(places) == 0:
        return "the sign of a zero, or a NaN"
    first = tuple(places[0].tolist())
    return f"{len(places)} of {a.numel()} differ, first at {first}: {a[first]} and {b[first]}"


_SUM, _MEAN = DynamicEmbPoolingMode.SUM, DynamicEmbPoolingMode.MEAN
_Mode, _Kind, _Score = DynamicEmbInitializerMode, OptimizerKind, DynamicEmbScoreStrategy
_PLAIN = OptimizerArgs(stochastic_rounding=False)

#: Every option of tables, optimizers and pooling at least once, small.
SHAPES = {
    "sgd": Shape(),
    "several tables": Shape(dims=(8, 8, 8), kind=_Kind.ADAM),
    "different dims, pooled": Shape(dims=(4, 16, 5), kind=_Kind.ADAM, pooling=_SUM),
    "mean": Shape(dims=(12,), kind=_Kind.ADAGRAD, pooling=_MEAN),
    "weighted": Shape(dims=(20, 3), kind=_Kind.ROWWISE_ADAGRAD, pooling=_SUM, weighted=True),
    "weighted mean": Shape(dims=(6,), kind=_Kind.MOMENTUM, pooling=_MEAN, weighted=True),
    "lfu": Shape(dims=(16,), kind=_Kind.ROWWISE_ADAGRAD, strategy=_Score.LFU, width=32),
    "pair": Shape(strategy=(_Score.TIMESTAMP, _Score.LFU), kind=_Kind.FTRL),
    "admission": Shape(dims=(8, 4, 8), threshold=2, pooling=_SUM, weighted=True),
    "step": Shape(strategy=_Score.STEP, kind=_Kind.PARTIAL_ROWWISE_ADAM, dims=(33,)),
    "customized": Shape(strategy=_Score.CUSTOMIZED, mode=_Mode.NORMAL),
    "no eviction": Shape(strategy=_Score.NO_EVICTION, mode=_Mode.TRUNCATED_NORMAL),
    "growth": Shape(capacity=2048, start=16, width=16, spread=2000, kind=_Kind.ADAM),
    "half": Shape(
        dtype=torch.float16,
        output=torch.float16,
        kind=_Kind.ADAM,
        mode=_Mode.NORMAL,
        args=_PLAIN,
    ),
    "bfloat": Shape(dtype=torch.bfloat16, output=torch.float32, kind=_Kind.ADAM, args=_PLAIN),
    "half at random": Shape(dtype=torch.float16, output=torch.float32, kind=_Kind.ADAGRAD),
    "bfloat at random": Shape(
        dims=(40,), dtype=torch.bfloat16, output=torch.bfloat16, kind=_Kind.SGD, pooling=_SUM
    ),
    "clipped": Shape(
        kind=_Kind.SGD, args=OptimizerArgs(gradient_clipping=True, max_gradient=0.5, maximize=True)
    ),
    "decay": Shape(kind=_Kind.ADAM, args=OptimizerArgs(weight_decay=0.1)),
    "beta1 of 0": Shape(kind=_Kind.ADAM, args=OptimizerArgs(beta1=0.0)),
    "small beta1": Shape(
        dims=(8, 8),
        kind=_Kind.ADAM,
        args=OptimizerArgs(beta1=0.3, weight_decay=0.1, weight_decay_mode=1),
    ),
    "small beta1, rowwise": Shape(
        kind=_Kind.PARTIAL_ROWWISE_ADAM, args=OptimizerArgs(beta1=0.5, weight_decay=0.1)
    ),
    "dampening": Shape(kind=_Kind.MOMENTUM, args=OptimizerArgs(momentum=0.7, dampening=0.3)),
    "l2": Shape(kind=_Kind.SGD, args=OptimizerArgs(weight_decay=0.1, weight_decay_mode=1)),
    "nesterov": Shape(kind=_Kind.MOMENTUM, args=OptimizerArgs(nesterov=True)),
    "rowwise, 64": Shape(dims=(64,), kind=_Kind.ROWWISE_ADAGRAD),
    "rowwise, 128": Shape(dims=(100,), kind=_Kind.PARTIAL_ROWWISE_ADAM),
    "hot ids": Shape(ids=900, spread=12, bag=9, pooling=_SUM, kind=_Kind.SGD),
    "wide buckets": Shape(width=2048, capacity=4096, ids=200, spread=9000, skew=0.0),
    "middle buckets": Shape(width=48, capacity=480, ids=120, spread=900, skew=0.0),
}
