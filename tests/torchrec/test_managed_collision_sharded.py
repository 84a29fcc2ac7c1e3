"""Managed collision over ranks on the CPU: real processes, gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection

from dynamicemb import EmbOptimType
from dynamicemb.managed_collision import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
    ManagedCollisionModule,
)
from ranks import Ranks

CPU = torch.device("cpu")


def ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.constant_(tensor, 1.0)


def features(*ids: int, device: torch.device = CPU) -> KeyedJaggedTensor:
    """Each id is a bag of its own, of features a and b."""
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([*ids, *ids], dtype=torch.int64, device=device),
        lengths=torch.ones(2 * len(ids), dtype=torch.int64, device=device),
    )


def sharded(
    bags: bool,
    zch_size: int,
    world_size: int,
    policy: Any = None,
    device: torch.device = CPU,
) -> Any:
    kind: Any = EmbeddingBagConfig if bags else EmbeddingConfig
    configs = [
        kind(
            name=name,
            embedding_dim=4,
            num_embeddings=zch_size,
            feature_names=[key],
            init_fn=ones,
        )
        for name, key in (("x", "a"), ("y", "b"))
    ]
    managed = ManagedCollisionCollection(
        {name: ManagedCollisionModule(zch_size, torch.device("meta"), policy) for name in "xy"},
        configs,
    )
    meta = torch.device("meta")
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}
    model: Any
    sharder: Any
    if bags:
        model = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(configs, device=meta), managed, return_remapped_features=True
        )
        sharder = ManagedCollisionEmbeddingBagCollectionSharder(fused_params=_fbgemm(fused))
    else:
        model = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(configs, device=meta), managed, return_remapped_features=True
        )
        sharder = ManagedCollisionEmbeddingCollectionSharder(fused_params=_fbgemm(fused))
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device.type)
    )
    plan = planner.collective_plan(model, [sharder], torch.distributed.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])


def _fbgemm(fused: dict[str, Any]) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType as Fbgemm

    return {**fused, "optimizer": Fbgemm[fused["optimizer"].name]}


def rows(model: Any, *ids: int) -> tuple[torch.Tensor, list[int]]:
    """The rows of feature a, and the slots of both features."""
    out, remapped = model(features(*ids, device=model.device))
    out, remapped = out.wait() if hasattr(out, "wait") else out, remapped
    remapped = remapped.wait() if hasattr(remapped, "wait") else remapped
    first = out["a"]
    return first if isinstance(first, torch.Tensor) else first.values(), remapped.values().tolist()


def step(model: Any, *ids: int) -> torch.Tensor:
    out, _ = rows(model, *ids)
    out.sum().backward()
    return out.detach().clone()


def train(
    rank: int, world_size: int, *, bags: bool, zch_size: int, device: torch.device = CPU
) -> Any:
    torch.manual_seed(0)
    model = sharded(bags, zch_size, world_size, device=device)
    model.train()
    share = zch_size // world_size
    own = [rank + world_size * i for i in range(share - 1)]  # fit on every rank
    first = step(model, *own)
    assert first.eq(1.0).all()
    _, slots = rows(model, *own)
    second = step(model, *own)
    third = step(model, *own)
    assert (second < 1.0).all()
    assert (third < second).all()
    # Other ids that belong to the same ranks take all the slots; their rows are new ones.
    other = [1000 * world_size + id for id in own]
    before = step(model, *other)
    assert before.eq(1.0).all(), before
    again = step(model, *other)
    assert torch.equal(again, second), (again, second)  # the optimizer's state was new too
    model.eval()
    here, _ = rows(model, *other)
    unknown, shared = rows(model, 77_777)
    return slots, bool((here < again).all()), shared, unknown.tolist()


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize(("world_size", "zch_size"), [(1, 8), (2, 8), (2, 9)])
def test_ids_have_slots_of_their_own_and_rows_start_anew(
    ranks: Ranks, bags: bool, world_size: int, zch_size: int
) -> None:
    results = ranks.run(world_size, train, bags=bags, zch_size=zch_size)
    everyone = [slot for slots, _, _, _ in results for slot in slots[: len(slots) // 2]]
    assert len(set(everyone)) == len(everyone)
    for _, trained, shared, unknown in results:
        assert trained
        assert len(set(shared)) == 1  # the last slot of the rank that would hold the id
        assert unknown == [[1.0] * 4]


def save_and_load(rank: int, world_size: int, *, bags: bool) -> Any:
    torch.manual_seed(0)
    ids = [rank * 10 + i for i in range(4)]
    model = sharded(bags, 32, world_size, LFU_EvictionPolicy())
    step(model, *ids, *ids)
    trained, slots = rows(model, *ids)
    other = sharded(bags, 32, world_size, LFU_EvictionPolicy())
    step(other, 500, 501)
    other.load_state_dict(model.state_dict())
    other.eval()
    loaded, found = rows(other, *ids)
    return slots == found and torch.equal(loaded, trained)


@pytest.mark.parametrize("bags", [False, True])
def test_state_dict_round_trip(ranks: Ranks, bags: bool) -> None:
    assert ranks.run(2, save_and_load, bags=bags) == [True, True]
