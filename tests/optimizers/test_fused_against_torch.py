"""Fused optimizers against torch.optim where all rows are touched in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dynamicemb import DynamicEmbedding, OptimizerArgs

CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("sgd", {"learning_rate": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        "sgd",
        {"learning_rate": 0.1, "weight_decay": 0.05},
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    ),
    (
        "momentum_sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "dampening": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    ),
    (
        "momentum_sgd",
        {"learning_rate": 0.1, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    ("adam", {"learning_rate": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
    (
        "adam",
        {"learning_rate": 0.01, "weight_decay": 0.1, "weight_decay_mode": 1},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    ),
    (
        "adam",
        {"learning_rate": 0.01, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    (
        "exact_adagrad",
        {"learning_rate": 0.1, "eps": 1e-10, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2, eps=1e-10
        ),
    ),
]


@pytest.mark.parametrize(("rule", "arguments", "make"), CASES)
@pytest.mark.parametrize("dim", [7, 64])
def test_as_torch_optim(rule: str, arguments: dict[str, Any], make: Any, dim: int) -> None:
    dense = nn.Embedding(30, dim)
    module = DynamicEmbedding(dim, optimizer=rule, optimizer_args=OptimizerArgs(**arguments))
    module.table.insert(torch.arange(30), dense.weight.detach())
    optimizer = make(dense.parameters())
    for _ in range(20):
        ids = torch.cat([torch.randperm(30), torch.randint(0, 30, (20,))])
        gradient = torch.randn(50, dim)
        module(ids).backward(gradient)
        optimizer.zero_grad()
        dense(ids).backward(gradient)
        optimizer.step()
    rows = module.table.find(torch.arange(30)).embeddings
    if rule == "sgd" and "weight_decay" not in arguments:
        assert torch.equal(rows, dense.weight)
    torch.testing.assert_close(rows, dense.weight.detach(), rtol=1e-6, atol=2e-6)
