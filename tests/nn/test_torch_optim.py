"""torch.optim optimizers update dynamic rows as they update dense weights, or refuse clearly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import embedding_pair, rows_of, wild
from torch import nn

from dynamicemb import DynamicEmbedding, DynamicEmbeddingBag, InvalidArgumentError, UsageError

ROWS, DIM = 24, 6

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "sgd_maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "sgd_dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.2),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    # This form, the usual one on a GPU, writes into the gradients.
    "sgd_in_groups": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.8, nesterov=True, foreach=True
    ),
    "sgd_all": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95)),
    "adam_decay": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    "adam_maximize": lambda p: torch.optim.Adam(p, lr=0.02, maximize=True),
    "adam_decoupled": lambda p: torch.optim.Adam(
        p, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02)),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.02, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad_decay": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.3, weight_decay=0.05, initial_accumulator_value=0.2
    ),
}


class Model(nn.Module):
    """Ids through an embedding into two dense layers."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(ids)).squeeze(-1)


def twins() -> tuple[Model, Model]:
    """The same model twice, over dynamic and over dense rows."""
    ours, dense = embedding_pair(ROWS, DIM)
    model = Model(ours)
    other = Model(dense)
    other.layers = copy.deepcopy(model.layers)
    return model, other


def every_row(extra: int = 16) -> torch.Tensor:
    return torch.cat([torch.randperm(ROWS), torch.randint(0, ROWS, (extra,))])


def one_loss(model: Model, other: Model, ids: torch.Tensor, target: torch.Tensor) -> Any:
    return (
        nn.functional.mse_loss(model(wild(ids)), target),
        nn.functional.mse_loss(other(ids), target),
    )


def assert_same(model: Model, other: Model) -> None:
    torch.testing.assert_close(
        rows_of(model.embedding, ROWS), other.embedding.weight.detach(), rtol=1e-5, atol=2e-6
    )
    for mine, theirs in zip(model.layers.parameters(), other.layers.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_and_dense_layers_train_together(name: str) -> None:
    model, other = twins()
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, other)]
    for _ in range(15):
        ids = every_row()
        losses = one_loss(model, other, ids, torch.randn(len(ids)))
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_same(model, other)


def test_param_groups_with_their_own_rates() -> None:
    model, other = twins()

    def groups(m: Model) -> list[dict[str, Any]]:
        return [
            {"params": m.layers.parameters(), "lr": 0.01},
            {"params": m.embedding.parameters(), "lr": 0.5, "weight_decay": 0.01},
        ]

    optimizers = [torch.optim.AdamW(groups(m), lr=1.0) for m in (model, other)]
    for _ in range(10):
        ids = every_row()
        for loss, optimizer in zip(
            one_loss(model, other, ids, torch.randn(len(ids))), optimizers, strict=True
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_same(model, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=8),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    ],
)
def test_learning_rate_schedulers(make: Any) -> None:
    model, other = twins()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, other)]
    schedulers = [make(optimizer) for optimizer in optimizers]
    for _ in range(10):
        ids = every_row()
        losses = one_loss(model, other, ids, torch.randn(len(ids)))
        for loss, optimizer, scheduler in zip(losses, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    assert_same(model, other)


def test_several_modules_in_one_optimizer() -> None:
    first, one = embedding_pair(ROWS, DIM)
    second, two = embedding_pair(ROWS, DIM)
    mine = torch.optim.Adagrad([*first.parameters(), *second.parameters()], lr=0.1)
    theirs = torch.optim.Adagrad([*one.parameters(), *two.parameters()], lr=0.1)
    for _ in range(5):
        a, b = torch.randperm(ROWS), torch.randperm(ROWS)
        for optimizer, loss in (
            (mine, (first(wild(a)) * second(wild(b))).sum()),
            (theirs, (one(a) * two(b)).sum()),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(rows_of(first, ROWS), one.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows_of(second, ROWS), two.weight.detach(), rtol=1e-5, atol=1e-6)


def test_two_lookups_of_one_module_in_one_loss() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, dense)]
    for _ in range(6):
        a, b = torch.randperm(ROWS), torch.randint(0, ROWS, (ROWS,))
        losses = [
            (ours(wild(a)) * ours(wild(b))).sum(),
            (dense(a) * dense(b)).sum(),
        ]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert ours.table.iteration == 6
    torch.testing.assert_close(rows_of(ours, ROWS), dense.weight.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["sgd_nesterov", "sgd_in_groups", "adam", "adagrad"])
def test_a_closure(name: str) -> None:
    model, other = twins()
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, other)]
    for _ in range(6):
        ids = every_row()
        target = torch.randn(len(ids))
        losses = []
        for m, lookup, optimizer in (
            (model, wild(ids), optimizers[0]),
            (other, ids, optimizers[1]),
        ):

            def closure(m=m, lookup=lookup, optimizer=optimizer, target=target) -> Any:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(m(lookup), target)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same(model, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop.*SGD, Adam"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS.*SGD, Adam"),
        (lambda p: torch.optim.Adamax(p), "Adamax.*allowed"),
        (lambda p: torch.optim.SparseAdam(list(p)), "SparseAdam.*allowed"),
        (lambda p: torch.optim.RAdam(p), "RAdam.*allowed"),
        (lambda p: type("MySGD", (torch.optim.SGD,), {})(p, lr=0.1), "MySGD.*allowed"),
    ],
)
def test_a_class_without_a_rule_is_an_error_at_the_first_step(make: Any, message: str) -> None:
    model, _ = twins()
    optimizer = make(model.parameters())
    before = rows_of(model.embedding, ROWS)
    dense = [p.detach().clone() for p in model.layers.parameters()]
    ids = every_row()

    def closure() -> torch.Tensor:
        loss = model(wild(ids)).square().sum()
        loss.backward()
        return loss

    closure()
    with pytest.raises(UsageError, match=message):
        optimizer.step(closure) if "LBFGS" in message else optimizer.step()
    assert torch.equal(before, rows_of(model.embedding, ROWS))
    for parameter, expected in zip(model.layers.parameters(), dense, strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_amsgrad_is_an_error_at_the_first_step(make: Any) -> None:
    ours, _ = embedding_pair(ROWS, DIM)
    optimizer = make(ours.parameters(), amsgrad=True)
    before = rows_of(ours, ROWS)
    ours(wild(torch.arange(4))).sum().backward()
    with pytest.raises(InvalidArgumentError, match="amsgrad is True; allowed"):
        optimizer.step()
    assert torch.equal(before, rows_of(ours, ROWS))


def test_an_optimizer_without_the_module_leaves_it_alone() -> None:
    model, _ = twins()
    before = rows_of(model.embedding, ROWS)
    for make in (torch.optim.SGD, torch.optim.RMSprop):
        optimizer = make(model.layers.parameters(), lr=0.1)
        model(wild(every_row())).sum().backward()
        optimizer.step()
    assert torch.equal(before, rows_of(model.embedding, ROWS))


def test_a_fused_module_goes_with_any_optimizer() -> None:
    """Its rows are updated in backward; the optimizer has nothing to do with them."""
    module = DynamicEmbeddingBag(DIM, optimizer="sgd")
    head = nn.Linear(DIM, 1)
    optimizer = torch.optim.RMSprop([*module.parameters(), *head.parameters()])
    ids = torch.tensor([[1, 2], [3, 4]])
    before = module.table.find_or_insert(ids.reshape(-1)).embeddings
    head(module(ids)).sum().backward()
    after = module.table.find(ids.reshape(-1)).embeddings
    assert not torch.equal(before, after)
    optimizer.step()
    assert torch.equal(after, module.table.find(ids.reshape(-1)).embeddings)


def test_a_frozen_module_is_not_trained() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    ours.requires_grad_(False)
    head = nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD([*ours.parameters(), *head.parameters()], lr=1.0)
    head(ours(wild(torch.arange(ROWS)))).sum().backward()
    optimizer.step()
    assert torch.equal(rows_of(ours, ROWS), dense.weight)
    ours.requires_grad_(True)
    head(ours(wild(torch.arange(ROWS)))).sum().backward()
    optimizer.step()
    assert not torch.equal(rows_of(ours, ROWS), dense.weight)


def test_a_step_without_gradients_does_nothing() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizer = torch.optim.Adam(ours.parameters(), weight_decay=0.5)
    optimizer.step()
    with torch.no_grad():
        ours(wild(torch.arange(4)))
    optimizer.step()
    assert torch.equal(rows_of(ours, ROWS), dense.weight)
    assert ours.table.iteration == 0


def test_a_second_optimizer_of_another_kind_starts_its_own_state() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ):
        optimizers = [make(m.parameters()) for m in (ours, dense)]
        for _ in range(3):
            ids = torch.randperm(ROWS)
            gradient = torch.randn(ROWS, DIM)
            for lookup, optimizer in (
                (lambda x: ours(wild(x)), optimizers[0]),
                (dense, optimizers[1]),
            ):
                optimizer.zero_grad()
                lookup(ids).backward(gradient)
                optimizer.step()
        torch.testing.assert_close(rows_of(ours, ROWS), dense.weight.detach(), rtol=1e-5, atol=2e-6)


