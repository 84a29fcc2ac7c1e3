"""Managed collision collections over ranks, on the CPU too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder as TorchRecCollectionSharder,
)
from torchrec.distributed.mc_embedding import (
    ShardedManagedCollisionEmbeddingCollection as TorchRecShardedCollection,
)
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder as TorchRecBagCollectionSharder,
)
from torchrec.distributed.mc_embeddingbag import (
    ShardedManagedCollisionEmbeddingBagCollection as TorchRecShardedBagCollection,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from dynamicemb.managed_collision.rows import fresh_rows


class _ResetsRows:
    """``_evict`` with torch alone: fbgemm's kernel for it exists on GPUs only, and makes zeros of
    weights whatever the table's ``init_fn``."""

    _table_to_tbe_and_index: dict[str, tuple[Any, torch.Tensor]]
    _embedding_module: Any

    @torch.no_grad()
    def _evict(self, evictions_per_table: dict[str, torch.Tensor | None]) -> None:
        cached = {}
        for table, slots in evictions_per_table.items():
            if slots is None or len(slots) == 0:
                continue
            tbe, place = self._table_to_tbe_and_index[table]
            if getattr(tbe, "lxu_cache_weights", torch.empty(0, device="cpu")).numel():
                cached[table] = slots  # rows are in two places: fbgemm knows where
                continue
            at = int(place.item())
            weight = tbe.split_embedding_weights()[at].data
            slots = slots.to(weight.device)
            config = self._embedding_module._table_name_to_config[table]
            weight[slots] = fresh_rows(config, len(slots), weight)
            states = tbe.split_optimizer_states()
            for state in states[at] if at < len(states) else ():
                if state.dim() and len(state) == len(weight):
                    state.data[slots] = 0
        if cached:
            super()._evict(cached)  # type: ignore[misc]


class ShardedManagedCollisionEmbeddingCollection(_ResetsRows, TorchRecShardedCollection):  # type: ignore[misc]
    """TorchRec's; rows of evicted ids are re-initialised by ``init_fn``, on the CPU too."""


class ShardedManagedCollisionEmbeddingBagCollection(_ResetsRows, TorchRecShardedBagCollection):  # type: ignore[misc]
    """TorchRec's; rows of evicted ids are re-initialised by ``init_fn``, on the CPU too."""


class _OnAnyDevice:
    """What a planner may choose: row-wise tables with a fused optimizer, wherever they are."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        if compute_device_type == "cpu":
            return [EmbeddingComputeKernel.FUSED.value]
        kernels: list[str] = super().compute_kernels(sharding_type, compute_device_type)  # type: ignore[misc]
        return kernels


class ManagedCollisionEmbeddingCollectionSharder(_OnAnyDevice, TorchRecCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder, used like it, with what the CPU needs: a kernel that exists there, and
    rows that are reset."""

    def shard(
        self,
        module: ManagedCollisionEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionEmbeddingCollection:
        return ShardedManagedCollisionEmbeddingCollection(
            module,
            params,
            ec_sharder=self._e_sharder,
            mc_sharder=self._mc_sharder,
            env=env,
            device=device or torch.device("cuda"),
        )

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedManagedCollisionEmbeddingCollection


class ManagedCollisionEmbeddingBagCollectionSharder(_OnAnyDevice, TorchRecBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder, used like it. On the CPU TorchRec has no sharding type for these bags;
    this one has row-wise."""

    def shard(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionEmbeddingBagCollection:
        return ShardedManagedCollisionEmbeddingBagCollection(
            module,
            params,
            ebc_sharder=self._e_sharder,
            mc_sharder=self._mc_sharder,
            env=env,
            device=device or torch.device("cuda"),
        )

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedManagedCollisionEmbeddingBagCollection
