"""Weight decay of rows as OneFlow has it: ``lr * weight_decay * w`` less, whatever the gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import make

from dynamicemb import one_embedding

ROWS, DIM, STEPS = 12, 5, 10
Array = np.ndarray
#: The update of a row by its formula: (weights, states, gradient, step, numbers) to weights.
Rule = Callable[[Array, Sequence[Array], Array, int, dict[str, Any]], Array]


def sgd(w: Array, states: Sequence[Array], g: Array, step: int, n: dict[str, Any]) -> Array:
    if n["momentum"]:
        states[0][:] = n["momentum"] * states[0] + g
        g = g + n["momentum"] * states[0] if n["nesterov"] else states[0]
    return w - n["lr"] * g - n["lr"] * n["weight_decay"] * w


def adam(w: Array, states: Sequence[Array], g: Array, step: int, n: dict[str, Any]) -> Array:
    (beta1, beta2), (m, v) = n["betas"], states
    m[:] = beta1 * m + (1 - beta1) * g
    v[:] = beta2 * v + (1 - beta2) * g * g
    below = np.sqrt(v) / np.sqrt(1 - beta2**step) + n["eps"]
    return w - n["lr"] / (1 - beta1**step) * m / below - n["lr"] * n["weight_decay"] * w


def adagrad(w: Array, states: Sequence[Array], g: Array, step: int, n: dict[str, Any]) -> Array:
    lr = n["lr"] / (1 + (step - 1) * n["lr_decay"])
    states[0][:] += g * g
    return w - lr * g / (np.sqrt(states[0]) + n["eps"]) - lr * n["weight_decay"] * w


def combinations(**values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


#: Optimizer, its formula, states of a row, and the numbers that OneFlow's own tests combine.
CASES = {
    "sgd": (
        one_embedding.SGD,
        sgd,
        0,
        {"momentum": [0.0], "nesterov": [False], "weight_decay": [0.0, 0.1], "lr": [1.0, 0.9]},
    ),
    "momentum": (
        one_embedding.SGD,
        sgd,
        1,
        {
            "momentum": [0.9],
            "nesterov": [False, True],
            "weight_decay": [0.0, 0.1],
            "lr": [1.0, 0.9],
        },
    ),
    "adam": (
        one_embedding.Adam,
        adam,
        2,
        {
            "betas": [(0.9, 0.8), (0.8, 0.7)],
            "eps": [1e-5, 1e-8],
            "weight_decay": [0.0, 0.1],
            "lr": [1.0, 0.3],
        },
    ),
    "adagrad": (
        one_embedding.Adagrad,
        adagrad,
        1,
        {"lr_decay": [0.0, 0.1], "eps": [1e-5], "weight_decay": [0.0, 0.1], "lr": [0.3, 1.5]},
    ),
}


@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rows_follow_oneflows_formulas(
    tmp_path: Path, case: str, wrapped: bool, scale: float
) -> None:
    kind, rule, states, values = CASES[case]
    for number, numbers in enumerate(combinations(**values)):
        draw = np.random.default_rng(number)
        whole = draw.random((ROWS, DIM * (1 + states))).astype(np.float32)
        embedding = make(tmp_path / str(number), dim=DIM, size_factor=1 + states)
        optimizer: Any = kind(embedding.parameters(), **numbers)
        embedding.tables[0].set_optimizer(row_rule(optimizer))
        ids = torch.arange(ROWS)
        table = embedding.tables[0]
        table.insert(ids, torch.tensor(whole[:, :DIM]), state=torch.tensor(whole[:, DIM:]))
        if wrapped:
            optimizer = one_embedding.Optimizer(optimizer, [embedding])
        expected = whole.astype(np.float64)
        for step in range(1, STEPS + 1):
            count = int(draw.integers(1, ROWS))
            gradient = draw.random((count, DIM))
            optimizer.zero_grad()
            loss = (embedding(ids[:count]) * torch.tensor(gradient / 10).float()).sum() * scale
            loss.backward()
            optimizer.step()
            w, *state = np.split(expected[:count].copy(), 1 + states, 1)
            w = rule(w, state, gradient * scale / 10, step, numbers)
            expected[:count] = np.concatenate([w, *state], 1)
        found = table.find(ids)
        rows = torch.cat([found.embeddings, found.state], 1).numpy()
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5, err_msg=str(numbers))
        embedding.close()


def row_rule(optimizer: torch.optim.Optimizer) -> Any:
    from dynamicemb.nn.torch_optim import translate

    return translate(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("ours", "torchs", "factor"),
    [
        (one_embedding.SGD, torch.optim.SGD, 2),
        (one_embedding.Adam, torch.optim.Adam, 3),
        (one_embedding.Adagrad, torch.optim.Adagrad, 2),
    ],
)
def test_dense_parameters_follow_torchs_rule(
    tmp_path: Path, ours: Any, torchs: Any, factor: int
) -> None:
    numbers: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    if torchs is torch.optim.SGD:
        numbers["momentum"] = 0.9
    embedding = make(tmp_path, size_factor=factor)
    dense = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [
        ours([*embedding.parameters(), dense[0]], **numbers),
        torchs([dense[1]], **numbers),
    ]
    for step in range(3):
        for optimizer, parameter in zip(optimizers, dense, strict=True):
            optimizer.zero_grad()
            (parameter * (step + 1.0)).sum().backward()
            embedding(torch.tensor([1])).sum().backward()
            optimizer.step()
    assert torch.equal(*dense)


def test_adam_with_weight_decay_is_torchs_adamw(tmp_path: Path) -> None:
    """The other way to write it, which the migration page names."""
    trained = []
    for number, kind in enumerate((one_embedding.Adam, torch.optim.AdamW)):
        embedding = make(tmp_path / str(number), size_factor=3)
        optimizer = kind(embedding.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
        trained.append(embedding.tables[0].find(torch.tensor([1, 2])).embeddings)
    assert torch.equal(*trained)