def test_the_optimizers_own_state_dict_round_trips() -> None:
    """The rows' state is the module's; the optimizer's holds the dense layers' alone."""
    model, _ = twins()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ids = wild(every_row())
    model(ids).sum().backward()
    optimizer.step()
    saved, content = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    again = Model(DynamicEmbedding(DIM))
    again.load_state_dict(content)
    other = torch.optim.Adam(again.parameters(), lr=0.1)
    other.load_state_dict(saved)
    for m, o in ((model, optimizer), (again, other)):
        o.zero_grad()
        m(ids).square().sum().backward()
        o.step()
    assert torch.equal(rows_of(model.embedding, ROWS), rows_of(again.embedding, ROWS))
    for mine, theirs in zip(model.layers.parameters(), again.layers.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_another_parameter_in_the_place_of_the_handle_is_refused() -> None:
    """Its gradients reach no row: training would go on, and nothing would be learnt."""
    module = DynamicEmbedding(4)
    ids = torch.arange(3)
    others = {name: one.detach().clone() for name, one in module.named_parameters()}
    with pytest.raises(UsageError, match="in the place of a dynamic embedding's handle"):
        torch.func.functional_call(module, others, (ids,))
    same = dict(module.named_parameters())
    assert torch.func.functional_call(module, same, (ids,)).requires_grad
    module.eval()
    assert torch.func.functional_call(module, others, (ids,)).shape == (3, 4)
    module.train()
    fused = DynamicEmbedding(4, optimizer="sgd")
    for one in (module, fused):
        one.handle = torch.nn.Parameter(one.handle.detach().clone())
    with pytest.raises(UsageError, match="in the place of"):
        module(ids)
    fused(ids).sum().backward()  # rows are updated in backward


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_a_parameter_of_another_value_in_the_place_of_the_handle_is_refused_in_evaluation_too(
    optimizer: str | None,
) -> None:
    """Weights of another moment, whose rows nobody looked for."""
    module = DynamicEmbedding(4, optimizer=optimizer)
    ids = torch.arange(3)
    module(ids).sum().backward()
    old = {name: one.detach().clone() for name, one in module.named_parameters()}
    for _ in range(4):
        module(ids).sum().backward()
    now = {name: one.detach().clone() for name, one in module.named_parameters()}
    for training in (True, False):
        module.train(training)
        if optimizer or not training:
            torch.func.functional_call(module, now, (ids,))
        with pytest.raises(UsageError, match="another parameter is in the place of a dynamic"):
            torch.func.functional_call(module, old, (ids,))
    module.handle = torch.nn.Parameter(torch.ones(1))
    for use in (lambda: module(ids), module.state_dict):
        with pytest.raises(UsageError, match="another parameter is in the place of a dynamic"):
            use()
