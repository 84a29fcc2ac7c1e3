"""Dynamic tables under TorchRec's DistributedModelParallel on a GPU: rows and losses of the CPU.

Where fbgemm-gpu-cpu is all there is of FBGEMM, tests/fbgemm_on_cuda.py stands in for its kernels.
"""

from __future__ import annotations

import pytest
import sharded
import torch
from torchrec import KeyedJaggedTensor

from dynamicemb import DynamicEmbTableOptions, EmbOptimType
from dynamicemb.managed_collision import ManagedCollisionModule
from fbgemm_on_cuda import only_on_a_gpu
from tables import contents

pytestmark = only_on_a_gpu


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "ADAM", "EXACT_ROWWISE_ADAGRAD"])
@pytest.mark.parametrize("bags", [False, True])
def test_training_is_that_of_the_cpu(bags: bool, optimizer: str) -> None:
    runs = []
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        torch.manual_seed(3)
        net = sharded.Net(sharded.configs(bags))
        options = {
            name: DynamicEmbTableOptions(max_capacity=48, bucket_capacity=16)
            for name in sharded.FEATURES
        }
        fused = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
        model = sharded.dynamic_model(net, fused, 1, options=options, device=device)
        losses = []
        for step in range(12):
            features = sharded.batch(step, 6, high=200).to(device)
            out = model.module.collection(features)
            values = [out[key] for key in sorted(out.keys())]
            flat = torch.cat([(one if bags else one.values()).reshape(-1) for one in values])
            loss = ((flat - 0.3) ** 2).sum()
            loss.backward()
            losses.append(loss.detach())
        tables = sharded.dynamic_tables(model)
        assert all(table.device.type == kind for table in tables.values())
        runs.append(([one.item() for one in losses], {n: contents(t) for n, t in tables.items()}))
    (losses, rows), (on_gpu, rows_on_gpu) = runs
    assert on_gpu == pytest.approx(losses, rel=1e-5)
    for name, expected in rows.items():
        there = rows_on_gpu[name]
        assert torch.equal(there.ids.cpu(), expected.ids)
        assert torch.allclose(there.embeddings.cpu(), expected.embeddings, atol=1e-6)
        assert torch.allclose(there.state.cpu(), expected.state, atol=1e-6)


@pytest.mark.parametrize("policy", ["lru", "lfu", "distance_lfu"])
def test_managed_collision_gives_the_slots_of_the_cpu(policy: str) -> None:
    from torchrec import JaggedTensor
    from torchrec.modules import mc_modules

    policies = {
        "lru": mc_modules.LRU_EvictionPolicy,
        "lfu": mc_modules.LFU_EvictionPolicy,
        "distance_lfu": mc_modules.DistanceLFU_EvictionPolicy,
    }
    modules = {
        kind: ManagedCollisionModule(32, torch.device(kind), policies[policy]())
        for kind in ("cpu", "cuda")
    }
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        ids = torch.randint(0, 60, (24,), generator=generator) * 2**33 - 5
        slots = {}
        for kind, module in modules.items():
            feature = JaggedTensor(values=ids.to(kind), lengths=torch.ones(24).long().to(kind))
            slots[kind] = module({"f": feature})["f"].values()
            module.evict()
        assert slots["cuda"].is_cuda
        assert torch.equal(slots["cuda"].cpu(), slots["cpu"])


def test_managed_collision_under_a_collection_trains_as_on_the_cpu() -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import LRU_EvictionPolicy, ManagedCollisionCollection

    runs = []
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        config = EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=40, feature_names=["f"]
        )
        bags = EmbeddingBagCollection(tables=[config], device=device)
        weight = next(bags.parameters())
        with torch.no_grad():
            weight.copy_(torch.linspace(-1, 1, 320).view(40, 8))
        module = ManagedCollisionEmbeddingBagCollection(
            bags,
            ManagedCollisionCollection(
                {"t": ManagedCollisionModule(40, device, LRU_EvictionPolicy())}, [config]
            ),
        ).to(device)
        optimizer = torch.optim.SGD(bags.parameters(), lr=0.1)
        losses = []
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            ids = torch.randint(0, 70, (20,), generator=generator) * 2**33
            lengths = torch.full((5,), 4)
            features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths).to(device)
            loss = ((module(features)[0]["f"] - 0.1) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append((losses, weight.detach().cpu()))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    assert torch.allclose(runs[1][1], runs[0][1], atol=1e-6)
