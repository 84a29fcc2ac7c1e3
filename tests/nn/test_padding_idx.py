"""padding_idx: reads zeros, is never stored, takes no gradient, is not counted in a mean."""

from __future__ import annotations

import pytest
import torch
from pairs import fill, rows_of, wild
from torch import nn

from dynamicemb import DynamicEmbedding, DynamicEmbeddingBag

ROWS, DIM = 12, 5
PAD = 7
WILD_PAD = int(wild(torch.tensor(PAD)))


@pytest.mark.parametrize("padding", [0, -1, 2**63 - 1, -(2**63)])
def test_an_embedding_reads_zeros_and_stores_nothing(padding: int) -> None:
    module = DynamicEmbedding(3, padding_idx=padding)
    ids = torch.tensor([[padding, 5], [6, padding]])
    out = module(ids)
    assert out.shape == (2, 2, 3)
    assert not out[0, 0].any()
    assert not out[1, 1].any()
    assert out[0, 1].any()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    (out * torch.arange(12.0).reshape(2, 2, 3)).sum().backward()
    before = module.table.find(torch.tensor([5, 6])).embeddings
    optimizer.step()
    moved = before - module.table.find(torch.tensor([5, 6])).embeddings
    expected = torch.tensor([[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]) * 0.5
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)
    assert not module.table.contains(torch.tensor([padding])).any()
    assert len(module.table) == 2
    assert torch.equal(module.eval()(ids)[0, 0], torch.zeros(3))


def test_only_padding() -> None:
    module = DynamicEmbedding(3, padding_idx=0)
    out = module(torch.zeros(4, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(4, 3))
    out.sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert len(module.table) == 0
    bag = DynamicEmbeddingBag(3, padding_idx=0)
    out = bag(torch.zeros(2, 4, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(2, 3))
    out.sum().backward()
    assert len(bag.table) == 0


def test_a_stored_row_of_the_padding_id_is_not_read() -> None:
    module = DynamicEmbedding(3, padding_idx=9)
    module.table.insert(torch.tensor([9]), torch.ones(1, 3))
    assert not module(torch.tensor([9])).any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_as_nn_embedding_bag(mode: str, weighted: bool) -> None:
    if weighted and mode == "mean":
        pytest.skip("weights go with mode 'sum' only")
    dense = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=PAD)
    ours = DynamicEmbeddingBag(DIM, mode=mode, padding_idx=WILD_PAD)
    fill(ours, dense.weight)
    ours.table.erase(torch.tensor([WILD_PAD]))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (ours, dense)]
    for step in range(6):
        ids = torch.randint(0, ROWS, (30,))
        ids[torch.rand(30) < 0.3] = PAD
        offsets = torch.tensor([0, 0, 7, 9, 20])
        if step == 0:
            ids[7:9] = PAD  # a bag of padding only
        weights = [torch.randn(30), None]
        weights[1] = weights[0].clone()
        given = [w.requires_grad_() if weighted else None for w in weights]
        mine = ours(wild(ids), offsets, given[0])
        theirs = dense(ids, offsets, given[1])
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        direction = torch.randn(mine.shape)
        for out, optimizer in zip((mine, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (out * direction).sum().backward()
            optimizer.step()
        if weighted:
            torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-5, atol=1e-6)
    others = torch.arange(ROWS) != PAD
    found = ours.table.find(wild(torch.arange(ROWS)))
    assert torch.equal(found.found, others)
    torch.testing.assert_close(
        found.embeddings[others], dense.weight.detach()[others], rtol=1e-5, atol=1e-6
    )


def test_an_embedding_as_nn_embedding() -> None:
    dense = nn.Embedding(ROWS, DIM, padding_idx=PAD)
    ours = DynamicEmbedding(DIM, padding_idx=WILD_PAD)
    fill(ours, dense.weight)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (ours, dense)]
    for _ in range(5):
        ids = torch.randint(0, ROWS, (3, 8))
        direction = torch.randn(3, 8, DIM)
        for lookup, optimizer in (
            (lambda x: ours(wild(x)), optimizers[0]),
            (dense, optimizers[1]),
        ):
            optimizer.zero_grad()
            (lookup(ids) * direction).sum().backward()
            optimizer.step()
        assert torch.equal(ours(wild(ids)), dense(ids))
    assert torch.equal(rows_of(ours, ROWS), dense.weight)
