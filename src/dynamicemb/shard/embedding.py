"""``EmbeddingCollection`` with dynamic tables, sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.shard.collection import DynamicCollection, with_signed_ids
from dynamicemb.shard.dedup import dedup
from dynamicemb.shard.sharding import RwSequenceDynamicEmbeddingSharding
from dynamicemb.shard.tables import is_dynamic_info


class DynamicEmbeddingCollectionContext(EmbeddingCollectionContext):  # type: ignore[misc]
    """TorchRec's context of one batch, with the counts of the ids that were sent.

    frequency_counters: for each sharding, int64 [distinct ids]; ``None`` without index dedup or
        where no table reads counts.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)  # a dataclass in some versions of TorchRec alone
        self.frequency_counters: list[torch.Tensor | None] = []

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        for counts in self.frequency_counters:
            if counts is not None:
                counts.record_stream(stream)  # type: ignore[arg-type]


class ShardedDynamicEmbeddingCollection(DynamicCollection, ShardedEmbeddingCollection):  # type: ignore[misc]
    """TorchRec's sharded collection; tables that the plan made dynamic are ours.

    Dynamic tables are sharded by id (``dist_type``) over all ranks and keep every id as it is.
    With ``use_index_dedup`` an id of a table travels once per batch and rank, with its count where
    a table reads it; with one rank it changes nothing. Tables that are not dynamic are TorchRec's.
    """

    _weight_name = "embeddings.{}.weight"
    _sharding_type_to_sharding: dict[str, Any]
    _env: ShardingEnv

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if is_dynamic_info(sharding_infos[0]):
            return RwSequenceDynamicEmbeddingSharding(
                sharding_infos, env, device, qcomm_codecs_registry
            )
        return super().create_embedding_sharding(
            sharding_type, sharding_infos, env, device, qcomm_codecs_registry
        )

    def _create_lookups(self) -> None:
        if self._env.world_size == 1:  # nothing travels
            self._use_index_dedup = False
        if self._use_index_dedup:
            for sharding in self._sharding_type_to_sharding.values():
                if isinstance(sharding, RwSequenceDynamicEmbeddingSharding):
                    sharding.count_ids()
        super()._create_lookups()

    def create_context(self) -> DynamicEmbeddingCollectionContext:
        return DynamicEmbeddingCollectionContext()

    def input_dist(
        self, ctx: DynamicEmbeddingCollectionContext, features: Any
    ) -> Awaitable[Awaitable[KJTList]]:
        return super().input_dist(ctx, with_signed_ids(features))

    def _dedup_indices(
        self,
        ctx: DynamicEmbeddingCollectionContext,
        input_feature_splits: list[KeyedJaggedTensor],
    ) -> list[KeyedJaggedTensor]:
        """Every id of a table once. (TorchRec's own needs small ids, and a GPU.)"""
        result = []
        shardings = self._sharding_type_to_sharding.values()
        for sharding, features in zip(shardings, input_feature_splits, strict=True):
            counted = getattr(sharding, "counted", False)
            tables = [table.num_features() for table in sharding.embedding_tables()]
            sent, distinct = dedup(features, tables, counted=counted)
            ctx.input_features.append(features)
            ctx.reverse_indices.append(distinct.places)
            ctx.frequency_counters.append(distinct.counts if counted else None)
            result.append(sent)
        return result


class DynamicEmbeddingCollectionSharder(EmbeddingCollectionSharder):  # type: ignore[misc]
    """Shards an ``EmbeddingCollection`` whose plan may have dynamic tables.

    Used like TorchRec's: ``fused_params`` holds the optimizer of the tables, ``use_index_dedup``
    sends each id once.
    """

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingCollection:
        return ShardedDynamicEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedDynamicEmbeddingCollection
