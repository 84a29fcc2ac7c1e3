"""The same small models, static and dynamic, sharded over the ranks of a test."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)
from dynamicemb.table import Table

ROWS = 64
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.3}
#: Table -> its features. "shared" is a feature of two tables.
FEATURES = {"users": ["user", "friend", "shared"], "goods": ["item", "shared"]}
DIMS = {"users": 8, "goods": 12}
KEYS = ["item", "user", "shared", "friend"]
CPU = torch.device("cpu")


def configs(bags: bool, pooling: Mapping[str, PoolingType] | None = None) -> list[Any]:
    """The tables of the test model; a sequence has one dim for all."""
    if not bags:
        return [
            EmbeddingConfig(num_embeddings=ROWS, embedding_dim=8, name=name, feature_names=features)
            for name, features in FEATURES.items()
        ]
    return [
        EmbeddingBagConfig(
            num_embeddings=ROWS,
            embedding_dim=DIMS[name],
            name=name,
            feature_names=features,
            pooling=(pooling or {}).get(name, PoolingType.SUM),
        )
        for name, features in FEATURES.items()
    ]


class Net(nn.Module):
    """A collection and a loss that weighs every output element differently."""

    def __init__(self, tables: list[Any], *, weighted: bool = False, device: str = "meta") -> None:
        super().__init__()
        self.bags = isinstance(tables[0], EmbeddingBagConfig)
        if self.bags:
            self.collection: nn.Module = EmbeddingBagCollection(
                tables=tables, device=torch.device(device), is_weighted=weighted
            )
        else:
            self.collection = EmbeddingCollection(tables=tables, device=torch.device(device))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return loss_of(self.collection(features), features, self.bags)


def loss_of(out: Any, features: KeyedJaggedTensor, bags: bool) -> torch.Tensor:
    """The loss of a collection's output."""
    examples = features.stride()
    if features.variable_stride_per_key():
        examples = features.inverse_indices()[1].shape[1]
    parts = [(key, out[key]) for key in sorted(out.keys())]
    if not bags:
        parts = [(key, _summed(jagged, examples)) for key, jagged in parts]
    return example_loss(parts, examples)


torch.fx.wrap("loss_of")  # train pipelines trace a model


def _summed(jagged: JaggedTensor, examples: int) -> torch.Tensor:
    """The rows of each example added up."""
    owner = torch.repeat_interleave(torch.arange(examples), jagged.lengths())
    empty = torch.zeros(examples, jagged.values().shape[1])
    return empty.index_add(0, owner, jagged.values())


def example_loss(parts: list[tuple[str, torch.Tensor]], batch: int) -> torch.Tensor:
    """Mean over the examples of a loss whose gradient differs by key and column."""
    total = torch.zeros(batch)
    for number, (_, values) in enumerate(parts):
        scale = torch.linspace(0.5, 1.5, values.shape[1]) * (number + 1)
        total = total + (values * scale - 0.3).square().mean(1)
    return total.sum() / max(batch, 1)


def batch(
    step: int, size: int, *, longest: int = 4, weighted: bool = False, high: int = ROWS
) -> KeyedJaggedTensor:
    """The global batch of a step: ids below ``high``, bags of 0 to ``longest`` ids."""
    generator = torch.Generator().manual_seed(1000 + step)
    lengths = torch.randint(0, longest + 1, (len(KEYS) * size,), generator=generator)
    count = int(lengths.sum())
    # Squaring makes some ids frequent.
    ids = (torch.rand(count, generator=generator).square() * high).long()
    weights = torch.rand(count, generator=generator) + 0.5 if weighted else None
    return KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths, weights=weights)


def share(features: KeyedJaggedTensor, sizes: Sequence[int], rank: int) -> KeyedJaggedTensor:
    """The examples of one rank, of which rank r has ``sizes[r]``."""
    first = sum(sizes[:rank])
    chosen = torch.arange(first, first + sizes[rank])
    offsets = features.offsets().view(-1)
    values, weights, lengths = [], [], []
    for key in range(len(KEYS)):
        for example in chosen.tolist():
            begin, end = offsets[key * features.stride() + example :][:2].tolist()
            values.append(features.values()[begin:end])
            lengths.append(end - begin)
            if features.weights_or_none() is not None:
                weights.append(features.weights()[begin:end])
    nothing = features.values()[:0]
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat([nothing, *values]),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        weights=(
            torch.cat([features.weights()[:0], *weights])
            if features.weights_or_none() is not None
            else None
        ),
        stride=sizes[rank],
    )


