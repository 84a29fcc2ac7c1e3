"""The model on several ranks: tables spread by id, dense layers on each, by TorchRec's DMP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType as FbgemmOptimType
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dynamicemb.cli.training.batch import Schema
from dynamicemb.cli.training.hashed import make_hashed
from dynamicemb.cli.training.learner import Learner, new_model, static_tables
from dynamicemb.cli.training.measured import Measured, MeasuredDynamic
from dynamicemb.cli.training.models import ClickModel
from dynamicemb.cli.training.options import DYNAMIC, ZCH, TrainOptions
from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.cli.training.tables import OPTIMIZERS, stored_options, tables_of
from dynamicemb.cli.training.zch import make_zch
from dynamicemb.managed_collision import ManagedCollisionEmbeddingBagCollectionSharder
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

CPU, META = torch.device("cpu"), torch.device("meta")


class ShardedLearner(Learner):
    """A model that DMP has sharded."""

    spread = True

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(in_backward_optimizer_filter(self.model.named_parameters()))

    def own_state(self) -> dict[str, Any]:
        parts = [
            {
                "rows": [one.detach().clone() for one in tables.split_embedding_weights()],
                "states": [list(some) for some in tables.split_optimizer_states()],
            }
            for tables in self._static_parts()
        ]
        return {**super().own_state(), "parts": parts} if parts else {}

    @torch.no_grad()
    def restore_own(self, state: dict[str, Any]) -> None:
        super().restore_own(state)
        for tables, saved in zip(self._static_parts(), state.get("parts", ()), strict=True):
            for rows, value in zip(tables.split_embedding_weights(), saved["rows"], strict=True):
                rows.data.copy_(value)
            states = zip(tables.split_optimizer_states(), saved["states"], strict=True)
            for numbers, values in states:
                for number, value in zip(numbers, values, strict=True):
                    number.copy_(value)

    def _static_parts(self) -> list[Any]:
        """fbgemm's modules with this rank's rows of static tables, which TorchRec keeps in lists
        that are no children of its modules."""
        lookups = [one for module in self.model.modules() for one in _lookups_of(module)]
        every = [one for lookup in lookups for one in lookup.modules()]
        return [one for one in every if hasattr(one, "split_optimizer_states")]


def _lookups_of(module: nn.Module) -> list[nn.Module]:
    return list(getattr(module, "_lookups", ()))


def sharded_learner(
    kind: str, options: TrainOptions, schema: Schema, ranks: Ranks, start: dict[str, int]
) -> Learner:
    """A model whose tables are spread over the ranks, which have equal shares of the memory."""
    model = new_model(kind, options, schema)
    if kind == DYNAMIC:
        plan, sharder = _dynamic_plan(model, options, schema, ranks.size, start)
    elif kind == ZCH:
        plan, sharder = _zch_plan(model, options, ranks.size)
    else:
        plan, sharder = _hashed_plan(model, options, ranks.size)
    # The seed of new rows; those of static tables differ from rank to rank.
    torch.manual_seed(options.seed if kind == DYNAMIC else options.seed + ranks.rank)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    tables: list[Measured]
    if kind == DYNAMIC:
        tables = [MeasuredDynamic(one) for one in tables_of(sharded)]
    else:
        tables = static_tables(kind, sharded, options, schema, first=ranks.first)
    learner = ShardedLearner(sharded, schema, tables)
    dense = list(learner.parameters().values())
    learner.optimizers.append(torch.optim.Adam(dense, lr=options.dense_lr))
    return learner


def _dynamic_plan(
    model: ClickModel, options: TrainOptions, schema: Schema, size: int, start: dict[str, int]
) -> tuple[ShardingPlan, Any]:
    configs = [
        config
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection)
        for config in module.embedding_bag_configs()
    ]
    constraints = {
        name: DynamicEmbParameterConstraints(
            use_dynamicemb=True, dynamicemb_options=stored_options(options, name, start.get(name))
        )
        for name in schema.tables
    }
    topology = Topology(world_size=size, local_world_size=size, compute_device="cpu")
    planner = DynamicEmbeddingShardingPlanner(
        eb_configs=configs,
        topology=topology,
        constraints=constraints,
        enumerator=DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
    )
    fused = {"optimizer": OPTIMIZERS[options.optimizer], "learning_rate": options.lr}
    sharder = DynamicEmbeddingBagCollectionSharder(fused_params=fused)
    return planner.collective_plan(model, [sharder], dist.GroupMember.WORLD), sharder


def _fused(options: TrainOptions) -> dict[str, Any]:
    name = OPTIMIZERS[options.optimizer]
    kind = FbgemmOptimType("exact_sgd" if name == "sgd" else name)
    return {"optimizer": kind, "learning_rate": options.lr}


def _zch_plan(model: ClickModel, options: TrainOptions, size: int) -> tuple[ShardingPlan, Any]:
    make_zch(model, options, META)
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(fused_params=_fused(options))
    topology = Topology(world_size=size, local_world_size=size, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology)
    return planner.collective_plan(model, [sharder], dist.GroupMember.WORLD), sharder


def _hashed_plan(model: ClickModel, options: TrainOptions, size: int) -> tuple[ShardingPlan, Any]:
    make_hashed(model, options, META)
    sharder = EmbeddingBagCollectionSharder(fused_params=_fused(options))
    plans = {
        path: construct_module_sharding_plan(
            module,
            per_param_sharding={
                one.name: row_wise(compute_kernel="fused") for one in module.embedding_bag_configs()
            },
            sharder=sharder,
            local_size=size,
            world_size=size,
            device_type="cpu",
        )
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection)
    }
    return ShardingPlan(plans), sharder
