"""Models for TorchRec's train pipelines, on static tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from static_models import build
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    label: torch.Tensor
    kjt1: KeyedJaggedTensor
    kjt2: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(*(one.to(device) for one in (self.label, self.kjt1, self.kjt2)))

    def record_stream(self, stream: Any) -> None:
        for one in (self.label, self.kjt1, self.kjt2):
            one.record_stream(stream)


def as_batches(loader: Iterable[Any]) -> Iterator[Batch]:
    return (Batch(*one) for one in loader)


class Piped(nn.Module):
    """The model with its loss, called with a batch."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        super().__init__()
        self.emb1, self.emb2 = model.emb1, model.emb2
        self.bags = kind == "bags"

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out1, out2 = self.emb1(batch.kjt1), self.emb2(batch.kjt2)
        loss = loss_of(out1, out2, batch.label, self.bags)
        return loss, loss.detach()


def loss_of(out1: Any, out2: Any, label: torch.Tensor, bags: bool) -> torch.Tensor:
    if bags:
        parts = [out1.values(), out2.values()]
    else:
        parts = [one.values() for out in (out1, out2) for one in out.values()]
    flat = torch.cat([part.reshape(-1) for part in parts])
    return ((flat - torch.sin(label + torch.arange(len(flat), device=label.device))) ** 2).sum()


torch.fx.wrap("loss_of")


def model_of(kind: str, slots: int, device: str = "cpu") -> Any:
    return build(
        kind,
        slots,
        EmbOptimType.EXACT_ADAGRAD,
        device=device,
        wrapped_by=lambda model: Piped(kind, model),
    )


def trained(pipeline: Any, loader: Iterable[Any]) -> list[float]:
    stream, losses = as_batches(loader), []
    while True:
        try:
            losses.append(pipeline.progress(stream).item())
        except StopIteration:
            return losses


def most_distinct(batches: list[Any], window: int) -> int:
    """The most distinct ids of a table in so many batches after each other, rounded up to 4."""
    ids = [
        [torch.cat([kjt1["f"].values(), kjt1["g"].values()]), kjt1["h"].values(), kjt2.values()]
        for _, kjt1, kjt2 in batches
    ]
    counts = [
        len(torch.unique(torch.cat([one[table] for one in ids[at : at + window]])))
        for at in range(len(ids))
        for table in range(3)
    ]
    return -(-max(counts) // 4) * 4
