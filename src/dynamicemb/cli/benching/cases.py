"""The comparisons of ``dynamicemb bench``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dynamicemb.cli.benching.contenders import (
    Contender,
    EmbeddingBag,
    Forward,
    FunctionalEmbedding,
    NotInstalled,
    SparseEmbedding,
    Tbe,
    Train,
    build,
)
from dynamicemb.cli.benching.timing import Result, interleave
from dynamicemb.cli.benching.workload import Batch, Workload

OURS, TORCH, FBGEMM = "dynamicemb", "torch.nn", "FBGEMM TBE"
Factory = Callable[[Workload], Contender]


def _no_rowwise(_: Workload) -> Contender:
    raise NotInstalled("torch.optim has no row-wise Adagrad")


@dataclass(frozen=True)
class Case:
    """One line: what every contender does with a batch."""

    name: str
    contenders: dict[str, Factory]
    pooled: bool = False
    state: int = 0  # columns of optimizer state for each of a row


def _training(optimizer: str) -> dict[str, Factory]:
    return {
        OURS: lambda work: Train(build(work, optimizer=optimizer)),
        TORCH: _no_rowwise
        if optimizer == "rowwise_adagrad"
        else lambda work: SparseEmbedding(work, optimizer),
        FBGEMM: lambda work: Tbe(work, "sum", optimizer),  # bags of 1, its faster form
    }


CASES = (
    Case(
        "forward",
        {
            OURS: lambda work: Forward(build(work, optimizer="sgd")),
            TORCH: FunctionalEmbedding,
            FBGEMM: lambda work: Tbe(work, "sum"),
        },
    ),
    Case(
        "forward, pooled",
        {
            OURS: lambda work: Forward(build(work, pooling="sum", optimizer="sgd")),
            TORCH: EmbeddingBag,
            FBGEMM: lambda work: Tbe(work, "sum"),
        },
        pooled=True,
    ),
    Case("train, SGD", _training("sgd")),
    Case("train, row-wise Adagrad", _training("rowwise_adagrad")),
    Case("train, Adagrad", _training("adagrad"), state=1),
    Case("train, Adam", _training("adam"), state=2),
)


@dataclass(frozen=True)
class Measured:
    """Times of a case; ``missing`` says why a contender has none."""

    case: str
    device: str
    times: dict[str, Result]
    missing: dict[str, str]

    def ratio(self, peer: str) -> float | None:
        """Our time as a multiple of a peer's."""
        if peer not in self.times:
            return None
        return self.times[OURS].ms / self.times[peer].ms


def bytes_needed(case: Case, rows: int, dim: int) -> int:
    """Memory of all contenders of a case at once, about."""
    slots = 2 << (rows - 1).bit_length()
    return (slots + (len(case.contenders) - 1) * rows) * (4 * dim * (1 + case.state) + 32)


def measure(
    case: Case, work: Workload, batches: list[Batch], *, repeats: int, seconds: float
) -> Measured:
    """Build the contenders, let them take turns, and free them."""
    here: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for name, make in case.contenders.items():
        try:
            here[name] = make(work)
        except NotInstalled as error:
            missing[name] = str(error)
    times = interleave(
        {name: _call(one, batches) for name, one in here.items()},
        batches=len(batches),
        repeats=repeats,
        seconds=seconds,
    )
    for one in here.values():
        one.close()
    here.clear()
    gc.collect()
    return Measured(case.name, work.device.type, times, missing)


def _call(contender: Contender, batches: list[Batch]) -> Callable[[int], None]:
    on_gpu = batches[0].ids.device.type == "cuda"

    def call(i: int) -> None:
        contender.run(batches[i])
        if on_gpu:
            torch.cuda.synchronize()

    return call


def devices(wanted: str) -> Iterator[torch.device]:
    """``auto``: the CPU, and a GPU if there is one."""
    if wanted in ("auto", "cpu"):
        yield torch.device("cpu")
    if wanted != "cpu" and (wanted != "auto" or torch.cuda.is_available()):
        yield torch.device("cuda")
