"""Sharding options of a model in which some tables are dynamic."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardEstimator, ShardingOption, Storage, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, dtype_to_data_type

from dynamicemb.capacity import counter_bytes
from dynamicemb.optimizers import Optimizer
from dynamicemb.planner.constraints import (
    DynamicEmbParameterConstraints,
    complete_options,
    is_dynamic,
)
from dynamicemb.tiers.layout import memory_of


class DynamicEmbeddingEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """TorchRec's enumerator; a dynamic table has one option, row-wise over all ranks.

    Args:
        topology, batch_size, constraints, estimator, use_exact_enumerate_order: as in TorchRec.
        charge_memory: count the memory of a full dynamic table (index, rows, optimizer state of the
            sharder's optimizer) against the topology, beside the buffers of its inputs and outputs.
            Of a table with ``caching`` or ``external_storage``: the cache, and all rows if they are
            in main memory.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = BATCH_SIZE,
        constraints: Mapping[str, DynamicEmbParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
        *,
        charge_memory: bool = True,
    ) -> None:
        super().__init__(
            topology=topology,
            batch_size=BATCH_SIZE if batch_size is None else batch_size,
            constraints=None if constraints is None else dict(constraints),
            estimator=estimator,
            use_exact_enumerate_order=use_exact_enumerate_order,
        )
        self._charge_memory = charge_memory

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        if is_dynamic(self._constraints, name):
            return [ShardingType.ROW_WISE.value]
        types: list[str] = super()._filter_sharding_types(name, allowed_sharding_types, sharder_key)
        return types

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        if is_dynamic(self._constraints, name):
            # Estimators know no customised kernel; the plan gets it afterwards.
            return [EmbeddingComputeKernel.FUSED.value]
        kernels: list[str] = super()._filter_compute_kernels(
            name, allowed_compute_kernels, sharding_type
        )
        return kernels

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        dynamic = [one for one in sharding_options if is_dynamic(self._constraints, one.name)]
        for option in dynamic:
            for shard in option.shards:  # estimators must not charge num_embeddings rows
                shard.size = [1, option.tensor.shape[1]]
        super().populate_estimates(sharding_options)
        if not self._charge_memory:
            return
        for option in dynamic:
            needed = self._storage(option)
            for shard in option.shards:
                shard.storage = shard.storage + needed

    def _storage(self, option: ShardingOption) -> Storage:
        """Memory of a dynamic table on one rank."""
        constraint = self._constraints[option.name]
        rows, dim = option.tensor.shape
        data_type = dtype_to_data_type(option.tensor.dtype)
        config = BaseEmbeddingConfig(rows, dim, name=option.name, data_type=data_type)
        options = complete_options(config, constraint.dynamicemb_options, self._world_size)
        optimizer = Optimizer.from_emb_optim_type(self._optimizer_type(option))
        on_device, below = memory_of(options, optimizer, self._compute_device)
        if options.admission_counter is not None:
            on_device += counter_bytes(options.admission_counter)
        if self._compute_device == "cpu":
            return Storage(hbm=0, ddr=on_device + below)
        return Storage(hbm=on_device, ddr=below)

    def _optimizer_type(self, option: ShardingOption) -> object:
        classes = getattr(option.tensor, "_optimizer_classes", None)
        if classes:
            return optimizer_type_to_emb_opt_type(classes[0])
        sharder = self._sharder_map.get(sharder_name(type(option.module[1])))
        fused_params = getattr(sharder, "fused_params", None) or {}
        return fused_params.get("optimizer", "sgd")
