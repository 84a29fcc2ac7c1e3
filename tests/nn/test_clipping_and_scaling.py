"""clip_grad_norm_ and GradScaler act on dynamic rows as on dense weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import embedding_pair, rows_of, wild
from torch import nn

ROWS, DIM = 24, 6


def models() -> Any:
    ours, dense = embedding_pair(ROWS, DIM)
    head = nn.Linear(DIM, 1)
    other = copy.deepcopy(head)
    return (ours, head, lambda ids: head(ours(wild(ids)))), (
        dense,
        other,
        lambda ids: other(dense(ids)),
    )


def assert_same(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(
        rows_of(mine[0], ROWS), theirs[0].weight.detach(), rtol=1e-5, atol=2e-6
    )
    torch.testing.assert_close(mine[1].weight, theirs[1].weight, rtol=1e-5, atol=2e-6)


def everything(*modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize("limit", [0.01, 1.0, 1e9])
@pytest.mark.parametrize("backwards", [1, 3])
def test_clip_grad_norm(limit: float, backwards: int) -> None:
    """The norm is that of the gradient summed per row, over several backwards."""
    mine, theirs = models()
    rate = 0.5 if limit < 2.0 else 0.002
    optimizers = [torch.optim.SGD(everything(*m[:2]), lr=rate) for m in (mine, theirs)]
    for _ in range(4):
        batches = [torch.randint(0, ROWS, (40,)) for _ in range(backwards)]
        norms = []
        for (embedding, head, call), optimizer in zip((mine, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            for ids in batches:
                call(ids).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(everything(embedding, head), limit).item())
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert_same(mine, theirs)


def test_clipping_between_two_backwards() -> None:
    """What came before the clipping is scaled, what comes after is not."""
    mine, theirs = models()
    optimizers = [torch.optim.SGD(everything(*m[:2]), lr=0.5) for m in (mine, theirs)]
    ids = torch.randint(0, ROWS, (3, 20))
    for (embedding, head, call), optimizer in zip((mine, theirs), optimizers, strict=True):
        call(ids[0]).square().sum().backward()
        nn.utils.clip_grad_norm_(everything(embedding, head), 0.5)
        call(ids[1]).square().sum().backward()
        nn.utils.clip_grad_norm_(everything(embedding, head), 2.0)
        call(ids[2]).square().sum().backward()
        optimizer.step()
    assert_same(mine, theirs)


@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler(clip: bool) -> None:
    mine, theirs = models()
    optimizers = [torch.optim.Adam(everything(*m[:2]), lr=0.1) for m in (mine, theirs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for _ in range(4):
        ids = torch.cat([torch.arange(ROWS), torch.randint(0, ROWS, (10,))])
        for (embedding, head, call), optimizer, scaler in zip(
            (mine, theirs), optimizers, scalers, strict=True
        ):
            optimizer.zero_grad()
            scaler.scale(call(ids).square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(everything(embedding, head), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert_same(mine, theirs)


def test_grad_scaler_skips_a_step_that_overflowed_in_the_rows() -> None:
    mine, theirs = models()
    before = rows_of(mine[0], ROWS)
    head = mine[1].weight.detach().clone()
    for embedding, last, call in (mine, theirs):
        last.requires_grad_(False)  # the overflow is in the rows alone
        optimizer = torch.optim.SGD(everything(embedding), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((call(torch.arange(5)) * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
    assert torch.equal(rows_of(mine[0], ROWS), before)
    assert torch.equal(mine[1].weight, head)


def test_a_norm_for_monitoring_changes_nothing() -> None:
    mine, theirs = models()
    ids = torch.randint(0, ROWS, (30,))
    norms = []
    for embedding, head, call in (mine, theirs):
        call(ids).sum().backward()
        gradients = [p.grad for p in everything(embedding, head) if p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).item())
        torch.optim.SGD(everything(embedding, head), lr=0.5).step()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_same(mine, theirs)
