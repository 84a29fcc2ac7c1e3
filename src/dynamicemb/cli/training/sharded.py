"""The model on several ranks: tables spread by id, dense layers on each, by TorchRec's DMP."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dynamicemb.cli.training.batch import Schema
from dynamicemb.cli.training.learner import Learner
from dynamicemb.cli.training.models import ClickModel
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.tables import OPTIMIZERS, table_options
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder


class ShardedLearner(Learner):
    """A model that DMP has sharded."""

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(in_backward_optimizer_filter(self.model.named_parameters()))


def sharded_learner(
    options: TrainOptions, schema: Schema, size: int, start: dict[str, int]
) -> Learner:
    """The model with dynamic tables, each rank with its share of the capacity."""
    torch.manual_seed(options.seed)
    rows = dict.fromkeys(schema.tables, options.capacity)
    model = ClickModel(options.model, schema, options.dim, rows)
    configs = [
        config
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection)
        for config in module.embedding_bag_configs()
    ]
    share = replace(options, capacity=-(-options.capacity // size))
    constraints = {
        name: DynamicEmbParameterConstraints(
            use_dynamicemb=True, dynamicemb_options=table_options(share, start.get(name))
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
    sharders = [DynamicEmbeddingBagCollectionSharder(fused_params=fused)]
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    torch.manual_seed(options.seed)  # the seed of new rows
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    learner = ShardedLearner(sharded, schema)
    dense = list(learner.parameters().values())
    learner.optimizers.append(torch.optim.Adam(dense, lr=options.dense_lr))
    return learner
