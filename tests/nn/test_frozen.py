"""A frozen module (``requires_grad_(False)``) only reads, in training mode too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import bag_pair, constant, table_options, wild

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    FrequencyAdmissionStrategy,
    KVCounter,
)

OFFSETS = torch.tensor([0, 3, 8])
MODULES: dict[str, Any] = {
    "rows": lambda **more: DynamicEmbedding(3, options=table_options(3, **more)),
    "fused": lambda **more: DynamicEmbedding(
        3, options=table_options(3, **more), optimizer="adam", padding_idx=2
    ),
    "bags": lambda **more: DynamicEmbeddingBag(3, options=table_options(3, **more)),
    "batched": lambda **more: BatchedDynamicEmbeddingTables([table_options(3, **more)]),
    "sequences": lambda **more: BatchedDynamicEmbeddingTables(
        [table_options(3, **more)], pooling_mode=DynamicEmbPoolingMode.NONE, separate_step=True
    ),
}


def look_up(module: Any, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(module, DynamicEmbedding):
        return module(ids)
    if isinstance(module, DynamicEmbeddingBag):
        return module(ids, OFFSETS[:-1])
    return module(ids, OFFSETS)


def everything(module: Any) -> list[Any]:
    tensors = [t for table in module.tables for t in table.state_dict().values()]
    return [*(t.tolist() for t in tensors), [table.stats() for table in module.tables]]


@pytest.mark.parametrize("strategy", list(DynamicEmbScoreStrategy))
@pytest.mark.parametrize("name", MODULES)
def test_nothing_changes(name: str, strategy: DynamicEmbScoreStrategy) -> None:
    module = MODULES[name](
        score_strategy=strategy,
        admit_strategy=FrequencyAdmissionStrategy(1),
        admission_counter=KVCounter(128),
        eval_initializer_args=constant(0.25),
    )
    if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
        for table in module.tables:
            table.set_score(3)
    ids = torch.arange(8)
    look_up(module, ids).sum().backward()
    look_up(module, ids).sum().backward()
    assert len(module.tables[0]) > 0
    module.requires_grad_(False)
    before = everything(module)
    frozen = []
    for other in (ids, ids + 4, ids + 1000):
        if isinstance(module, BatchedDynamicEmbeddingTables):
            module.prefetch(other, OFFSETS)
            assert module.prefetched == 0
        out = look_up(module, other)
        assert not out.requires_grad
        frozen.append(out)
    assert everything(module) == before
    module.eval()
    for other, out in zip((ids, ids + 4, ids + 1000), frozen, strict=True):
        assert torch.equal(look_up(module, other), out)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_is_unfrozen_inserts_and_trains_again(name: str) -> None:
    module = MODULES[name]()
    ids = torch.arange(8)
    module.requires_grad_(False)
    look_up(module, ids)
    assert len(module.tables[0]) == 0
    module.requires_grad_(True)
    look_up(module, ids).sum().backward()
    if not module.fused:
        module.step()
    assert (module.tables[0].find(ids[3:]).embeddings < 1.0).all()


def test_a_frozen_tower_beside_one_that_is_trained() -> None:
    users, items = DynamicEmbedding(4, seed=1), DynamicEmbedding(4, seed=2)
    ids = torch.arange(20)
    items(ids)
    items.requires_grad_(False)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], lr=0.1)
    before = everything(items)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (users(ids) * items(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert everything(items) == before


@pytest.mark.parametrize("evaluation", [False, True])
def test_weights_of_bags_that_are_only_read_take_the_gradient_of_torchs(evaluation: bool) -> None:
    ours, dense = bag_pair(20, 4)
    dense.weight.requires_grad_(False)
    ours.train(not evaluation).requires_grad_(evaluation)
    places, offsets = torch.randint(0, 20, (12,)), torch.tensor([0, 5, 5, 9])
    gradient = torch.randn(4, 4)
    gradients = []
    for module, ids in ((ours, wild(places)), (dense, places)):
        weights = torch.linspace(-1, 1, 12).requires_grad_()
        module(ids, offsets, weights).backward(gradient)
        gradients.append(weights.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert len(ours.table) == 20


@pytest.mark.parametrize("mode", ["SUM", "MEAN"])
def test_weights_of_several_frozen_tables(mode: str) -> None:
    """Unknown ids count with what they read."""
    module = BatchedDynamicEmbeddingTables(
        [
            table_options(2, eval_initializer_args=constant(0.5)),
            table_options(3, eval_initializer_args=constant(0.25)),
        ],
        feature_table_map=[0, 0, 1],
        pooling_mode=DynamicEmbPoolingMode[mode],
    )
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 1, 2, 3])
    offsets = torch.tensor([0, 2, 3, 5, 5, 8, 9])
    module(ids, offsets)
    module.requires_grad_(False)
    weights = torch.rand(9).requires_grad_()
    gradient = torch.randn(2, 7)
    unknown = torch.tensor([1, 20, 3, 40, 5, 60, 1, 2, 3])
    out = module(unknown, offsets, weights)
    out.backward(gradient)
    rows = [module.tables[0].find(unknown[:5]), module.tables[1].find(unknown[5:])]
    values = torch.cat(
        [
            (rows[0].embeddings[:3] * gradient[[0, 0, 1], 0:2]).sum(1),
            (rows[0].embeddings[3:] * gradient[[0, 0], 2:4]).sum(1),
            (rows[1].embeddings * gradient[[0, 0, 0, 1], 4:7]).sum(1),
        ]
    )
    lengths = torch.tensor([2, 2, 1, 2, 2, 3, 3, 3, 1])
    expected = values / lengths if mode == "MEAN" else values
    torch.testing.assert_close(weights.grad, expected)
    with torch.no_grad():
        torch.testing.assert_close(module(unknown, offsets, weights), out)


def test_padding_takes_no_gradient_of_weights_in_a_frozen_bag() -> None:
    module = DynamicEmbeddingBag(2, mode="sum", padding_idx=0, options=table_options(2))
    module(torch.tensor([[1, 2]]))
    module.requires_grad_(False)
    weights = torch.ones(1, 4).requires_grad_()
    module(torch.tensor([[0, 1, 0, 2]]), None, weights).sum().backward()
    assert weights.grad.tolist() == [[0.0, 2.0, 0.0, 2.0]]


def test_a_gradient_of_weights_comes_once() -> None:
    module = DynamicEmbeddingBag(2, mode="sum", options=table_options(2)).requires_grad_(False)
    weights = torch.ones(1, 2).requires_grad_()
    out = module(torch.tensor([[1, 2]]), None, weights)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()
