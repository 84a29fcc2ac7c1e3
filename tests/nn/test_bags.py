"""Bags: empty ones, weights and their gradient, offsets, any id, any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import FAR, bag_pair, rows_of, wild
from torch import nn

from dynamicemb import DynamicEmbedding, DynamicEmbeddingBag

ROWS, DIM = 20, 5


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_an_empty_bag_is_zeros_and_takes_no_gradient(mode: str) -> None:
    ours, dense = bag_pair(ROWS, DIM, mode=mode)
    ids, offsets = torch.tensor([3, 4, 4]), torch.tensor([0, 0, 2, 2, 3, 3])
    mine, theirs = ours(wild(ids), offsets), dense(ids, offsets)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert not mine[[0, 2, 4, 5]].any()
    torch.optim.SGD(ours.parameters(), lr=0.1)
    mine.sum().backward()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_only_empty_bags(mode: str) -> None:
    bag = DynamicEmbeddingBag(DIM, mode=mode)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    nothing = torch.empty(0, dtype=torch.int64)
    for offsets in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)):
        out = bag(nothing, offsets)
        assert torch.equal(out, torch.zeros(3, DIM))
        out.sum().backward()
        optimizer.step()
    assert bag(torch.empty(4, 0, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 4
    assert bag(nothing, nothing).shape == (0, DIM)
    assert len(bag.table) == 0


@pytest.mark.parametrize("two_dimensions", [False, True])
@pytest.mark.parametrize("dim", [1, 5, 16, 37])
def test_weights_scale_rows_and_take_the_gradient_of_torch(two_dimensions: bool, dim: int) -> None:
    ours, dense = bag_pair(ROWS, dim)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    other = torch.optim.SGD(dense.parameters(), lr=0.1)
    for _ in range(5):
        ids = torch.randint(0, ROWS, (4, 6))
        offsets = None
        if not two_dimensions:
            ids, offsets = ids.reshape(-1), torch.tensor([0, 0, 5, 17])
        weights = torch.randn(ids.shape)
        mine = weights.clone().requires_grad_()
        theirs = weights.clone().requires_grad_()
        direction = torch.randn(4, dim)
        out = ours(wild(ids), offsets, mine)
        expected = dense(ids, offsets, theirs)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()
        other.zero_grad()
        (out * direction).sum().backward()
        (expected * direction).sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()
        other.step()
        torch.testing.assert_close(rows_of(ours, ROWS), dense.weight.detach(), rtol=1e-5, atol=1e-6)


def test_fused_weights_take_the_gradient_of_the_rows_before_the_update() -> None:
    ours, dense = bag_pair(ROWS, DIM, optimizer="sgd")
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    ours(wild(torch.tensor([1, 2, 1])), torch.tensor([0]), weights).sum().backward()
    row_sums = dense.weight.sum(1).detach()
    torch.testing.assert_close(weights.grad, row_sums[[1, 2, 1]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_another_dtype_take_a_gradient_of_theirs(dtype: torch.dtype) -> None:
    ours, dense = bag_pair(ROWS, DIM)
    weights = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    ours(wild(torch.tensor([[1, 2]])), None, weights[None]).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == dtype
    expected = dense.weight.sum(1)[[1, 2]].to(dtype)
    torch.testing.assert_close(weights.grad, expected, rtol=1e-2, atol=1e-2)


def test_frozen_rows_with_trained_weights() -> None:
    for arguments in ({}, {"optimizer": "adam"}):
        ours, dense = bag_pair(ROWS, DIM, **arguments)
        ours.requires_grad_(False)
        weights = torch.ones(2, requires_grad=True)
        ours(wild(torch.tensor([1, 2])), torch.tensor([0]), weights).sum().backward()
        assert weights.grad is not None
        assert torch.equal(rows_of(ours, ROWS), dense.weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_ids_of_every_integer_type(dtype: torch.dtype) -> None:
    module = DynamicEmbedding(3, seed=1)
    expected = module(torch.tensor([5, 7, 5]))
    assert torch.equal(module(torch.tensor([5, 7, 5], dtype=dtype)), expected)


def test_unsigned_ids_are_their_bits() -> None:
    module = DynamicEmbedding(3, seed=1)
    signed = module(torch.tensor([-1, -(2**63), FAR]))
    unsigned = module(torch.tensor([2**64 - 1, 2**63, FAR], dtype=torch.uint64))
    assert torch.equal(signed, unsigned)
    assert len(module.table) == 3


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4), (1, 1, 1, 5)])
def test_an_embedding_keeps_the_shape_of_its_input(shape: tuple[int, ...]) -> None:
    module = DynamicEmbedding(3)
    ids = torch.randint(-5, 5, shape)
    out = module(ids)
    assert out.shape == (*shape, 3)
    assert torch.equal(out.reshape(-1, 3), module(ids.reshape(-1)))
    out.sum().backward()


def test_inputs_that_are_not_contiguous() -> None:
    module, dense = bag_pair(ROWS, DIM)
    ids = torch.randint(0, ROWS, (6, 4))
    weights = torch.randn(6, 4)
    mine = module(wild(ids).t(), None, weights.t())
    torch.testing.assert_close(mine, dense(ids.t(), None, weights.t()), rtol=1e-5, atol=1e-6)
    flat = module(wild(ids)[:, 1], torch.tensor([0, 9, 2, 9])[::2])
    assert torch.equal(flat, dense(ids[:, 1].contiguous(), torch.tensor([0, 2])))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_gradient_that_is_expanded(mode: str) -> None:
    """``sum().backward()`` hands an expanded tensor, with strides of 0, to backward."""
    ours, dense = bag_pair(ROWS, DIM, mode=mode)
    optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, dense)]
    ids = torch.tensor([[1, 2, 3], [1, 1, 1]])
    ours(wild(ids)).sum().backward()
    dense(ids).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(rows_of(ours, ROWS), dense.weight.detach(), rtol=1e-6, atol=1e-6)


def test_nn_embedding_defaults_are_kept() -> None:
    bag = DynamicEmbeddingBag(4)
    assert bag.mode == nn.EmbeddingBag(1, 4).mode == "mean"
    assert not bag.include_last_offset
