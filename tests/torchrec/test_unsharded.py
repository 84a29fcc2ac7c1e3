"""Collections of a model made dynamic in one process, without a process group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sharded
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, PoolingType

from dynamicemb import DynamicEmbTableOptions, EmbOptimType
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError
from dynamicemb.nn.discovery import find_collections
from dynamicemb.unsharded import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    make_dynamic,
)

MIXED = {"users": PoolingType.MEAN, "goods": PoolingType.SUM}


def trained(net: nn.Module, steps: int = 6) -> list[torch.Tensor]:
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(sharded.batch(step, 8))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("tables", [None, ["users"], ["goods"]])
def test_a_model_trains_as_before(bags: bool, tables: list[str] | None) -> None:
    torch.manual_seed(0)
    before = sharded.Net(sharded.configs(bags, MIXED), device="cpu")
    after = sharded.Net(sharded.configs(bags, MIXED), device="cpu")
    after.load_state_dict(before.state_dict())
    assert make_dynamic(after, tables, keep_rows=True) is after
    kind = DynamicEmbeddingBagCollection if bags else DynamicEmbeddingCollection
    assert isinstance(after.collection, kind)
    features = sharded.batch(0, 8)
    old, new = before.collection(features), after.collection(features)
    assert list(new.keys()) == list(old.keys())
    for name in old.keys():  # noqa: SIM118
        if bags:
            torch.testing.assert_close(new[name], old[name])
        else:
            assert torch.equal(new[name].lengths(), old[name].lengths())
            torch.testing.assert_close(new[name].values(), old[name].values())
    torch.testing.assert_close(trained(after), trained(before), rtol=1e-5, atol=1e-6)


def test_static_tables_keep_their_very_parameters() -> None:
    net = sharded.Net(sharded.configs(True), device="cpu")
    weight = net.collection.embedding_bags["goods"].weight
    make_dynamic(net, ["users"])
    assert any(parameter is weight for parameter in net.parameters())
    (tables,) = find_collections(net).values()
    assert list(find_collections(net)) == ["model.collection"]
    assert [table.name for module in tables for table in module.tables] == ["users"]


def test_any_id_and_a_fused_optimizer() -> None:
    net = make_dynamic(
        sharded.Net(sharded.configs(False)),
        {"users": DynamicEmbTableOptions(max_capacity=256), "goods": DynamicEmbTableOptions()},
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.02,
    )
    ids = torch.tensor([-1, 2**63 - 1, -(2**63), 5])
    features = KeyedJaggedTensor(
        keys=sharded.KEYS, values=ids.view(torch.uint64), lengths=torch.tensor([1, 1, 1, 1])
    )
    losses = []
    for _ in range(5):
        loss = net(features)
        loss.backward()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    tables = {t.name: t for m in find_collections(net)["model.collection"] for t in m.tables}
    assert tables["users"].contains(ids).tolist() == [False, True, True, True]
    assert tables["goods"].contains(ids).tolist() == [True, False, True, False]
    net.eval()
    assert not net(features).requires_grad


def test_indices_and_weights() -> None:
    collection = EmbeddingCollection(
        tables=sharded.configs(False), device=sharded.CPU, need_indices=True
    )
    features = sharded.batch(3, 5)
    old = collection(features)
    new = make_dynamic(collection, keep_rows=True)(features)
    for name in old:
        assert torch.equal(new[name].weights(), old[name].weights())
    bags = EmbeddingBagCollection(
        tables=sharded.configs(True), device=sharded.CPU, is_weighted=True
    )
    weighted = sharded.batch(3, 5, weighted=True)
    gradients = []
    for one in (bags, make_dynamic(bags, keep_rows=True)):
        weights = weighted.weights().clone().requires_grad_()
        given = KeyedJaggedTensor(
            keys=weighted.keys(),
            values=weighted.values(),
            lengths=weighted.lengths(),
            weights=weights,
        )
        one(given).values().square().sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("bags", [True, False])
def test_a_frozen_collection_only_reads(bags: bool) -> None:
    net = make_dynamic(sharded.Net(sharded.configs(bags), device="cpu"))
    net(sharded.batch(0, 5)).backward()
    net.requires_grad_(False)
    tables = [t for m in find_collections(net)["model.collection"] for t in m.tables]
    before = [(t.stats(), {k: v.tolist() for k, v in t.state_dict().items()}) for t in tables]
    frozen = net(sharded.batch(1, 5))
    assert not frozen.requires_grad
    after = [(t.stats(), {k: v.tolist() for k, v in t.state_dict().items()}) for t in tables]
    assert after == before
    assert torch.equal(net.eval()(sharded.batch(1, 5)), frozen)


@pytest.mark.parametrize("way", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_a_collection_is_averaged_as_torchrecs(way: dict[str, Any]) -> None:
    static = sharded.Net(sharded.configs(True), device="cpu")
    dynamic = make_dynamic(copy.deepcopy(static), keep_rows=True)
    averages = []
    for net in (static, dynamic):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        average = AveragedModel(net, **way)
        for step in range(5):
            optimizer.zero_grad()
            net(sharded.batch(step, 6)).backward()
            optimizer.step()
            average.update_parameters(net)
        average.eval()
        averages.append(average(sharded.batch(9, 6)))
        assert not torch.equal(averages[-1], net.eval()(sharded.batch(9, 6)))
    torch.testing.assert_close(averages[1], averages[0], rtol=1e-6, atol=1e-6)


def test_rows_are_those_of_a_sharded_model() -> None:
    torch.manual_seed(9)
    first = make_dynamic(sharded.Net(sharded.configs(True)))
    torch.manual_seed(9)
    second = make_dynamic(sharded.Net(sharded.configs(True)), ["goods", "users"])
    features = sharded.batch(0, 4)
    assert torch.equal(first.collection(features).values(), second.collection(features).values())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"tables": ["x"]},
            InvalidArgumentError,
            "a table in tables is 'x'; allowed: goods, users",
        ),
        ({"tables": {"users": 3}}, ArgumentTypeError, "tables['users'] is 3"),
        ({"tables": 3}, ArgumentTypeError, "tables is 3"),
        ({"keep_rows": 1}, ArgumentTypeError, "keep_rows is 1"),
        ({"keep_rows": True}, InvalidArgumentError, "False for a collection on device 'meta'"),
        ({"learning_rat": 1.0}, InvalidArgumentError, "did you mean 'learning_rate'"),
    ],
)
def test_mistakes(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    net = sharded.Net(sharded.configs(True))
    with pytest.raises(error) as caught:
        make_dynamic(net, **arguments)
    assert words in str(caught.value)
    assert isinstance(net.collection, EmbeddingBagCollection)


def test_only_a_batch_is_taken() -> None:
    collection = make_dynamic(EmbeddingCollection(tables=sharded.configs(False)))
    with pytest.raises(ArgumentTypeError, match="allowed: a KeyedJaggedTensor"):
        collection({"user": torch.tensor([1])})
