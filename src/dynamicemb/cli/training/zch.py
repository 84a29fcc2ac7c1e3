"""Tables with managed collision: TorchRec's collections, ids mapped to rows by our index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
)

from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.static import replace_collections, static_bags
from dynamicemb.cli.training.tables import full_bytes, row_bytes
from dynamicemb.managed_collision import ManagedCollisionModule
from dynamicemb.table.slot_map import SlotMapState

#: Score of a dynamic table -> the policy that is nearest to it.
POLICIES: Mapping[str, Callable[[], object]] = {
    "step": LRU_EvictionPolicy,
    "timestamp": LRU_EvictionPolicy,
    "lfu": LFU_EvictionPolicy,
    "timestamp_lfu": DistanceLFU_EvictionPolicy,
}


class CountingModule(ManagedCollisionModule):
    """Counts what the statistics of a dynamic table count: distinct ids of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = ("hits", "misses", "inserts", "evictions", "failures", "rejections")
        self.counts: dict[str, int] = dict.fromkeys(names, 0)

    def _insert(self, ids: torch.Tensor, counts: torch.Tensor | None = None) -> Any:
        mapped = super()._insert(ids, counts)
        new = len(mapped.inserted) + mapped.refused
        self.counts["hits"] += len(torch.unique(ids)) - new
        self.counts["misses"] += new
        self.counts["inserts"] += len(mapped.inserted)
        self.counts["evictions"] += len(mapped.evicted)
        self.counts["failures"] += mapped.refused
        return mapped

    @property
    def bytes(self) -> int:
        """Memory of the map and of the buffers."""
        buffers = (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping)
        more = [getattr(self, name) for name in self._metadata()]
        return self.slot_map.bytes + sum(8 * len(one) for one in (*buffers, *more))

    def map_state(self) -> dict[str, Any]:
        """What :meth:`restore_map` takes."""
        return vars(self.slot_map.state())

    def restore_map(self, state: Mapping[str, Any]) -> None:
        self.slot_map.restore(SlotMapState(**state))


class ZchCollection(nn.Module):
    """Takes the place of an ``EmbeddingBagCollection``: the same tables, ids mapped to rows."""

    def __init__(
        self, collection: EmbeddingBagCollection, *, score: str, std: float, device: torch.device
    ) -> None:
        super().__init__()
        bags = static_bags(collection, std=std, device=device)
        configs = bags.embedding_bag_configs()
        modules = {
            one.name: CountingModule(one.num_embeddings, device, POLICIES[score](), name=one.name)
            for one in configs
        }
        self.collection = ManagedCollisionEmbeddingBagCollection(
            bags, ManagedCollisionCollection(modules, configs)
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled, _ = self.collection(features)
        return pooled


def make_zch(model: nn.Module, options: TrainOptions, device: torch.device) -> list[nn.Parameter]:
    """Replace the collections of ``model``; returns the rows of the new ones."""
    make = partial(ZchCollection, score=options.score, std=options.init_std, device=device)
    return replace_collections(model, make)


def zch_modules(model: nn.Module) -> dict[str, CountingModule]:
    """The managed collision modules by their tables, sharded or not."""
    return {
        str(module._name): module
        for module in model.modules()
        if isinstance(module, CountingModule)
    }


def zch_capacity(options: TrainOptions) -> int:
    """Rows of a table with managed collision that has as many bytes as a full dynamic one, map and
    buffers included."""

    def needed(rows: int) -> int:
        module = CountingModule(rows, torch.device("cpu"), POLICIES[options.score]())
        return module.bytes + rows * row_bytes(options)

    budget = full_bytes(options)
    low, high = 2, max(3, budget // row_bytes(options))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= budget else (low, middle)
    return low