def even(size: int, world_size: int) -> list[int]:
    return [size // world_size] * world_size


def rows_at_start(tables: list[Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        one.name: torch.rand(one.num_embeddings, one.embedding_dim, generator=generator) - 0.5
        for one in tables
    }


def static_model(
    net: Net, fused_params: dict[str, Any], world_size: int
) -> DistributedModelParallel:
    """TorchRec's own row-wise tables."""
    bags = isinstance(net.collection, EmbeddingBagCollection)
    sharder: Any = (EmbeddingBagCollectionSharder if bags else EmbeddingCollectionSharder)(
        fused_params=dict(fused_params)
    )
    names = [one.name for one in collection_configs(net)]
    plan = construct_module_sharding_plan(
        net.collection,
        per_param_sharding={name: row_wise(compute_kernel="fused") for name in names},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        net, device=CPU, plan=ShardingPlan({"collection": plan}), sharders=[sharder]
    )


def collection_configs(net: Net) -> list[Any]:
    collection: Any = net.collection
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def dynamic_model(
    net: Net,
    fused_params: dict[str, Any],
    world_size: int,
    *,
    dedup: bool = False,
    options: Mapping[str, DynamicEmbTableOptions] | None = None,
    static: Sequence[str] = (),
    pg: dist.ProcessGroup | None = None,
    device: torch.device = CPU,
) -> DistributedModelParallel:
    """Dynamic tables, but for those in ``static``."""
    tables = collection_configs(net)
    constraints = {
        one.name: DynamicEmbParameterConstraints(
            use_dynamicemb=one.name not in static,
            # Not data-parallel: DDP would leave the table to a dense optimizer.
            sharding_types=["table_wise"] if one.name in static else None,
            dynamicemb_options=(options or {}).get(one.name, DynamicEmbTableOptions()),
        )
        for one in tables
    }
    planner = DynamicEmbeddingShardingPlanner(
        tables,
        topology=Topology(world_size=world_size, compute_device=device.type),
        constraints=constraints,
        debug=False,
    )
    sharders: list[Any] = [
        DynamicEmbeddingCollectionSharder(fused_params=dict(fused_params), use_index_dedup=dedup),
        DynamicEmbeddingBagCollectionSharder(fused_params=dict(fused_params)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planner.collective_plan(net, sharders, pg)
    model = DistributedModelParallel(net, device=device, plan=plan, sharders=sharders)
    model.sharders = sharders
    return model


def dynamic_tables(model: DistributedModelParallel) -> dict[str, Table]:
    """This rank's tables by name."""
    return {
        table.name: table
        for module in model.module.collection.dynamic_modules()
        for table in module.tables
    }


def insert_owned(model: DistributedModelParallel, rows: Mapping[str, torch.Tensor]) -> None:
    """Give the dynamic tables the rows of the ids that are this rank's."""
    for module in model.module.collection.dynamic_modules():
        for table in module.tables:
            ids = torch.arange(len(rows[table.name]))
            ids = ids[module.routings[table.name].owned(ids)]
            table.insert(ids, rows[table.name][ids])


def set_static(model: DistributedModelParallel, rows: Mapping[str, torch.Tensor]) -> None:
    """Give static row-wise tables their rows."""
    for key, value in model.state_dict().items():
        name = key.split(".")[-2]
        for shard in value.local_shards():
            begin, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.copy_(rows[name][begin : begin + size])


def static_rows(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """The whole static tables, on every rank."""
    result = {}
    for key, value in model.state_dict().items():
        parts: list[Any] = [None] * dist.get_world_size()
        local = [shard.tensor.detach().clone() for shard in value.local_shards()]
        dist.all_gather_object(parts, torch.cat(local) if local else None)
        result[key.split(".")[-2]] = torch.cat([part for part in parts if part is not None])
    return result


def dynamic_rows(model: DistributedModelParallel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows of ``ids``, from the rank that has them; every id must be on exactly one."""
    result = {}
    for name, table in dynamic_tables(model).items():
        found = table.find(ids)
        rows = torch.where(found.found[:, None], found.embeddings, torch.zeros(()))
        owners = found.found.long()
        dist.all_reduce(rows)
        dist.all_reduce(owners)
        assert owners.max() <= 1, f"an id of {name} is on two ranks"
        result[name] = rows
    return result


def train(
    model: DistributedModelParallel, batches: Sequence[KeyedJaggedTensor]
) -> list[torch.Tensor]:
    """The losses of training steps, each the mean over all ranks."""
    losses = []
    for one in batches:
        loss = model(one)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total / dist.get_world_size())
    return losses


def wide(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same features with ids all over the 64-bit range."""
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=wide_ids(features.values()),
        lengths=features.lengths(),
        weights=features.weights_or_none(),
        stride=features.stride(),
    )


def wide_ids(ids: torch.Tensor) -> torch.Tensor:
    special = torch.tensor([0, -1, -2, -3, -4, -(2**63), 2**63 - 1, 2**31])
    spread = ids * -7046029254386353131  # odd: different ids stay different
    return torch.where(ids < len(special), special[ids.clamp(max=len(special) - 1)], spread)
