"""``half``, ``to`` and friends: outputs change their type, rows and training do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import table_options
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    UsageError,
)

IDS = torch.arange(6)
MODULES: dict[str, Any] = {
    "rows": lambda: DynamicEmbedding(4, seed=1),
    "bag": lambda: DynamicEmbeddingBag(4, seed=1),
    "batched": lambda: BatchedDynamicEmbeddingTables(
        [table_options(4)], seed=1, separate_step=True
    ),
}


def call(module: Any) -> torch.Tensor:
    if isinstance(module, DynamicEmbedding):
        return module(IDS)
    return module(IDS, torch.tensor([0, 2, 6][: 3 if module.pooled else 2]))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_have_the_type_that_a_model_is_given(name: str, dtype: torch.dtype) -> None:
    module = MODULES[name]()
    expected = call(module)
    model = nn.Sequential(module, nn.Linear(4, 2)).to(dtype)
    out = call(module)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    assert model[1](out).dtype == dtype
    assert module.tables[0].dtype == torch.float32
    assert call(module.float()).dtype == torch.float32
    assert torch.equal(call(module), expected)


def test_a_model_of_half_precision_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(DynamicEmbedding(4, seed=1), nn.Linear(4, 1)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(IDS).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert model[0].handle.dtype == torch.float32  # 1e5 is infinite in float16


def test_a_large_gradient_is_clipped_in_a_model_of_float16() -> None:
    module = DynamicEmbedding(4, seed=1).half()
    start = module(IDS).detach().clone()
    (module(IDS).float() * 1e4).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert norm.item() == pytest.approx(1e4 * 24**0.5)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    change = start.float() - module(IDS).detach().float()
    assert torch.allclose(change, torch.full_like(change, 24**-0.5), atol=2e-3)


def test_a_type_that_outputs_cannot_have_changes_nothing() -> None:
    module = DynamicEmbedding(4, seed=1).double()
    assert module(IDS).dtype == torch.float32
    assert module.handle.dtype == torch.float32


def test_an_optimizer_that_was_made_before_still_trains_the_rows() -> None:
    module = DynamicEmbedding(4, seed=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.to(torch.bfloat16).to("cpu").float()
    before = module(IDS).detach().clone()
    module(IDS).sum().backward()
    optimizer.step()
    assert torch.allclose(before - module(IDS), torch.ones(6, 4))


def test_a_handle_that_is_replaced_is_the_modules_own() -> None:
    """torch can be told to make new parameters in conversions."""
    module = DynamicEmbedding(4, seed=1)
    before = module(IDS).detach().clone()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        handle = module.handle
        module.half()
        assert module.handle is not handle
        module.to("cpu")
        module.handle.data.normal_()
        module.to("cpu")
        with pytest.raises(UsageError, match="something changed the parameter 'handle'"):
            module(IDS)
        module.accept_written()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    module.float()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(IDS).sum().backward()
    optimizer.step()
    assert torch.allclose(before - module(IDS), torch.ones(6, 4))


def test_a_copy_keeps_the_type() -> None:
    module = DynamicEmbedding(4, seed=1).half()
    assert copy.deepcopy(module)(IDS).dtype == torch.float16


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32]
)
def test_ids_of_every_integer_type(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    ids = torch.tensor([0, 5, largest], dtype=dtype)
    module = DynamicEmbedding(4, seed=1)
    rows = module(ids)
    assert torch.equal(rows, module(torch.tensor([0, 5, largest])))
    assert len(module.table) == 3


@pytest.mark.parametrize("convert", ["half", "double", "float"])
def test_gradients_that_wait_for_a_step_survive_a_conversion(convert: str) -> None:
    expected, module = DynamicEmbedding(4, seed=1), DynamicEmbedding(4, seed=1)
    for one in (expected, module):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(IDS[:2]).sum().backward()  # a norm that float16 rounds
        if one is module:
            getattr(one, convert)()
        optimizer.step()
    assert module.handle.dtype == module.handle.grad.dtype == torch.float32
    a, b = (one.table.find(IDS).embeddings for one in (expected, module))
    assert torch.equal(a, b)
