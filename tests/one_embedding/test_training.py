"""Rows are trained by torch.optim and by our optimizers, in every store to the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import DIM, STORES, make, rows_of, store_options, train, uniform_tables

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, one_embedding
from dynamicemb.errors import InvalidArgumentError, UsageError
from dynamicemb.tiers import CachedTable, Stack

WIDE = 64
#: (optimizer, options of the store that fit it)
OPTIMIZERS: dict[str, tuple[Any, dict[str, int]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), {}),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), {"size_factor": 2}),
    "Adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        {"size_factor": 2},
    ),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.01), {"size_factor": 3}),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01), {"storage_dim": 3 * WIDE}),
    "Ftrl": (lambda p: one_embedding.Ftrl(p, lr=0.1, lambda1=0.01), {"size_factor": 3}),
    "SmartDecayAdam": (
        lambda p: one_embedding.SmartDecayAdam(p, lr=0.01),
        {"storage_dim": 3 * WIDE + 2},
    ),
}


def _train_on_all(
    embedding: one_embedding.Embedding, optimizer: Any, *, ids: int, batch: int
) -> list[float]:
    """Losses of one pass over all ids in random order, and some steps of a second one."""
    draw = torch.Generator().manual_seed(1)
    order = torch.randperm(ids, generator=draw)
    order = torch.cat([order, order[torch.randperm(ids, generator=draw)][: 8 * batch]])
    losses = []
    for chosen in order[: len(order) // batch * batch].view(-1, batch // 2, 2):
        optimizer.zero_grad()
        loss = ((embedding(chosen) - chosen.remainder(7)[..., None]) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("store", "optimizer"),
    [("cached_host_mem", "SGD"), ("cached_host_mem", "Adam"), ("host_and_ssd", "Adam")]
    + [("cached_ssd", optimizer) for optimizer in OPTIMIZERS],
)
def test_a_table_ten_times_its_cache_trains_to_the_same_bits(
    tmp_path: Path, store: str, optimizer: str
) -> None:
    make_optimizer, sizes = OPTIMIZERS[optimizer]
    tables = uniform_tables(0.1, 0.2)
    options = store_options(store, tmp_path / "a", **sizes)
    embedding = make(tmp_path, options=options, tables=tables, dim=WIDE)
    cached = embedding.tables[0]
    assert isinstance(cached, CachedTable)
    rows = cached.cache.capacity
    ids, batch = 11 * rows, rows // 8 * 2
    losses = _train_on_all(embedding, make_optimizer(embedding.parameters()), ids=ids, batch=batch)
    assert len(cached) > 10 * rows
    assert 0.9 * 2**20 < cached.cache_stats().bytes < 1.05 * 2**20  # the budget
    if store == "host_and_ssd":
        assert isinstance(cached.store, Stack)
        assert 2.7 * 2**20 < cached.store.upper.stats().bytes_in_memory < 3.15 * 2**20
        assert cached.store.lower.size() > 5 * rows
    assert cached.cache_stats().brought_up > 0

    memory = make(
        tmp_path,
        options=store_options("device_mem", tmp_path / "b", capacity=ids, **sizes),
        tables=tables,
        dim=WIDE,
    )
    expected = _train_on_all(memory, make_optimizer(memory.parameters()), ids=ids, batch=batch)
    assert losses == expected
    assert losses[-1] < losses[0]
    there = torch.cat([rows.ids for rows in memory.tables[0].export()])
    assert len(there) == len(cached)
    one, other = (table.find(there) for table in (memory.tables[0], cached))
    assert other.found.all()
    assert torch.equal(one.embeddings, other.embeddings)
    assert torch.equal(one.state, other.state)


def test_losses_are_those_of_nn_embedding(tmp_path: Path) -> None:
    ids = torch.randint(0, 100, (20, 50, 2))
    embedding = make(tmp_path, tables=uniform_tables(0.1, 0.1))
    dense = torch.nn.Embedding(100, DIM)
    with torch.no_grad():
        dense.weight.copy_(embedding(torch.arange(100).view(-1, 2)).view(100, DIM))
    losses = []
    for module in (embedding, dense):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses.append([])
        for batch in ids:
            optimizer.zero_grad()
            loss = (module(batch).sum(1) ** 2).sum()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_another_size_of_row_is_refused_with_the_right_number(
    tmp_path: Path, optimizer: str
) -> None:
    make_optimizer, sizes = OPTIMIZERS[optimizer]
    needed = sizes.get("storage_dim", sizes.get("size_factor", 1) * WIDE)
    wrong = 2 if sizes.get("size_factor") != 2 else 3
    embedding = make(tmp_path, dim=WIDE, size_factor=wrong)
    step = make_optimizer(embedding.parameters())
    embedding(torch.arange(3)).sum().backward()
    before = rows_of(embedding, torch.arange(3)).clone()
    with pytest.raises(InvalidArgumentError, match=f"needs {needed}: .*storage_dim={needed}"):
        step.step()
    if needed % WIDE == 0:
        with pytest.raises(InvalidArgumentError, match=f"size_factor={needed // WIDE} "):
            step.step()
    assert torch.equal(rows_of(embedding, torch.arange(3)), before)
    with pytest.raises(InvalidArgumentError, match=f"needs {needed}"):  # before the first step
        one_embedding.Optimizer(step, [embedding])


def test_smart_decay_adam_of_an_odd_width(tmp_path: Path) -> None:
    options = store_options("cached_ssd", tmp_path, storage_dim=3 * 5 + 3)
    embedding = make(tmp_path, options=options, dim=5)
    losses = train(
        embedding, one_embedding.SmartDecayAdam(embedding.parameters(), lr=0.1), steps=9, ids=50
    )
    assert losses[-1] < losses[0]
    with pytest.raises(InvalidArgumentError, match="storage_dim is 17; .*18 for SmartDecayAdam"):
        make(tmp_path / "b", options=store_options("cached_ssd", tmp_path, storage_dim=17), dim=5)


def test_an_optimizer_of_the_same_size_starts_with_its_own_state(tmp_path: Path) -> None:
    """Rows come before the optimizer is known; Adagrad's sum starts where it says all the same."""
    results = []
    for store in STORES:
        embedding = make(tmp_path / store, store, size_factor=2)
        adagrad = torch.optim.Adagrad(embedding.parameters(), lr=0.1, initial_accumulator_value=0.5)
        embedding(torch.arange(4)).sum().backward()
        adagrad.step()
        embedding(torch.arange(4, 6))  # and rows that come later
        found = embedding.tables[0].find(torch.arange(6))
        assert torch.equal(found.state[:4], torch.full((4, DIM), 1.5))
        assert torch.equal(found.state[4:], torch.full((2, DIM), 0.5))
        results.append(found.embeddings)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_wrapper_steps_rows_and_dense_parameters(tmp_path: Path) -> None:
    embedding, dense = make(tmp_path, size_factor=3), torch.nn.Linear(DIM, 1)
    adam = torch.optim.Adam([*embedding.parameters(), *dense.parameters()], lr=0.1)
    optimizer = one_embedding.Optimizer(adam, [embedding])
    weight, row = dense.weight.detach().clone(), embedding(torch.tensor([1])).detach()
    dense(embedding(torch.tensor([1]))).sum().backward()
    optimizer.step()
    assert not torch.equal(dense.weight, weight)
    assert not torch.equal(embedding(torch.tensor([1])), row)
    optimizer.zero_grad()
    assert dense.weight.grad is None
    assert optimizer.param_groups is adam.param_groups
    with pytest.raises(ValueError, match="are not among those of the optimizer"):
        one_embedding.Optimizer(torch.optim.Adam(dense.parameters()), [embedding])
    with pytest.raises(TypeError, match="optimizer is None"):
        one_embedding.Optimizer(None, [embedding])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="RMSprop cannot update"):
        one_embedding.Optimizer(torch.optim.RMSprop(embedding.parameters()), [embedding])


# ---- our optimizers on dense parameters ----


def _beside_numpy(optimizer: Any, update: Any, steps: int = 6) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    draw = np.random.default_rng(0)
    w, state = parameter.detach().numpy().astype(np.float64), {}
    for _ in range(steps):
        g = draw.standard_normal(w.shape)
        parameter.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
        w = update(w, g, state)
    np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=1e-4, atol=1e-5)


def test_ftrl_of_dense_parameters() -> None:
    def update(w: Any, g: Any, s: dict[str, Any]) -> Any:
        n, z = s.get("n", 0.1), s.get("z", 0.0)
        g = g + 0.02 * w
        s["z"] = z + g - (np.sqrt(n + g * g) - np.sqrt(n)) / 0.3 * w
        s["n"] = n + g * g
        shrunk = np.sign(s["z"]) * np.maximum(np.abs(s["z"]) - 0.2, 0)
        return -shrunk / ((0.7 + np.sqrt(s["n"])) / 0.3 + 0.1)

    parameter = torch.nn.Parameter(torch.randn(5, 3))
    numbers = {"weight_decay": 0.02, "lambda1": 0.2, "lambda2": 0.1, "beta": 0.7}
    _beside_numpy(one_embedding.Ftrl([parameter], lr=0.3, **numbers), update)


