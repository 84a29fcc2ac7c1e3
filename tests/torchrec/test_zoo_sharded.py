"""TorchRec's modules around collections with dynamic tables, sharded: real processes, gloo."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import CPU, batch, configs, even, loss_of, rows_at_start, share
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    KeyedJaggedTensor,
)
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.nn.discovery import find_collections, tables_of
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
from dynamicemb.shard import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)
from ranks import Ranks

BATCH, STEPS, RATE = 8, 4, 0.25
LONGEST = 4


def lengths() -> dict[str, int]:
    return {key: LONGEST for table in configs(True) for key in table.feature_names}


class Processed(nn.Module):
    """Bags whose ids are weighted by their positions."""

    def __init__(self, together: bool, device: str) -> None:
        super().__init__()
        processors: Any = PositionWeightedModuleCollection(lengths())
        if not together:
            processors = {key: PositionWeightedModule(size) for key, size in lengths().items()}
        self.collection = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(configs(True), is_weighted=True, device=torch.device(device)),
            processors,
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return loss_of(self.collection(features), features, True)

    def inner(self) -> Any:
        return self.collection._embedding_bag_collection


class Towers(nn.Module):
    """A tower over bags and one over sequences."""

    def __init__(self, device: str) -> None:
        super().__init__()
        where = torch.device(device)
        self.towers = EmbeddingTowerCollection(
            [
                EmbeddingTower(EmbeddingBagCollection(configs(True), device=where), Bags()),
                EmbeddingTower(EmbeddingCollection(_renamed(), device=where), Sequences()),
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        out: torch.Tensor = self.towers(features)
        return (out - 0.3).square().mean()


def _renamed() -> list[Any]:
    tables = configs(False)
    for table in tables:
        table.name = f"{table.name}_sequence"
    return tables


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 8 + 2 * 12, 3)

    def forward(self, pooled: Any) -> torch.Tensor:
        out: torch.Tensor = self.linear(pooled.values())
        return out


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5 * 8, 3)

    def forward(self, rows: Any) -> torch.Tensor:
        added = [rows[key].to_padded_dense(LONGEST).sum(1) for key in sorted(rows.keys())]
        out: torch.Tensor = self.linear(torch.cat(added, dim=1))
        return out


def sharded(model: nn.Module, tables: list[Any], sharders: list[Any], world_size: int) -> Any:
    planner = DynamicEmbeddingShardingPlanner(
        tables,
        topology=Topology(world_size=world_size, compute_device="cpu"),
        constraints={
            one.name: DynamicEmbParameterConstraints(
                use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions()
            )
            for one in tables
        },
        debug=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def tables_in(model: Any) -> dict[str, tuple[Any, Any]]:
    """(module, table) by name: all that are on this rank."""
    return {
        name: found
        for modules in find_collections(model).values()
        for name, found in tables_of(modules).items()
    }


def insert_owned(model: Any, rows: dict[str, torch.Tensor]) -> None:
    for name, (module, table) in tables_in(model).items():
        ids = torch.arange(len(rows[name]))
        ids = ids[module.routings[name].owned(ids)]
        table.insert(ids, rows[name][ids])


def row_differences(model: Any, expected: dict[str, torch.Tensor]) -> float:
    """How far the rows are from ``expected``, at most."""
    worst = 0.0
    for name, (_, table) in tables_in(model).items():
        found = table.find(torch.arange(len(expected[name])))
        rows = torch.where(found.found[:, None], found.embeddings, torch.zeros(()))
        dist.all_reduce(rows)
        worst = max(worst, float((rows - expected[name]).abs().max()))
    return worst


def train_both(model: Any, reference: nn.Module, rank: int, world_size: int) -> float:
    """Trains both on the same data; the largest difference of losses and dense parameters."""
    # The parameters of dynamic tables are empty.
    dense = {
        name.replace("_dmp_wrapped_module.", "").replace("module.", ""): one
        for name, one in model.named_parameters()
        if one.numel()
    }
    optimizer = torch.optim.SGD(list(dense.values()), lr=RATE)
    theirs = torch.optim.SGD(reference.parameters(), lr=RATE)
    worst = 0.0
    for step in range(STEPS):
        data = batch(step, BATCH, longest=LONGEST)
        optimizer.zero_grad()
        loss = model(share(data, even(BATCH, world_size), rank))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        theirs.zero_grad()
        expected = reference(data)
        expected.backward()
        theirs.step()
        worst = max(worst, float((total / world_size - expected.detach()).abs()))
    wanted = dict(reference.named_parameters())
    assert {name for name in wanted if "embedding" not in name.split(".")[-3]} == set(dense)
    for name, parameter in dense.items():
        worst = max(worst, float((parameter - wanted[name]).abs().max()))
    return worst


def processed(rank: int, world_size: int, *, together: bool) -> float:
    torch.manual_seed(0)
    reference = Processed(together, "cpu")
    rows = rows_at_start(configs(True))
    with torch.no_grad():
        for name, table in reference.inner().embedding_bags.items():
            table.weight.copy_(rows[name])
    bags = DynamicEmbeddingBagCollectionSharder(
        fused_params={"optimizer": "EXACT_SGD", "learning_rate": RATE}
    )
    model = sharded(
        Processed(together, "meta"),
        configs(True),
        [FeatureProcessedEmbeddingBagCollectionSharder(bags)],
        world_size,
    )
    insert_owned(model, rows)
    worst = train_both(model, reference, rank, world_size)
    after = {
        name: table.weight.detach() for name, table in reference.inner().embedding_bags.items()
    }
    assert any(not torch.equal(after[name], rows[name]) for name in rows)
    return max(worst, row_differences(model, after))


@pytest.mark.parametrize("together", [False, True])
def test_position_weights_in_front_of_dynamic_tables(ranks: Ranks, together: bool) -> None:
    assert max(ranks.run(2, processed, together=together)) < 1e-5


def towers(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    reference = Towers("cpu")
    rows = rows_at_start([*configs(True), *_renamed()])
    collections = [tower.embedding for tower in reference.towers.towers]
    weights = {
        **{name: one.weight for name, one in collections[0].embedding_bags.items()},
        **{name: one.weight for name, one in collections[1].embeddings.items()},
    }
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(rows[name])
    made = Towers("meta")
    for to, one in zip(made.towers.towers, reference.towers.towers, strict=True):
        to.interaction = copy.deepcopy(one.interaction)
    fused = {"optimizer": "EXACT_SGD", "learning_rate": RATE}
    model = sharded(
        made,
        [*configs(True), *_renamed()],
        [
            DynamicEmbeddingBagCollectionSharder(fused_params=dict(fused)),
            DynamicEmbeddingCollectionSharder(fused_params=dict(fused)),
        ],
        world_size,
    )
    insert_owned(model, rows)
    worst = train_both(model, reference, rank, world_size)
    after = {name: weight.detach() for name, weight in weights.items()}
    return max(worst, row_differences(model, after))


def test_towers_of_dynamic_tables(ranks: Ranks) -> None:
    assert max(ranks.run(2, towers)) < 1e-5
