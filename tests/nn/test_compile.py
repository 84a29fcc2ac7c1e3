"""torch.compile of a model that holds a dynamic module: one graph, the losses of eager."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import table_options
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbPoolingMode,
    OptimizerArgs,
    UsageError,
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Words(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = DynamicEmbedding(6, seed=1, padding_idx=0, **arguments)
        self.head = nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.rows(ids))).sum(1)


class Bags(nn.Module):
    def __init__(self, mode: str = "sum", **arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = DynamicEmbeddingBag(6, seed=1, mode=mode, padding_idx=0, **arguments)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 1)

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        scaled = None if weights is None else weights * self.scale
        return self.head(self.rows(ids, offsets, scaled))


def train(model: Any, call: Any, batches: Any, make: Any = torch.optim.Adam) -> list[float]:
    optimizer = make(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(*batch).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True, **options)


@pytest.mark.parametrize("arguments", [{}, {"optimizer": "adam"}], ids=["torch_optim", "fused"])
def test_an_embedding_with_padding(arguments: dict[str, Any]) -> None:
    batches = [(torch.randint(0, 20, (4, 5)),) for _ in range(6)]
    eager, model = Words(**arguments), Words(**arguments)
    expected = train(eager, eager, batches)
    assert train(model, compiled(model), batches) == pytest.approx(expected, rel=1e-6)
    ids = torch.arange(1, 20)
    mine, theirs = model.rows.table.find(ids), eager.rows.table.find(ids)
    torch.testing.assert_close(mine.embeddings, theirs.embeddings, rtol=1e-5, atol=1e-6)
    assert not model.rows.table.contains(torch.tensor([0])).any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [True, False])
def test_bags_with_weights(mode: str, weighted: bool) -> None:
    if weighted and mode == "mean":
        pytest.skip("weights go with mode 'sum' only")
    batches = [
        (
            torch.randint(0, 20, (12,)),
            torch.tensor([0, 3, 3, 9]),
            torch.randn(12) if weighted else None,
        )
        for _ in range(5)
    ]
    eager, model = Bags(mode), Bags(mode)
    expected = train(eager, eager, batches)
    assert train(model, compiled(model), batches) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model.scale, eager.scale)


def test_batches_of_changing_size() -> None:
    sizes = [(3, 4), (5, 4), (7, 4), (2, 4), (11, 4), (1, 4)]
    batches = [(torch.randint(0, 20, size),) for size in sizes]
    eager, model = Words(), Words()
    expected = train(eager, eager, batches)
    assert train(model, compiled(model, dynamic=True), batches) == pytest.approx(expected, rel=1e-6)


def test_batched_tables() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.rows = BatchedDynamicEmbeddingTables(
                [table_options(3), table_options(4)],
                feature_table_map=[0, 1, 1],
                pooling_mode=DynamicEmbPoolingMode.MEAN,
                learning_rate=0.1,
            )
            self.head = nn.Linear(11, 1)

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.head(self.rows(ids, offsets))

    offsets = torch.tensor([0, 3, 5, 8, 8, 10, 12])
    batches = [(torch.randint(0, 20, (12,)), offsets) for _ in range(5)]
    eager, model = Model(), Model()
    expected = train(eager, eager, batches)
    assert train(model, compiled(model), batches) == pytest.approx(expected, rel=1e-6)


def test_evaluation_inserts_nothing() -> None:
    model = Words()
    call = compiled(model)
    ids = torch.randint(1, 20, (4, 5))
    call(ids).sum().backward()
    size = len(model.rows.table)
    model.eval()
    with torch.no_grad():
        unknown = call(ids + 100)
        assert torch.equal(call(ids), model(ids))
    assert len(model.rows.table) == size
    assert torch.equal(unknown, model(ids + 100))


def test_a_frozen_module() -> None:
    model = Words(optimizer="sgd", optimizer_args=OptimizerArgs(learning_rate=1.0))
    ids = torch.randint(1, 20, (4, 5))
    flat = ids.reshape(-1)
    before = model.rows(flat)
    model.rows.requires_grad_(False)
    call = compiled(model)
    call(ids).sum().backward()
    assert torch.equal(model.rows.table.find(flat).embeddings, before)
    assert torch.equal(call(ids + 100), model(ids + 100))
    assert not model.rows.table.contains(flat + 100).any()
    model.rows.requires_grad_(True)
    call(ids + 100).sum().backward()
    assert model.rows.table.contains(flat + 100).all()


@pytest.mark.parametrize("evaluation", [False, True])
def test_weights_of_bags_that_are_only_read(evaluation: bool) -> None:
    model = Bags()
    ids, offsets = torch.arange(12), torch.tensor([0, 3, 3, 9])
    model(ids, offsets, None)
    model.train(not evaluation).rows.requires_grad_(evaluation)
    gradients = []
    for call in (model, compiled(model)):
        weights = torch.linspace(-1, 1, 12).requires_grad_()
        call(ids + 5, offsets, weights).sum().backward()
        gradients.append(weights.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_two_models_of_one_class() -> None:
    batches = [(torch.randint(0, 20, (4, 5)),) for _ in range(3)]
    first, second = Words(), Words()
    one, two = compiled(first), compiled(second)
    assert train(first, one, batches) == train(second, two, batches)
    assert len(first.rows.table) == len(second.rows.table) > 0


def test_forwards_without_backward_are_given_up() -> None:
    model = Words()
    call = compiled(model)
    ids = torch.randint(1, 20, (4, 5))
    old = call(ids).sum()
    for _ in range(100):
        call(ids)
    assert len(model.rows._waiting) <= 64
    with pytest.raises(UsageError, match="not known any more"):
        old.backward()
    call(ids).sum().backward()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_default_backend() -> None:
    batches = [(torch.randint(0, 20, (4, 5)),) for _ in range(4)]
    eager, model = Words(), Words()
    expected = train(eager, eager, batches)
    assert train(model, torch.compile(model, fullgraph=True), batches) == pytest.approx(
        expected, rel=1e-5
    )


def test_the_operators_pass_torchs_own_check() -> None:
    """opcheck without the schema test: the operator changes its table, which no schema can say."""
    module = DynamicEmbeddingBag(4, mode="sum", options=table_options(4))
    arguments = (
        module.handle,
        module._key,
        torch.tensor([1, 2, 3]),
        torch.tensor([0, 1, 3]),
        torch.rand(3, requires_grad=True),
        1,
        4,
        torch.float32,
        True,
    )
    torch.library.opcheck(
        torch.ops.dynamicemb.lookup.default,
        arguments,
        test_utils=("test_autograd_registration", "test_faketensor"),
    )
