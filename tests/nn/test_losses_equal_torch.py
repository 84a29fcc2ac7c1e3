"""Training beside nn.Embedding and nn.EmbeddingBag, from the same rows, gives the same losses.

nn.EmbeddingBag sums the gradients of a row in the order of a sort that is not stable. So bits can
be compared where a row occurs at most twice in a batch (a sum of two has no order), as in the
batches made by ``twice_at_most``; elsewhere losses agree within a millionth.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import bag_pair, embedding_pair, rows_of, train, wild
from torch import nn

from dynamicemb import DynamicEmbedding

ROWS, DIM, STEPS = 40, 12, 20


def batches(shape: tuple[int, ...], outputs: tuple[int, ...], *, every_row: bool = False) -> Any:
    """Random ids with duplicates; ``every_row``: all rows occur in every batch."""
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, ROWS, shape)
        if every_row:
            flat = ids.reshape(-1)
            flat[:ROWS] = torch.randperm(ROWS)
        made.append((ids, torch.randn(outputs)))
    return made


def twice_at_most(count: int) -> torch.Tensor:
    return torch.cat([torch.randperm(ROWS), torch.randperm(ROWS)])[:count]


def both_losses(ours: Any, dense: Any, ids_and_targets: Any, optimizer: Any) -> Any:
    head = nn.Linear(DIM, 1)
    other = copy.deepcopy(head)
    parameters = [*ours.parameters(), *head.parameters()]
    mine = train(lambda ids: ours(wild(ids)), head, [optimizer(parameters)], ids_and_targets)
    parameters = [*dense.parameters(), *other.parameters()]
    theirs = train(dense, other, [optimizer(parameters)], ids_and_targets)
    return mine, theirs


@pytest.mark.not_on_a_gpu  # torch adds gradients in another order there
def test_sgd_on_an_embedding_is_bit_equal() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    data = batches((6, 9), (6, 9))
    mine, theirs = both_losses(ours, dense, data, lambda p: torch.optim.SGD(p, lr=0.3))
    assert mine == theirs
    assert mine[-1] != mine[0]
    assert torch.equal(rows_of(ours, ROWS), dense.weight)


def test_sgd_on_summed_bags_is_bit_equal() -> None:
    ours, dense = bag_pair(ROWS, DIM)
    data = [(twice_at_most(56).reshape(8, 7), torch.randn(8)) for _ in range(STEPS)]
    mine, theirs = both_losses(ours, dense, data, lambda p: torch.optim.SGD(p, lr=0.01))
    assert mine == theirs
    assert mine[-1] != mine[0]
    assert torch.equal(rows_of(ours, ROWS), dense.weight)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sgd_on_bags_with_many_duplicates(mode: str) -> None:
    ours, dense = bag_pair(ROWS, DIM, mode=mode)
    data = batches((16, 8), (16,))
    mine, theirs = both_losses(ours, dense, data, lambda p: torch.optim.SGD(p, lr=0.01))
    assert mine == pytest.approx(theirs, rel=1e-6)
    torch.testing.assert_close(rows_of(ours, ROWS), dense.weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_sgd_on_bags_of_a_flat_input(mode: str, include_last_offset: bool) -> None:
    ours, dense = bag_pair(ROWS, DIM, mode=mode, include_last_offset=include_last_offset)
    head = nn.Linear(DIM, 1)
    other = copy.deepcopy(head)
    losses: dict[str, list[float]] = {"ours": [], "torch": []}
    lengths = [torch.randint(0, 6, (9,)) for _ in range(STEPS)]
    inputs = [twice_at_most(int(n.sum())) for n in lengths]
    targets = torch.randn(STEPS, 9)
    for name, lookup, last in (
        ("ours", lambda ids, offsets: ours(wild(ids), offsets), head),
        ("torch", dense, other),
    ):
        module = ours if name == "ours" else dense
        optimizer = torch.optim.SGD([*module.parameters(), *last.parameters()], lr=0.01)
        for n, ids, target in zip(lengths, inputs, targets, strict=True):
            ends = n.cumsum(0)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
            if not include_last_offset:
                offsets = offsets[:-1]
            loss = nn.functional.mse_loss(last(lookup(ids, offsets)).squeeze(-1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    if mode == "sum":
        assert losses["ours"] == losses["torch"]
    assert losses["ours"] == pytest.approx(losses["torch"], rel=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.05),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.2),
    ],
    ids=["momentum", "adam", "adamw", "adagrad"],
)
@pytest.mark.parametrize("kind", ["embedding", "sum", "mean"])
def test_other_optimizers_within_a_millionth(optimizer: Any, kind: str) -> None:
    if kind == "embedding":
        ours, dense = embedding_pair(ROWS, DIM)
        data = batches((8, 8), (8, 8), every_row=True)
    else:
        ours, dense = bag_pair(ROWS, DIM, mode=kind)
        data = batches((8, 8), (8,), every_row=True)
    mine, theirs = both_losses(ours, dense, data, optimizer)
    assert mine == pytest.approx(theirs, rel=1e-6)


def test_adam_when_steps_touch_different_rows() -> None:
    """Lazy moments: the rows a step does not touch stay, as torch's SparseAdam has it."""
    ours, _ = embedding_pair(ROWS, DIM)
    dense = nn.Embedding(ROWS, DIM, sparse=True)
    dense.weight.data.copy_(rows_of(ours, ROWS))
    head = nn.Linear(DIM, 1)
    head.requires_grad_(False)
    data = batches((9,), (9,))
    losses = []
    for module, lookup, make in (
        (ours, lambda ids: ours(wild(ids)), torch.optim.Adam),
        (dense, dense, torch.optim.SparseAdam),
    ):
        # SparseAdam adds eps before the bias correction; without eps the two rules are one.
        optimizer = make(list(module.parameters()), lr=0.05, eps=1e-30)
        losses.append(train(lookup, head, [optimizer], data))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(rows_of(ours, ROWS), dense.weight.detach(), rtol=2e-6, atol=1e-6)


def test_new_rows_are_trained_like_rows_that_were_there() -> None:
    """Rows that come in the middle of a run: the table never saw them before."""
    torch.manual_seed(1)
    data = batches((9,), (9,))
    head = nn.Linear(DIM, 1)
    late = DynamicEmbedding(DIM, seed=5)
    early = DynamicEmbedding(DIM, seed=5)
    early(wild(torch.arange(ROWS)))  # all rows exist before the first step
    losses = []
    for module in (late, early):
        last = copy.deepcopy(head)
        optimizer = torch.optim.Adam([*module.parameters(), *last.parameters()], lr=0.1)
        losses.append(train(lambda ids, m=module: m(wild(ids)), last, [optimizer], data))
    assert losses[0] == losses[1]
