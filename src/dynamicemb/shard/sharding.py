"""Row-wise sharding by id: where ids go, and which tables wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import (
    EmbeddingShardingInfo,
    bucketize_kjt_before_all2all,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import (
    RwPooledEmbeddingSharding,
    RwSparseFeaturesDist,
)
from torchrec.distributed.types import Awaitable, QuantizedCommCodecs, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.errors import InvalidArgumentError
from dynamicemb.hashing import mix, unmix
from dynamicemb.routing import Routing
from dynamicemb.shard.kernel import DynamicEmbeddingKernel
from dynamicemb.shard.tables import TableShard, create_tables, shards_of


class DynamicFeaturesDist(RwSparseFeaturesDist):  # type: ignore[misc]
    """Sends every id to the rank of :class:`~dynamicemb.routing.Routing`, unchanged.

    ``routings`` has one for each feature, all of the same ``dist_type``. ``weighted``: weights
    travel along; otherwise they are dropped.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        routings: Sequence[Routing],
        *,
        device: torch.device | None,
        is_sequence: bool,
        weighted: bool,
    ) -> None:
        super().__init__(
            pg=pg,
            num_features=len(routings),
            # fbgemm's rule: id div block below block * ranks, else id mod ranks; block 0: always.
            feature_hash_sizes=[(one.block or 0) * one.world_size for one in routings],
            device=device,
            is_sequence=is_sequence,
            keep_original_indices=True,
        )
        self._hashed = routings[0].dist_type == "hash_roundrobin"
        self._weighted = weighted

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        features = self._prepared(sparse_features)
        self.unbucketize_permute_tensor = None
        if self._world_size == 1:
            return self._dist(features)
        if self._hashed:
            features = _with_ids(features, mix(features.values()))
        features, self.unbucketize_permute_tensor = bucketize_kjt_before_all2all(
            features,
            num_buckets=self._world_size,
            block_sizes=self._feature_block_sizes_tensor,
            output_permute=self._is_sequence,
            keep_original_indices=True,
        )
        if self._hashed:
            features = _with_ids(features, unmix(features.values()))
        return self._dist(features)

    def _prepared(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Tensors of one kind on every rank, whatever an empty batch has: ranks that disagree
        about element types or about weights wait for each other for ever."""
        ids = features.values().to(torch.int64)
        weights = features.weights_or_none()
        if not self._weighted:
            weights = None
        elif weights is None:
            if len(ids):
                raise InvalidArgumentError(
                    "features have no weights; a weighted collection needs a weight for every id"
                )
            weights = torch.empty(0, device=ids.device)
        elif weights.dtype is not torch.float64:  # counts are float64 by their bits
            weights = weights.to(torch.float32)
        lengths = features.lengths()
        if (
            ids is features.values()
            and weights is features.weights_or_none()
            and lengths.dtype is torch.int64
        ):
            return features
        return _copy(features, ids, weights, lengths.to(torch.int64))


def _with_ids(features: KeyedJaggedTensor, ids: torch.Tensor) -> KeyedJaggedTensor:
    return _copy(features, ids, features.weights_or_none(), features.lengths())


def _copy(
    features: KeyedJaggedTensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    lengths: torch.Tensor,
) -> KeyedJaggedTensor:
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids,
        weights=weights,
        lengths=lengths,
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
    )


class _ByRouting:
    """What the two shardings share. All tables have one ``dist_type``."""

    counted = False

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self._shards = shards_of(sharding_infos, env, device)
        super().__init__(  # type: ignore[call-arg]
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def count_ids(self) -> None:
        """Ids will come deduplicated: take counts along if a table reads them. Call it before the
        input distribution and the lookup are made."""
        self.counted = any(shard.reads_counts for shard in self._shards.values())

    def _input_dist(
        self, device: torch.device | None, *, is_sequence: bool, weighted: bool
    ) -> DynamicFeaturesDist:
        tables: Any = self.embedding_tables()  # type: ignore[attr-defined]
        return DynamicFeaturesDist(
            self._pg,  # type: ignore[attr-defined]
            [
                self._shards[table.name].routing
                for table in tables
                for _ in range(table.num_features())
            ],
            device=device if device is not None else self._device,  # type: ignore[attr-defined]
            is_sequence=is_sequence,
            weighted=weighted,
        )


class RwSequenceDynamicEmbeddingSharding(_ByRouting, RwSequenceEmbeddingSharding):  # type: ignore[misc]
    """Sequence embeddings, rows spread over ranks by id."""

    def create_input_dist(self, device: torch.device | None = None) -> DynamicFeaturesDist:
        return self._input_dist(device, is_sequence=True, weighted=self.counted)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> GroupedEmbeddingsLookup:
        return DynamicSequenceLookup(
            self._grouped_embedding_configs,
            self._shards,
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
            counted=self.counted,
        )


class RwPooledDynamicEmbeddingSharding(_ByRouting, RwPooledEmbeddingSharding):  # type: ignore[misc]
    """Pooled embeddings, rows spread over ranks by id."""

    def create_input_dist(self, device: torch.device | None = None) -> DynamicFeaturesDist:
        weighted = any(config.is_weighted for config in self._grouped_embedding_configs)
        return self._input_dist(device, is_sequence=False, weighted=weighted)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> GroupedPooledEmbeddingsLookup:
        return DynamicPooledLookup(
            self._grouped_embedding_configs,
            self._shards,
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )


class DynamicSequenceLookup(GroupedEmbeddingsLookup):  # type: ignore[misc]
    """The groups of dynamic tables of an ``EmbeddingCollection`` on one rank."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        shards: Mapping[str, TableShard],
        *,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None,
        counted: bool,
    ) -> None:
        self._shards = shards
        self._counted = counted
        super().__init__(grouped_configs=grouped_configs, pg=pg, device=device, env=env)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> DynamicEmbeddingKernel:
        tables = create_tables(config, self._shards, pooled=False, pg=pg, device=device)
        return DynamicEmbeddingKernel(config, tables, counted=self._counted)

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        groups = sparse_features.split(self._feature_splits)
        for kernel, features in zip(self._emb_modules, groups, strict=True):
            kernel.prefetch(features)


class DynamicPooledLookup(GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    """The groups of dynamic tables of an ``EmbeddingBagCollection`` on one rank."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        shards: Mapping[str, TableShard],
        *,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None,
    ) -> None:
        self._shards = shards
        super().__init__(
            grouped_configs=grouped_configs,
            device=device,
            pg=pg,
            sharding_type=ShardingType.ROW_WISE,
            env=env,
        )

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> DynamicEmbeddingKernel:
        tables = create_tables(config, self._shards, pooled=True, pg=pg, device=device)
        return DynamicEmbeddingKernel(config, tables)

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        groups = sparse_features.split(self._feature_splits)
        for kernel, features in zip(self._emb_modules, groups, strict=True):
            kernel.prefetch(features)

    def _forward_with_vbe_merging(
        self, features_by_group: list[KeyedJaggedTensor], device: torch.device
    ) -> torch.Tensor:
        """Groups whose features have batch sizes of their own: each has its output, joined here."""
        merged: torch.Tensor = self._merge_variable_batch_embeddings(
            self._forward(features_by_group), self._vbe_splits(features_by_group)
        )
        return merged
