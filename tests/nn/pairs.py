"""A dynamic module beside the torch module it must equal, and the small models they train in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dynamicemb import (
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbTableOptions,
)

#: Ids that no ``nn.Embedding`` could have, one per row of it.
FAR = 0x0123_4567_89AB_CDEF


def wild(places: torch.Tensor) -> torch.Tensor:
    """Distinct 64-bit ids for the rows 0, 1, 2, ...: negative, huge, not in order."""
    return places * -FAR - 4


def constant(value: float) -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=value)


def table_options(dim: int = 4, **changes: Any) -> DynamicEmbTableOptions:
    """A small table whose new rows are 1.0."""
    fields: dict[str, Any] = {
        "dim": dim,
        "max_capacity": 1024,
        "initializer_args": constant(1.0),
    }
    return DynamicEmbTableOptions(**(fields | changes))


def fill(module: Any, weight: torch.Tensor) -> None:
    """Give the ids ``wild(0), wild(1), ...`` the rows of ``weight``."""
    ids = wild(torch.arange(len(weight)))
    written = module.table.insert(ids, weight.detach().to(module.table.dtype)).written
    assert written.all()


def rows_of(module: Any, count: int) -> torch.Tensor:
    """The rows of ``wild(0 .. count - 1)``, which are all there."""
    found = module.table.find(wild(torch.arange(count)))
    assert found.found.all()
    return found.embeddings


def embedding_pair(rows: int, dim: int, **arguments: Any) -> tuple[DynamicEmbedding, nn.Embedding]:
    dense = nn.Embedding(rows, dim)
    ours = DynamicEmbedding(dim, **arguments)
    fill(ours, dense.weight)
    return ours, dense


def bag_pair(
    rows: int, dim: int, *, mode: str = "sum", include_last_offset: bool = False, **arguments: Any
) -> tuple[DynamicEmbeddingBag, nn.EmbeddingBag]:
    dense = nn.EmbeddingBag(rows, dim, mode=mode, include_last_offset=include_last_offset)
    ours = DynamicEmbeddingBag(dim, mode=mode, include_last_offset=include_last_offset, **arguments)
    fill(ours, dense.weight)
    return ours, dense


def train(
    lookup: Callable[[torch.Tensor], torch.Tensor],
    head: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[float]:
    """Losses of a regression on ``head(lookup(ids))``, one optimizer step per batch."""
    optimizers = list(optimizers)
    losses = []
    for ids, target in batches:
        loss = nn.functional.mse_loss(head(lookup(ids)).squeeze(-1), target)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses
