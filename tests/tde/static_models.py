"""TorchRec models on static tables, and the data they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType

import torchrec_dynamic_embedding as tde
from dynamicemb.tde.ps import tensors_of
from dynamicemb.tde.shards import local_shards
from dynamicemb.tiers.remote.open import open_rows

DIM = 8
IDS = 1000  # distinct ids of the data


def config(kind: str, name: str, slots: int, features: Sequence[str]) -> Any:
    cls = EmbeddingConfig if kind == "sequence" else EmbeddingBagConfig
    return cls(name=name, embedding_dim=DIM, num_embeddings=slots, feature_names=list(features))


class Model(nn.Module):
    """Two collections: emb1 has tables a (features f, g) and b (h); emb2 has table c (k)."""

    def __init__(self, kind: str, slots: int) -> None:
        super().__init__()
        self.config1 = [config(kind, "a", slots, ["f", "g"]), config(kind, "b", slots, ["h"])]
        self.config2 = [config(kind, "c", slots, ["k"])]
        meta = torch.device("meta")
        collection = EmbeddingCollection if kind == "sequence" else EmbeddingBagCollection
        self.emb1 = collection(tables=self.config1, device=meta)
        self.emb2 = collection(tables=self.config2, device=meta)
        self.kind = kind

    def forward(self, kjt1: KeyedJaggedTensor, kjt2: KeyedJaggedTensor) -> torch.Tensor:
        out1, out2 = self.emb1(kjt1), self.emb2(kjt2)
        if self.kind == "sequence":
            parts = [one.values() for out in (out1, out2) for one in out.values()]
        else:
            parts = [out1.values(), out2.values()]
        return torch.cat([part.reshape(-1) for part in parts])


def build(
    kind: str = "sequence",
    slots: int = 100,
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    sharding: str | None = None,
    device: str = "cpu",
    wrapped_by: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Any:
    """The model, sharded; ``.configs`` are its table configs by path."""
    if sharding is None:  # TorchRec has no row-wise bags on a CPU
        rows, tables = ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value
        sharding = rows if kind == "sequence" else tables
    model = Model(kind, slots)
    configs = {"emb1": model.config1, "emb2": model.config2}
    whole = wrapped_by(model)
    fused = {"optimizer": optimizer, "learning_rate": 0.1}
    sharders = [EmbeddingCollectionSharder(fused), EmbeddingBagCollectionSharder(fused)]
    constraints = {
        name: ParameterConstraints(
            sharding_types=[sharding], compute_kernels=["fused"], min_partition=4
        )
        for name in "abc"
    }
    topology = Topology(world_size=dist.get_world_size(), compute_device=device)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(whole, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(
        whole, device=torch.device(device), plan=plan, sharders=sharders
    )
    sharded.configs = configs
    return sharded


def spread(ids: torch.Tensor) -> torch.Tensor:
    """Small numbers 0..999 as ids over the whole range, some of them 2**32 apart."""
    return torch.where(ids % 2 == 0, ids * 2**32 + 7, (ids - 500) * 2**53 + ids)


def data(steps: int, seed: int = 0, batch: int = 6) -> list[tuple[Any, ...]]:
    """(label, features of emb1, features of emb2), with ids 0..999."""
    generator = torch.Generator().manual_seed(seed)

    def features(keys: list[str]) -> KeyedJaggedTensor:
        lengths = torch.randint(0, 3, (len(keys) * batch,), generator=generator)
        total = int(lengths.sum())
        uniform = torch.rand(total, generator=generator, dtype=torch.float64)
        values = (uniform**2 * IDS).to(torch.int64)  # some ids come often
        return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)

    return [
        (torch.full((1,), float(step)), features(["f", "g", "h"]), features(["k"]))
        for step in range(steps)
    ]


def with_spread_ids(batches: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [
        (
            label,
            *(
                KeyedJaggedTensor(keys=k.keys(), values=spread(k.values()), lengths=k.lengths())
                for k in kjts
            ),
        )
        for label, *kjts in batches
    ]


def moved(batches: Iterable[tuple[Any, ...]], device: str) -> list[tuple[Any, ...]]:
    return [tuple(one.to(torch.device(device)) for one in batch) for batch in batches]


def train(model: Any, batches: Iterable[Any], world_size: int = 1) -> list[float]:
    """A loss per batch. The gradient of a row does not depend on the other rows of the batch."""
    losses: list[torch.Tensor] = []
    for label, kjt1, kjt2 in batches:
        out = model(kjt1, kjt2)
        target = torch.sin(label + torch.arange(len(out), device=label.device))
        loss = ((out - target) ** 2).sum()
        loss.backward()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]  # read at the end: no step waits for a GPU


def fill_server(url: str, full: Any) -> None:
    """Put the rows of a model on full tables at the server, under the ids of ``spread``."""
    for path, configs in full.configs.items():
        for config in configs:
            tensors = tensors_of(path, full.module.get_submodule(path), config.name)
            for shard in local_shards(tensors)[0]:
                rows = open_rows(url, f"{path}.{config.name}", shard.row_format)
                slots = torch.arange(shard.row_begin, shard.row_begin + shard.rows)
                rows.push(spread(slots), shard.read(slots))


def rows_of(model: Any, url: str) -> dict[str, torch.Tensor]:
    """The weights and states of all ids, from the server, after a save; of tables that this rank
    has a part of."""
    tde.save(model)
    out = {}
    for path, configs in model.configs.items():
        for config in configs:
            tensors = tensors_of(path, model.module.get_submodule(path), config.name)
            for shard in local_shards(tensors)[0][:1]:
                rows = open_rows(url, f"{path}.{config.name}", shard.row_format)
                values = rows.pull(spread(torch.arange(IDS)))[1]
                out[config.name] = torch.cat(shard.row_format.unpack(values), 1)
    return out


def weights_of(full: Any) -> dict[str, torch.Tensor]:
    out = {}
    for path, configs in full.configs.items():
        for config in configs:
            tensors = tensors_of(path, full.module.get_submodule(path), config.name)
            parts = [one.local_shards()[0].tensor.detach().cpu() for one in tensors]
            out[config.name] = torch.cat([part.reshape(IDS, -1) for part in parts], 1)
    return out
