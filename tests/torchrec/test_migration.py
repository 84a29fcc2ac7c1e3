"""A trained managed collision model becomes dynamic tables, and back, with the same answers."""

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
    PoolingType,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.errors import DynamicEmbError, UsageError
from dynamicemb.managed_collision import (
    ManagedCollisionModule,
    dynamic_to_zch,
    zch_to_dynamic,
)
from dynamicemb.unsharded import make_dynamic

CPU = torch.device("cpu")
IDS = [5, 2**62, -7, 5, 11, 13]


def features(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([*ids, *reversed(ids)]),
        lengths=torch.tensor([2, len(ids) - 2] * 2),
    )


def trained(bags: bool, theirs: bool, **options: Any) -> Any:
    torch.manual_seed(3)
    kind: Any = EmbeddingBagConfig if bags else EmbeddingConfig
    configs = [
        kind(name=name, embedding_dim=4, num_embeddings=16, feature_names=[key], **one)
        for name, key, one in (
            ("x", "a", {"pooling": PoolingType.MEAN} if bags else {}),
            ("y", "b", {}),
        )
    ]
    modules: dict[str, Any] = {}
    for name in "xy":
        policy = LFU_EvictionPolicy()
        if theirs:
            modules[name] = MCHManagedCollisionModule(16, CPU, policy, 1, **options)
        else:
            modules[name] = ManagedCollisionModule(16, CPU, policy, **options)
    managed = ManagedCollisionCollection(modules, configs)
    model: Any
    if bags:
        model = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=configs), managed
        )
    else:
        model = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=configs), managed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        answer(model, IDS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def answer(model: Any, ids: list[int]) -> torch.Tensor:
    out, _ = model(features(ids))
    if isinstance(out, dict):
        return torch.cat([one.values() for one in out.values()])
    values: torch.Tensor = out.values()
    return values


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_there_and_back_gives_the_same_answers(bags: bool, theirs: bool) -> None:
    model = torch.nn.ModuleDict({"zch": trained(bags, theirs)})
    model.eval()
    before = answer(model["zch"], IDS)
    options = {"x": DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.LFU)}
    assert zch_to_dynamic(model, options) is model
    dynamic = model["zch"]
    assert not dynamic.training
    assert torch.equal(answer(dynamic, IDS), before)
    # It trains on, with ids that have no row yet.
    dynamic.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answer(dynamic, [*IDS, 999]).sum().backward()
    optimizer.step()
    dynamic.eval()
    after = answer(dynamic, IDS)
    assert not torch.equal(after, before)
    back = dynamic_to_zch(dynamic, eviction_policy=LFU_EvictionPolicy())
    back.eval()
    assert torch.equal(answer(back, IDS), after)
    # 5 came twice in every batch of three.
    state = back._managed_collision_collection._managed_collision_modules["x"].slot_map.state()
    assert state.ids.tolist()[0] == 5
    assert state.counts.tolist()[0] == 8
    # The state is TorchRec's too.
    mch = MCHManagedCollisionModule(16, CPU, LFU_EvictionPolicy(), 1)
    mch.load_state_dict(
        back._managed_collision_collection._managed_collision_modules["x"].state_dict()
    )


def test_hashed_ids_stay_hashed() -> None:
    model = trained(True, True, input_hash_size=1000, input_hash_func=lambda ids, size: ids % size)
    model.eval()
    before = answer(model, IDS)
    dynamic = zch_to_dynamic(model)
    assert torch.equal(answer(dynamic, IDS), before)


def test_what_does_not_fit_is_refused() -> None:
    model = trained(False, False)
    with pytest.raises(UsageError):
        zch_to_dynamic(torch.nn.Linear(1, 1))
    dynamic = zch_to_dynamic(model)
    with pytest.raises(DynamicEmbError, match="has 5 ids"):
        dynamic_to_zch(dynamic, num_embeddings={"x": 5})  # type: ignore[arg-type]
    with pytest.raises(DynamicEmbError, match="'z'"):
        dynamic_to_zch(dynamic, num_embeddings={"z": 5})  # type: ignore[arg-type]
    with pytest.raises(DynamicEmbError, match="collection"):
        dynamic_to_zch(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    half = make_dynamic(
        EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=8, feature_names=[name])
                for name in "pq"
            ]
        ),
        ["p"],
    )
    with pytest.raises(DynamicEmbError, match="static"):
        dynamic_to_zch(half)  # type: ignore[arg-type]


def test_more_rows_can_be_asked_for() -> None:
    dynamic = zch_to_dynamic(trained(True, False))
    back = dynamic_to_zch(
        dynamic,  # type: ignore[arg-type]
        num_embeddings={"x": 100},
        eviction_policy=LRU_EvictionPolicy(),
        return_remapped_features=True,
    )
    back.eval()
    _, remapped = back(features([999] * 6))
    assert set(remapped.values().tolist()) == {99, 15}