def test_smart_decay_adam_of_dense_parameters() -> None:
    def update(w: Any, g: Any, s: dict[str, Any]) -> Any:
        s["m"] = 0.8 * s.get("m", 0.0) + 0.2 * g
        s["v"] = 0.9 * s.get("v", 0.0) + 0.1 * g * g
        return w * (1 - 0.01 * 0.3) - 0.01 * s["m"] / (np.sqrt(s["v"]) + 1e-8)

    parameter = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = one_embedding.SmartDecayAdam(
        [parameter], lr=0.01, betas=(0.8, 0.9), weight_decay=0.3
    )
    _beside_numpy(optimizer, update)


def test_wrong_numbers_of_our_optimizers() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(InvalidArgumentError, match="lr_power is -1.0; allowed: -0.5"):
        one_embedding.Ftrl([parameter], lr_power=-1.0)
    with pytest.raises(InvalidArgumentError, match="lambda1 is -1"):
        one_embedding.Ftrl([parameter], lambda1=-1)
    with pytest.raises(InvalidArgumentError, match="beta1 is 1.0"):
        one_embedding.SmartDecayAdam([parameter], betas=(1.0, 0.9))


# ---- the rest of torch ----


def test_gradients_add_up_until_the_step(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding(torch.tensor([1, 2])).detach()
    embedding(torch.tensor([1, 1])).sum().backward()
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert torch.equal(embedding(torch.tensor([1, 2])), before - torch.tensor([[3.0], [1.0]]))


@pytest.mark.parametrize("share_ids", [True, False])
def test_a_compiled_model_trains_to_the_same_losses(tmp_path: Path, share_ids: bool) -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        embedding = make(
            tmp_path / str(compiled), tables=uniform_tables(0.1, 0.2), share_ids=share_ids
        )
        model = torch.nn.Sequential(embedding, torch.nn.Flatten(), torch.nn.Linear(2 * DIM, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        losses.append([])
        for ids in torch.randint(0, 50, (4, 10, 2)):
            optimizer.zero_grad()
            loss = (run(ids) ** 2).sum()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert not math.isnan(losses[0][-1])


def test_checkpoints_take_an_embedding_along(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"rows": make(tmp_path / "a", size_factor=3, name="rows")})
    train(model["rows"], torch.optim.Adam(model.parameters()), steps=3)  # type: ignore[arg-type]
    DynamicEmbDump(str(tmp_path / "dump"), model, optim=True)
    expected = model["rows"].tables[0].state_dict()  # type: ignore[union-attr, index]
    model["rows"].close()  # type: ignore[operator]
    other = torch.nn.ModuleDict({"rows": make(tmp_path / "b", size_factor=3, name="rows")})
    DynamicEmbLoad(str(tmp_path / "dump"), other, optim=True)
    found = other["rows"].tables[0].find(expected["ids"])  # type: ignore[union-attr, index]
    assert found.found.all()
    assert torch.equal(found.embeddings, expected["embeddings"])
    assert torch.equal(found.state, expected["state"])


def test_copies_are_refused(tmp_path: Path) -> None:
    import copy
    import pickle

    embedding = make(tmp_path)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="has a folder of its own and cannot be copied"):
            copying(embedding)
