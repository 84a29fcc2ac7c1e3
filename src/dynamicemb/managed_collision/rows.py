"""Rows of slots that changed hands start anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from dynamicemb.errors import UsageError


def fresh_rows(config: Any, count: int, like: torch.Tensor) -> torch.Tensor:
    """``count`` rows as the table's ``init_fn`` makes them."""
    rows = torch.empty(count, like.shape[1], dtype=like.dtype, device=like.device)
    made = config.init_fn(rows)
    return rows if made is None else made


def reset_evicted_rows(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
) -> list[RemovableHandle]:
    """Let a slot's row start anew when its id goes, in collections that are not sharded.

    TorchRec leaves the vector of the old id to the new one. After this call, every lookup of a
    ``ManagedCollisionEmbeddingCollection`` or ``ManagedCollisionEmbeddingBagCollection`` in
    ``model`` first resets the rows of evicted ids: the weights by the table's ``init_fn``, and the
    state of ``optimizers`` (and of optimizers applied in backward) as it was before the first step.
    Works for any managed collision module whose ``evict`` names slots. Sharded collections reset
    their rows themselves.

    Returns handles whose ``remove()`` undoes it.

    Raises:
        UsageError: ``model`` has no such collection.
    """
    steps = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
    handles = []
    for module in model.modules():
        if isinstance(module, BaseManagedCollisionEmbeddingCollection):
            handles.append(_hook(module, steps))
    if not handles:
        raise UsageError(
            "the model has no ManagedCollisionEmbeddingCollection or "
            "ManagedCollisionEmbeddingBagCollection that is not sharded"
        )
    return handles


def _hook(collection: nn.Module, optimizers: list[Any]) -> RemovableHandle:
    embedding: Any = collection._embedding_module
    managed: Any = collection._managed_collision_collection
    bags = isinstance(embedding, EmbeddingBagCollection)
    tables = embedding.embedding_bags if bags else embedding.embeddings
    configs = {one.name: one for one in managed.embedding_configs()}

    @torch.no_grad()
    def reset(module: nn.Module, inputs: object) -> None:
        for name, slots in managed.evict().items():
            if slots is None or len(slots) == 0:
                continue
            weight = tables[name].weight
            # Through .data: a graph of an earlier batch that waits for its backward stays valid.
            weight.data[slots] = fresh_rows(configs[name], len(slots), weight)
            applied = getattr(weight, "_in_backward_optimizers", [])
            for optimizer in (*optimizers, *applied):
                _reset_state(optimizer, weight, slots)

    handle: RemovableHandle = embedding.register_forward_pre_hook(reset)
    return handle


def _reset_state(optimizer: Any, weight: torch.Tensor, slots: torch.Tensor) -> None:
    state = optimizer.state.get(weight)
    if not state:
        return
    initial = 0.0
    for group in optimizer.param_groups:
        if any(one is weight for one in group["params"]):
            initial = group.get("initial_accumulator_value", 0.0)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == len(weight):
            value[slots] = initial if name == "sum" else 0.0
