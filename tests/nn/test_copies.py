"""copy.deepcopy, pickle and copy.copy of modules: whole, independent, and trainable."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from pairs import table_options
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbScoreStrategy,
    FrequencyAdmissionStrategy,
    KVCounter,
)

STEP = DynamicEmbScoreStrategy.STEP


def by_torch(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch": by_torch,
}
MODULES: dict[str, Any] = {
    "embedding": lambda: DynamicEmbedding(3, options=table_options(3, score_strategy=STEP)),
    "fused": lambda: DynamicEmbedding(
        3, optimizer="adam", options=table_options(3, score_strategy=STEP), padding_idx=4
    ),
    "admission": lambda: DynamicEmbedding(
        3,
        optimizer="sgd",
        options=table_options(
            3,
            score_strategy=STEP,
            admit_strategy=FrequencyAdmissionStrategy(3),
            admission_counter=KVCounter(64),
        ),
    ),
    "bfloat16": lambda: DynamicEmbedding(
        3,
        optimizer="exact_adagrad",
        options=table_options(3, score_strategy=STEP),
        dtype=torch.bfloat16,
    ),
}


def step(module: Any, seed: int, optimizer: Any = None) -> torch.Tensor:
    ids = torch.randint(0, 12, (10,), generator=torch.Generator().manual_seed(seed))
    out = module(ids)
    out.sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return out.detach()


def same(one: Any, two: Any) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("name", MODULES)
def test_a_copy_is_whole_independent_and_trains_on(kind: str, name: str) -> None:
    module = MODULES[name]()
    fused = name != "embedding"
    optimizer = None if fused else torch.optim.Adam(module.parameters(), lr=0.1)
    for seed in range(3):
        step(module, seed, optimizer)
    twin = COPIES[kind](module)
    assert type(twin) is type(module)
    assert twin.handle is not module.handle
    assert twin.table is not module.table
    assert twin.padding_idx == module.padding_idx
    assert same(module, twin)
    before = twin.state_dict()
    step(module, 10, optimizer)
    after = twin.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    other = None if fused else torch.optim.Adam(twin.parameters(), lr=0.1)
    step(twin, 10, other)
    assert same(module, twin)


@pytest.mark.parametrize("kind", COPIES)
def test_a_model_with_its_optimizer(kind: str) -> None:
    """The copied optimizer holds the copied module, not nothing."""
    rows = DynamicEmbedding(3, options=table_options(3, score_strategy=STEP))
    model = nn.ModuleDict({"rows": rows, "head": nn.Linear(3, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def train(m: Any, o: Any) -> None:
        o.zero_grad()
        m["head"](m["rows"](torch.arange(5))).sum().backward()
        o.step()

    train(model, optimizer)
    twin, other = COPIES[kind]((model, optimizer))
    train(model, optimizer)
    train(twin, other)
    assert same(model, twin)
    other, twin = COPIES[kind]((optimizer, model))
    train(model, optimizer)
    train(twin, other)
    assert same(model, twin)


def test_gradients_in_flight_stay_with_the_original() -> None:
    module = DynamicEmbedding(3, options=table_options(3))
    module(torch.arange(2)).sum().backward()
    twin = copy.deepcopy(module)
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    assert (twin.table.find(torch.arange(2)).embeddings == 1.0).all()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert (module.table.find(torch.arange(2)).embeddings == 0.5).all()


def test_a_prefetched_batch_stays_with_the_original() -> None:
    module = BatchedDynamicEmbeddingTables([table_options(2)])
    module.prefetch(torch.tensor([1]), torch.tensor([0, 1]))
    twin = copy.deepcopy(module)
    twin(torch.tensor([2, 3]), torch.tensor([0, 2]))
    module(torch.tensor([1]), torch.tensor([0, 1]))


def test_batched_tables() -> None:
    module = BatchedDynamicEmbeddingTables(
        [table_options(2, score_strategy=STEP), table_options(3, score_strategy=STEP)],
        feature_table_map=[0, 0, 1],
        table_names=["a", "b"],
        optimizer="adam",
    )
    offsets = torch.tensor([0, 2, 4, 6])
    module(torch.arange(6), offsets).sum().backward()
    for kind, make in COPIES.items():
        twin = make(module)
        assert twin.table_names == ["a", "b"], kind
        assert same(module, twin)
        out, other = module(torch.arange(6), offsets), twin(torch.arange(6), offsets)
        assert torch.equal(out, other)
        out.sum().backward()
        other.sum().backward()
        assert same(module, twin)


def test_a_shallow_copy_shares_the_rows_and_leaves_the_original_its_optimizer() -> None:
    module = DynamicEmbedding(3, options=table_options(3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    twin = copy.copy(module)
    assert twin.table is module.table
    module(torch.arange(2)).sum().backward()
    optimizer.step()
    assert (twin.table.find(torch.arange(2)).embeddings == 0.5).all()
    twin(torch.arange(2)).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    assert (module.table.find(torch.arange(2)).embeddings == 0.0).all()


def test_training_and_evaluation_mode_are_copied() -> None:
    module = DynamicEmbeddingBag(3).eval()
    assert not copy.deepcopy(module).training
    assert not pickle.loads(pickle.dumps(module)).training


def test_dtype_and_device_moves_of_a_model_keep_it_working() -> None:
    model = nn.ModuleDict({"rows": DynamicEmbedding(3, options=table_options(3))})
    for move in (lambda m: m.double(), lambda m: m.half(), lambda m: m.float(), lambda m: m.cpu()):
        move(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model["rows"].table.insert(torch.arange(2), torch.ones(2, 3))
        model["rows"](torch.arange(2)).sum().backward()
        optimizer.step()
        assert (model["rows"].table.find(torch.arange(2)).embeddings == 0.5).all()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", [*COPIES, "copy"])
def test_a_frozen_module_is_copied_and_stays_frozen(name: str) -> None:
    module = DynamicEmbedding(3, seed=1).requires_grad_(False)
    module(torch.arange(4))
    copied = (COPIES | {"copy": copy.copy})[name](module)
    assert not copied.handle.requires_grad
    assert torch.equal(copied(torch.arange(4)), module(torch.arange(4)))
    copied.requires_grad_(True)
    optimizer = torch.optim.SGD(copied.parameters(), lr=1.0)
    before = copied(torch.arange(4)).detach().clone()
    copied(torch.arange(4)).sum().backward()
    optimizer.step()
    assert torch.allclose(copied(torch.arange(4)), before - 1.0)
