"""Rows of float16 and bfloat16: exact reading, updates in float32, rounding as asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbedding, DynamicEmbeddingBag, OptimizerArgs

HALVES = [torch.float16, torch.bfloat16]
RULES = ["sgd", "momentum_sgd", "adam", "exact_adagrad", "exact_row_wise_adagrad"]


def module_of(dtype: torch.dtype, dim: int = 17, rule: str = "sgd", **args: Any) -> Any:
    return DynamicEmbedding(
        dim, dtype=dtype, optimizer=rule, optimizer_args=OptimizerArgs(**args), seed=4
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [1, 15, 16, 40])
def test_reading_converts_exactly(dtype: torch.dtype, dim: int) -> None:
    """All finite numbers of the type, subnormals and extremes included, come back as they are."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = every[torch.isfinite(every)]
    rows = values[: len(values) // dim * dim].reshape(-1, dim)
    module = DynamicEmbedding(dim, dtype=dtype, output_dtype=torch.float32)
    ids = torch.arange(len(rows))
    module.table.insert(ids, rows)
    assert torch.equal(module.table.find(ids).embeddings.view(torch.int16), rows.view(torch.int16))
    for mode in (module.train(), module.eval()):
        out = mode(ids)
        assert out.dtype == torch.float32
        assert torch.equal(out, rows.float())


@pytest.mark.parametrize("dtype", HALVES)
def test_output_has_the_rows_dtype_unless_told_otherwise(dtype: torch.dtype) -> None:
    assert DynamicEmbedding(3, dtype=dtype)(torch.arange(2)).dtype == dtype
    module = DynamicEmbedding(3, dtype=dtype, output_dtype=torch.float32)
    assert module(torch.arange(2)).dtype == torch.float32
    other = DynamicEmbedding(3, output_dtype=dtype, seed=1)
    full = DynamicEmbedding(3, seed=1)
    assert torch.equal(other(torch.arange(9)), full(torch.arange(9)).to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_summed_in_float32(dtype: torch.dtype, mode: str) -> None:
    bag = DynamicEmbeddingBag(5, dtype=dtype, mode=mode)
    ids = torch.arange(300)
    rows = torch.randn(300, 5).to(dtype)
    bag.table.insert(ids, rows)
    out = bag(ids[None])
    exact = rows.double().sum(0) if mode == "sum" else rows.double().mean(0)
    torch.testing.assert_close(
        out[0].double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", RULES)
def test_without_stochastic_rounding_rows_round_to_nearest(dtype: torch.dtype, rule: str) -> None:
    """One update equals that of a float32 table from the same rows, rounded once."""
    numbers = {"learning_rate": 0.03, "weight_decay": 0.01, "stochastic_rounding": False}
    half = module_of(dtype, rule=rule, **numbers)
    full = module_of(torch.float32, rule=rule, **numbers)
    ids = torch.arange(64)
    for _ in range(4):
        half.table.find_or_insert(ids)
        found = half.table.find(ids)
        full.table.insert(ids, found.embeddings.float(), state=found.state)
        gradient = torch.randn(64, 17).to(dtype)
        half(ids).backward(gradient)
        full(ids).backward(gradient.float())
        after, exact = half.table.find(ids), full.table.find(ids)
        assert torch.equal(after.embeddings, exact.embeddings.to(dtype))
        assert torch.equal(after.state, exact.state)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("start", [1.0, -1.0, 6.0e-6])
def test_stochastic_rounding_has_no_bias(dtype: torch.dtype, start: float) -> None:
    """A step of 0.3 of the distance to the next number is taken by 0.3 of the elements."""
    count, dim = 400, 250
    args = OptimizerArgs(learning_rate=1.0, stochastic_rounding=True)
    module = DynamicEmbedding(
        dim, dtype=dtype, output_dtype=torch.float32, optimizer="sgd", optimizer_args=args, seed=4
    )
    ids = torch.arange(count)
    here = torch.tensor(start, dtype=dtype)
    module.table.insert(ids, here.expand(count, dim).contiguous())
    toward = torch.nextafter(here, torch.tensor(2 * start, dtype=dtype)).float()
    gap = (toward - here.float()).item()
    module(ids).backward(torch.full((count, dim), -0.3 * gap))
    rows = module.table.find(ids).embeddings
    up = rows == toward.to(dtype)
    assert torch.equal(up | (rows == here), torch.ones_like(up))
    share = up.double().mean().item()
    sigma = math.sqrt(0.3 * 0.7 / (count * dim))
    assert abs(share - 0.3) < 4 * sigma
    columns = up.double().mean(0)
    assert abs(columns - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 / count)


@pytest.mark.parametrize("dtype", HALVES)
def test_many_small_steps_arrive_where_float32_does(dtype: torch.dtype) -> None:
    """Rounding to nearest would stay at 1.0 for ever."""
    results = {}
    for stochastic in (True, False):
        module = module_of(dtype, 64, learning_rate=1.0, stochastic_rounding=stochastic)
        ids = torch.arange(64)
        module.table.insert(ids, torch.ones(64, 64, dtype=dtype))
        for _ in range(100):
            module(ids).backward(torch.full((64, 64), 1e-4, dtype=dtype))
        results[stochastic] = module.table.find(ids).embeddings.float().mean().item()
    assert results[False] == 1.0
    assert results[True] == pytest.approx(0.99, abs=5e-4)


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_is_deterministic(dtype: torch.dtype) -> None:
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        module = module_of(dtype, 33, "adam", learning_rate=0.01)
        for _ in range(4):
            ids = torch.randint(0, 300, (2000,))
            module(ids).backward(torch.randn(2000, 33).to(dtype))
        results.append(module.table.find(torch.arange(300)).embeddings)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])


def test_stochastic_rounding_is_the_default_and_needs_no_torch_generator() -> None:
    assert OptimizerArgs().stochastic_rounding
    module = module_of(torch.bfloat16, learning_rate=0.1)
    before = torch.get_rng_state()
    module(torch.arange(10)).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", HALVES)
def test_state_is_float32(dtype: torch.dtype) -> None:
    module = module_of(dtype, 8, "exact_adagrad")
    gradient = torch.full((1, 8), 0.01, dtype=dtype)
    for _ in range(300):
        module(torch.tensor([1])).backward(gradient)
    total = module.table.find(torch.tensor([1])).state
    assert total.dtype == torch.float32
    expected = 300 * gradient.double() ** 2
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=0)
