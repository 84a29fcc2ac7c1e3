"""``EmbeddingBagCollection`` with dynamic tables, sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dynamicemb.shard.collection import DynamicCollection, with_signed_ids
from dynamicemb.shard.sharding import RwPooledDynamicEmbeddingSharding
from dynamicemb.shard.tables import is_dynamic_info


class ShardedDynamicEmbeddingBagCollection(DynamicCollection, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """TorchRec's sharded collection; tables that the plan made dynamic are ours.

    Dynamic tables are sharded by id (``dist_type``) over all ranks and keep every id as it is. A
    rank adds up its part of a bag; the parts are added over ranks, and MEAN divides by the length
    of the whole bag (with weights, by their sum), as TorchRec does for row-wise tables.
    """

    _weight_name = "embedding_bags.{}.weight"
    _embedding_bag_configs: list[Any]

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if is_dynamic_info(sharding_infos[0]):
            return RwPooledDynamicEmbeddingSharding(
                sharding_infos, env, device, qcomm_codecs_registry
            )
        return super().create_embedding_bag_sharding(
            sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
        )

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: Any
    ) -> Awaitable[Awaitable[KJTList]]:
        configs = self._embedding_bag_configs
        if self._has_uninitialized_input_dist:
            # It warns about ids past num_embeddings, which are none of a dynamic table's limits.
            dynamic = {table.name for module in self.dynamic_modules() for table in module.tables}
            self._embedding_bag_configs = [one for one in configs if one.name not in dynamic]
        try:
            return super().input_dist(ctx, with_signed_ids(features))
        finally:
            self._embedding_bag_configs = configs


class DynamicEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Shards an ``EmbeddingBagCollection`` whose plan may have dynamic tables; used like
    TorchRec's."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingBagCollection:
        return ShardedDynamicEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedDynamicEmbeddingBagCollection
