"""The baseline: static tables of the same memory, ids hashed to their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor

from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.static import replace_collections, static_bags

_ODD = -7046029254386353131  # a bijection of the 64-bit integers when multiplied


def hashed_rows(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """The row of every id in a hashed table of ``rows`` rows."""
    mixed = ids * _ODD
    return (mixed ^ (mixed >> 32)) % rows


class HashedCollection(nn.Module):
    """Takes the place of an ``EmbeddingBagCollection``: the same tables with ids hashed to rows."""

    def __init__(
        self, collection: EmbeddingBagCollection, *, std: float, device: torch.device
    ) -> None:
        super().__init__()
        self.collection = static_bags(collection, std=std, device=device)
        self._rows = [
            (feature, one.num_embeddings)
            for one in collection.embedding_bag_configs()
            for feature in one.feature_names
        ]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        sizes = features.length_per_key()
        by_key = dict(zip(features.keys(), features.values().split(sizes), strict=True))
        lengths = features.lengths().view(len(sizes), -1)
        order = [features.keys().index(feature) for feature, _ in self._rows]
        hashed = KeyedJaggedTensor(
            keys=[feature for feature, _ in self._rows],
            values=torch.cat([hashed_rows(by_key[name], rows) for name, rows in self._rows]),
            lengths=lengths[order].reshape(-1),
        )
        return self.collection(hashed)


def make_hashed(
    model: nn.Module, options: TrainOptions, device: torch.device
) -> list[nn.Parameter]:
    """Replace the collections of ``model`` by hashed ones; returns their rows."""
    return replace_collections(
        model, partial(HashedCollection, std=options.init_std, device=device)
    )


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum per row, for sparse gradients; torch has none."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state = self.state[parameter]
                if not state:
                    state["sum"] = parameter.new_zeros(parameter.shape[0])
                sums = state["sum"]
                sums[rows] += values.square().mean(1)
                scale = group["lr"] / (sums[rows].sqrt() + group["eps"])
                parameter[rows] -= scale.unsqueeze(1) * values


SPARSE_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.SparseAdam,
}
