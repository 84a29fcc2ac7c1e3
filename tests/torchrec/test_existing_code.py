"""What code that was written for upstream asks of a sharded model and of a plan."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import sharded
import torch
import torchrec
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

import dynamicemb
from dynamicemb import (
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbedding,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.dump_load import (
    check_emb_collection_modules,
    find_sharded_modules,
    get_dynamic_emb_module,
)
from dynamicemb.errors import InvalidArgumentError
from dynamicemb.planner import DynamicEmbParameterSharding
from ranks import Ranks

OPTIONS = DynamicEmbTableOptions(max_capacity=1024, score_strategy=DynamicEmbScoreStrategy.LFU)


def test_names_of_utils() -> None:
    utils = importlib.import_module("dynamicemb.utils")
    collections = {torchrec.EmbeddingBagCollection, torchrec.EmbeddingCollection}
    assert collections == utils.TORCHREC_TYPES
    assert utils.DTYPE_NUM_BYTES[torch.bfloat16] == 2
    assert utils.torch_to_dyn_emb is dynamicemb.torch_to_dyn_emb


class Outer(nn.Module):
    """Dynamic tables in three places, one of them reached twice."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList([first, second])
        self.again = first
        self.single = DynamicEmbedding(4)


def find_modules(rank: int, world_size: int, static: tuple[str, ...]) -> dict[str, Any]:
    models = []
    for bags in (False, True):
        net = sharded.Net(sharded.configs(bags))
        models.append(sharded.dynamic_model(net, sharded.SGD, world_size, static=static))
        sharded.train(models[-1], [sharded.share(sharded.batch(0, 8), [8 // world_size] * 2, rank)])
    model = Outer(*models)
    found = get_dynamic_emb_module(model)
    counts = Counter(id(one) for one in found)
    by_collection = [get_dynamic_emb_module(one) for _, _, one in find_sharded_modules(model)]
    visited = {id(found[0])}
    rest = check_emb_collection_modules(model, [], visited)
    return {
        "kinds": {type(one) for one in found},
        "once": set(counts.values()) == {1},
        "tables": sorted(table.name for one in found for table in one.tables),
        "sharded": [[t.name for one in modules for t in one.tables] for modules in by_collection],
        "rest": [id(one) for one in rest] == [id(one) for one in found[1:]],
        "visited": visited == set(counts),
        "appended": len(check_emb_collection_modules(model, list(found))) == len(found),
        "ids": {
            table.name: one.export_keys_values(table.name)[0].tolist()
            for one in get_dynamic_emb_module(models[1])
            for table in one.tables
        },
    }


@pytest.mark.parametrize("static", [(), ("goods",)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_modules_of_sharded_collections_are_found(
    ranks: Ranks, world_size: int, static: tuple[str, ...]
) -> None:
    every = ranks.run(world_size, find_modules, static=static)
    names = [name for name in ("users", "goods") if name not in static]
    for one in every:
        assert one["kinds"] == {BatchedDynamicEmbeddingTablesV2, DynamicEmbedding}
        assert one["once"]
        assert one["visited"]
        assert one["appended"]
        assert one["rest"]
        assert one["tables"] == sorted(["rows", *names, *names])
        assert [sorted(tables) for tables in one["sharded"]] == [sorted(names)] * 2 + [["rows"]]
    features = sharded.batch(0, 8)
    for name in names:
        wanted = torch.cat([features[key].values() for key in sharded.FEATURES[name]])
        ids = [key for one in every for key in one["ids"][name]]
        assert sorted(ids) == torch.unique(wanted).tolist()


def train_a_plan_of_ones_own(rank: int, world_size: int, dist_type: str) -> dict[str, Any]:
    """As TorchEasyRec makes it: from the planner's placement, without ``num_embeddings``."""
    torch.manual_seed(3)
    net = sharded.Net(sharded.configs(False))
    planned = sharded.dynamic_model(net, sharded.SGD, world_size)
    by_planner: Any = planned.plan.plan["collection"]
    plan = EmbeddingModuleShardingPlan(
        {
            name: DynamicEmbParameterSharding(
                sharding_spec=one.sharding_spec,
                sharding_type=one.sharding_type,
                ranks=one.ranks,
                compute_kernel=one.compute_kernel,
                customized_compute_kernel=one.customized_compute_kernel,
                dist_type=dist_type,
                dynamicemb_options=replace(
                    one.dynamicemb_options, max_capacity=512 if name == "users" else 1024
                ),
            )
            for name, one in by_planner.items()
        }
    )
    model = DistributedModelParallel(
        sharded.Net(sharded.configs(False)),
        device=sharded.CPU,
        plan=ShardingPlan({"collection": plan}),
        sharders=planned.sharders,
    )
    part = sharded.share(sharded.batch(0, 8), sharded.even(8, world_size), rank)
    losses = sharded.train(model, [part] * 3)
    (module,) = get_dynamic_emb_module(model)  # the options differ, and they are one group
    return {
        "losses": losses,
        "types": {one.dist_type for one in module.routings.values()},
        "ids": {table.name: module.export_keys_values(table.name)[0] for table in module.tables},
        "wrong": [
            table.name
            for table in module.tables
            if not module.routings[table.name].owned(next(table.export()).ids).all()
        ],
    }


@pytest.mark.parametrize("dist_type", ["continuous", "roundrobin", "hash_roundrobin"])
def test_a_plan_may_say_how_ids_are_spread(ranks: Ranks, dist_type: str) -> None:
    first, second = ranks.run(2, train_a_plan_of_ones_own, dist_type=dist_type)
    assert first["types"] == second["types"] == {dist_type}
    assert first["wrong"] == second["wrong"] == []
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    if dist_type == "continuous":  # over the rows of the table's config, 64
        assert all(ids.max() < 32 for ids in first["ids"].values())
        assert all(ids.min() >= 32 for ids in second["ids"].values())


def make(**changes: Any) -> DynamicEmbParameterSharding:
    return DynamicEmbParameterSharding(
        sharding_type="row_wise", compute_kernel="customized_kernel", **changes
    )


def test_dist_type_and_the_options_of_a_plan_agree() -> None:
    assert make().dist_type == "roundrobin"
    hashed = replace(OPTIONS, dist_type="hash_roundrobin")
    assert make(dynamicemb_options=hashed).dist_type == "hash_roundrobin"
    given = make(dynamicemb_options=OPTIONS, dist_type="hash_roundrobin")
    assert given.dynamicemb_options == hashed
    assert OPTIONS.dist_type == "roundrobin"  # the caller's object stays
    assert replace(given, ranks=[0]).dist_type == "hash_roundrobin"
    with pytest.raises(InvalidArgumentError, match="dist_type is 'continuous'.*hash_roundrobin"):
        make(dynamicemb_options=hashed, dist_type="continuous")
    with pytest.raises(InvalidArgumentError, match="dist_type is 'random'; allowed"):
        make(dist_type="random")


def test_additional_fused_params_are_those_torchrec_does_not_have() -> None:
    one = make(dynamicemb_options=OPTIONS, dist_type="continuous", num_embeddings=7)
    assert one.get_additional_fused_params() == {
        "customized_compute_kernel": "DynamicEmb",
        "num_embeddings": 7,
        "dynamicemb_options": replace(OPTIONS, dist_type="continuous"),
        "dist_type": "continuous",
    }
    fused = {"learning_rate": 0.1, **one.get_additional_fused_params()}
    DynamicEmbParameterSharding.pop_additional_fused_params(fused)
    assert fused == {"learning_rate": 0.1}
