"""Fused optimizers against torch.optim where all rows are touched in every step."""

from __future__ import annotations

import platform
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dynamicemb import DynamicEmbedding, OptimizerArgs
from dynamicemb.one_embedding import SmartDecayAdam

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


class ExactRoots(TorchFunctionMode):
    """Square roots as IEEE 754 rounds them. torch's are those of MKL, whose last bit differs."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.sqrt:
            return torch.from_numpy(np.sqrt(args[0].numpy()))
        return function(*args, **(kwargs or {}))


def _adam(r: random.Random, decoupled: bool) -> tuple[str, dict[str, Any], Any]:
    betas = (
        r.choice((0.0, 0.3, 0.4999, 0.5, 0.5001, 0.9, 1 - 1e-7, r.random())),
        r.choice((0.0, 0.5, 0.999, r.random())),
    )
    rate, decay, eps, up = (
        r.random(),
        r.choice((0.0, 0.05)),
        r.choice((1e-8, 1e-3)),
        r.random() < 0.5,
    )
    numbers = {"learning_rate": rate, "beta1": betas[0], "beta2": betas[1], "eps": eps}
    numbers |= {"weight_decay": decay, "weight_decay_mode": 2 if decoupled else 1, "maximize": up}
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    return (
        "adam",
        numbers,
        lambda p: make(p, lr=rate, betas=betas, eps=eps, weight_decay=decay, maximize=up),
    )


def _momentum(r: random.Random) -> tuple[str, dict[str, Any], Any]:
    same: dict[str, Any] = {"momentum": r.random(), "dampening": r.choice((0.0, r.random()))}
    same |= {"weight_decay": r.choice((0.0, 0.05)), "nesterov": same["dampening"] == 0.0}
    return "momentum_sgd", {"learning_rate": 0.1, **same}, lambda p: torch.optim.SGD(p, 0.1, **same)


def _adagrad(r: random.Random) -> tuple[str, dict[str, Any], Any]:
    same = {"lr_decay": r.random(), "weight_decay": r.choice((0.0, 0.05)), "eps": 1e-8}
    same["initial_accumulator_value"] = r.random()
    return (
        "exact_adagrad",
        {"learning_rate": 0.1, **same},
        lambda p: torch.optim.Adagrad(p, 0.1, **same),
    )


def _smart_decay_adam(r: random.Random) -> tuple[str, dict[str, Any], Any]:
    betas = (r.random(), r.random())
    numbers = {"learning_rate": 0.1, "beta1": betas[0], "beta2": betas[1], "weight_decay": 0.05}
    return (
        "smart_decay_adam",
        numbers,
        lambda p: SmartDecayAdam(p, 0.1, betas=betas, weight_decay=0.05),
    )


DRAWS: dict[str, Any] = {
    "sgd": lambda r: (
        "sgd",
        {"learning_rate": 0.1, "weight_decay": 0.05, "maximize": True},
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.05, maximize=True),
    ),
    "momentum": _momentum,
    "adam": lambda r: _adam(r, decoupled=False),
    "adamw": lambda r: _adam(r, decoupled=True),
    "adagrad": _adagrad,
    "smart_decay_adam": _smart_decay_adam,
}
#: The tensors of a torch optimizer that are a row's state, in its order.
STATE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "m", "v")


@pytest.mark.skipif(
    platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch uses no fused multiply-add here",
)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_rows_and_state_have_the_bits_of_torch_optim(name: str, fused: bool) -> None:
    for draw in range(25):
        rule, numbers, make = DRAWS[name](random.Random(draw))
        chance = random.Random(draw)
        dim = chance.choice((3, 8, 17, 64))
        weight = torch.randn(8, dim)
        dense = nn.Parameter(weight.clone().cpu())
        arguments: dict[str, Any] = {}
        if fused:
            arguments = {"optimizer": rule, "optimizer_args": OptimizerArgs(**numbers)}
        module = DynamicEmbedding(dim, **arguments)
        module.table.insert(torch.arange(8), weight)
        optimizer, ours = make([dense]), make(module.parameters())
        for _ in range(8):
            gradient = torch.randn(8, dim) * 10 ** chance.uniform(-6, 4)
            dense.grad = gradient.cpu()
            with ExactRoots():
                optimizer.step()
            module(torch.arange(8)).backward(gradient)
            if not fused:
                ours.step()
                ours.zero_grad()
        found = module.table.find(torch.arange(8))
        assert torch.equal(found.embeddings.cpu(), dense.detach()), (draw, numbers)
        state = [optimizer.state[dense][key] for key in STATE if key in optimizer.state[dense]]
        if state:
            expected = torch.cat(state, dim=1)
            ours_state = found.state[:, : expected.shape[1]].cpu()
            assert torch.equal(ours_state, expected), (draw, numbers)
