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
from dynamicemb.managed_collision.module import ManagedCollisionModule
from dynamicemb.nn import averaging


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
            embedding: Any = module._embedding_module
            handles.append(embedding.register_forward_pre_hook(_ResetEvicted(module, steps)))
    if not handles:
        raise UsageError(
            "the model has no ManagedCollisionEmbeddingCollection or "
            "ManagedCollisionEmbeddingBagCollection that is not sharded"
        )
    return handles


class _ResetEvicted:
    """Before a lookup: the rows of evicted ids start anew. A copied collection has its own, without
    the optimizers, which belong to the original."""

    def __init__(self, collection: nn.Module, optimizers: list[Any]) -> None:
        self._collection, self._optimizers = collection, optimizers

    @torch.no_grad()
    def __call__(self, module: nn.Module, inputs: object) -> None:
        managed: Any = self._collection._managed_collision_collection
        configs = {one.name: one for one in managed.embedding_configs()}
        for name, slots in managed.evict().items():
            if slots is None or len(slots) == 0:
                continue
            weight = _weight(self._collection, name)
            # Through .data: a graph of an earlier batch that waits for its backward stays valid.
            weight.data[slots] = fresh_rows(configs[name], len(slots), weight)
            applied = getattr(weight, "_in_backward_optimizers", [])
            for optimizer in (*self._optimizers, *applied):
                _reset_state(optimizer, weight, slots)

    def __getstate__(self) -> dict[str, Any]:
        return {"_collection": self._collection, "_optimizers": []}


def _weight(collection: Any, table: str) -> Any:
    embedding = collection._embedding_module
    bags = isinstance(embedding, EmbeddingBagCollection)
    return (embedding.embedding_bags if bags else embedding.embeddings)[table].weight


def _follow_average(averaged: nn.Module, model: nn.Module) -> None:
    """After a model was averaged: its ids have the slots that they have in the model. A row of a
    slot whose id is another one now is the model's."""
    moved = {
        mine: mine.follow(theirs)
        for mine, theirs in zip(_maps(averaged), _maps(model), strict=True)
    }
    for one, other in zip(_collections(averaged), _collections(model), strict=True):
        for table, module in one._managed_collision_collection._managed_collision_modules.items():
            if module in moved:
                mine, theirs = _weight(one, table), _weight(other, table)
                with torch.no_grad():
                    slots = moved[module].to(mine.device)
                    mine[slots] = theirs[slots.to(theirs.device)].to(mine.device)


def _maps(model: nn.Module) -> list[ManagedCollisionModule]:
    return [one for one in model.modules() if isinstance(one, ManagedCollisionModule)]


def _collections(model: nn.Module) -> list[Any]:
    kind = BaseManagedCollisionEmbeddingCollection
    return [one for one in model.modules() if isinstance(one, kind)]


averaging.followers.append(_follow_average)


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
