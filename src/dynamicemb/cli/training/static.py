"""What the two kinds of static tables share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection


def static_bags(
    collection: EmbeddingBagCollection, *, std: float, device: torch.device
) -> EmbeddingBagCollection:
    """The same tables on a device; their rows start normally distributed."""
    fill = partial(nn.init.normal_, std=std)
    configs = [replace(one, init_fn=fill) for one in collection.embedding_bag_configs()]
    bags: Any = EmbeddingBagCollection(tables=configs, device=device)
    for bag in bags.embedding_bags.values():
        bag.sparse = True  # gradients of the rows of a batch, as dynamic tables have them
        if device.type != "meta":
            fill(bag.weight)
    return bags


def replace_collections(
    model: nn.Module, make: Callable[[EmbeddingBagCollection], nn.Module]
) -> list[nn.Parameter]:
    """Put ``make(collection)`` in the place of every collection of ``model``; returns the
    parameters of what was put there."""
    parameters: list[nn.Parameter] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, EmbeddingBagCollection):
            made = make(module)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made)
            parameters.extend(made.parameters())
    return parameters
