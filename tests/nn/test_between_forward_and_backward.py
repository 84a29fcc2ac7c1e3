"""Other lookups, growth, eviction, erasing and loading between a forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import table_options

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbScoreStrategy,
    OptimizerArgs,
)

STEP = DynamicEmbScoreStrategy.STEP


def fused(dim: int = 2, rule: str = "sgd", **changes: Any) -> DynamicEmbedding:
    return DynamicEmbedding(
        dim,
        options=table_options(dim, score_strategy=STEP, **changes),
        optimizer=rule,
        optimizer_args=OptimizerArgs(learning_rate=0.5),
        seed=1,
    )


def row(module: Any, id_: int) -> list[float]:
    return module.table.find(torch.tensor([id_])).embeddings[0].tolist()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_forward_a_forward_b_then_the_backwards(order: tuple[int, int]) -> None:
    module = fused()
    outs = [module(torch.tensor([1, 2])), module(torch.tensor([2, 3, 3]))]
    for which in order:
        outs[which].sum().backward()
    assert [row(module, id_)[0] for id_ in (1, 2, 3)] == [0.5, 0.0, 0.0]
    assert module.table.iteration == 2


def test_batched_forward_a_forward_b_backward_a_backward_b() -> None:
    results = []
    for interleaved in (False, True):
        torch.manual_seed(0)
        module = BatchedDynamicEmbeddingTables(
            [table_options(3), table_options(4)], learning_rate=0.5
        )
        offsets = torch.tensor([0, 5, 10, 15, 20])
        ids = [torch.randint(0, 12, (20,)) for _ in range(2)]
        gradients = torch.randn(2, 2, 7)
        module(torch.arange(12).repeat(2), torch.tensor([0, 6, 12, 18, 24]))
        if interleaved:
            outs = [module(one, offsets) for one in ids]
            for out, gradient in zip(outs, gradients, strict=True):
                out.backward(gradient)
        else:
            for one, gradient in zip(ids, gradients, strict=True):
                module(one, offsets).backward(gradient)
        results.append([t.find(torch.arange(12)).embeddings for t in module.tables])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("rule", ["sgd", "adam", "exact_row_wise_adagrad"])
def test_growth(rule: str) -> None:
    grown = fused(rule=rule, max_capacity=4096, init_capacity=16, bucket_capacity=16)
    still = fused(rule=rule, max_capacity=4096, bucket_capacity=16)
    ids = torch.arange(8)
    gradient = torch.randn(8, 2)
    for module in (grown, still):
        out = module(ids)
        module(torch.arange(100, 900))
        out.backward(gradient)
    assert grown.table.capacity > 16
    mine, theirs = grown.table.find(ids), still.table.find(ids)
    assert torch.equal(mine.embeddings, theirs.embeddings)
    assert torch.equal(mine.state, theirs.state)
    assert grown.table.stats().dropped_gradients == 0


def test_eviction_drops_the_gradient_and_counts_it() -> None:
    """The slot belongs to another id now: that row must not move."""
    module = fused(max_capacity=16, bucket_capacity=16)
    out = module(torch.arange(16))
    module(torch.arange(100, 110))  # takes the slots of ten of them
    gone = ~module.table.contains(torch.arange(16))
    assert int(gone.sum()) == 10
    out.sum().backward()
    assert module.table.stats().dropped_gradients == 10
    rows = module.table.find(torch.arange(16)).embeddings[:, 0]
    assert torch.equal(rows, torch.where(gone, 0.0, 0.5))
    assert (module.table.find(torch.arange(100, 110)).embeddings == 1.0).all()


def test_an_evicted_id_that_came_back_takes_its_gradient() -> None:
    module = fused(max_capacity=16, bucket_capacity=16)
    out = module(torch.tensor([1]))
    module(torch.arange(100, 116))
    assert not module.table.contains(torch.tensor([1])).any()
    module(torch.tensor([1]))
    out.sum().backward()
    assert row(module, 1) == [0.5, 0.5]


def test_erase_and_clear() -> None:
    module = fused()
    out = module(torch.tensor([1, 2, 3]))
    module.table.erase(torch.tensor([2]))
    out.sum().backward()
    assert module.table.stats().dropped_gradients == 1
    assert row(module, 1) == row(module, 3) == [0.5, 0.5]
    out = module(torch.tensor([1, 2, 3]))
    module.table.clear()
    out.sum().backward()
    assert module.table.stats().dropped_gradients == 4
    assert len(module.table) == 0


def test_eviction_with_weights_and_waiting_gradients() -> None:
    module = BatchedDynamicEmbeddingTables(
        [table_options(2, max_capacity=16, bucket_capacity=16, score_strategy=STEP)],
        separate_step=True,
        learning_rate=0.5,
    )
    weights = torch.full((16,), 2.0, requires_grad=True)
    module(torch.arange(16), torch.tensor([0, 16]), weights).sum().backward()
    module(torch.arange(100, 110), torch.tensor([0, 10]))
    module.step()
    table = module.tables[0]
    kept = table.contains(torch.arange(16))
    assert (table.find(torch.arange(16)[kept]).embeddings == 0.0).all()
    assert (table.find(torch.arange(100, 110)).embeddings == 1.0).all()
    assert table.stats().dropped_gradients == 10


def test_another_optimizer_changes_the_rows_layout_in_between() -> None:
    module = DynamicEmbedding(3, options=table_options(3))
    sgd = torch.optim.SGD(module.parameters(), lr=0.5)
    first = module(torch.arange(4))
    second = module(torch.arange(4))
    first.sum().backward()
    sgd.step()
    sgd.zero_grad()
    adam = torch.optim.Adam(module.parameters(), lr=0.5)
    second.sum().backward()
    adam.step()
    rows = module.table.find(torch.arange(4)).embeddings
    assert (rows < 0.5).all()
    assert module.table.state_dim == 6


def test_loading_a_state_in_between() -> None:
    module = fused()
    module(torch.tensor([1, 2]))
    saved = module.state_dict()
    out = module(torch.tensor([2, 3]))
    module.load_state_dict(saved)
    out.sum().backward()
    assert row(module, 1) == [1.0, 1.0]
    assert row(module, 2) == [0.5, 0.5]
    assert not module.table.contains(torch.tensor([3])).any()


@pytest.mark.parametrize("what", ["offsets", "weights"])
def test_offsets_and_weights_that_are_changed_in_place_are_refused(what: str) -> None:
    """As for every tensor that a backward needs."""
    module = BatchedDynamicEmbeddingTables([table_options(2)])
    ids, offsets, weights = torch.arange(4), torch.tensor([0, 2, 4]), torch.ones(4)
    out = module(ids, offsets, weights)
    (offsets if what == "offsets" else weights).fill_(10**12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert (module.tables[0].find(ids).embeddings == 1.0).all()


def test_ids_that_the_caller_overwrites_before_the_table_grows() -> None:
    module = fused(max_capacity=4096, init_capacity=16, bucket_capacity=16)
    ids = torch.arange(8)
    out = module(ids)
    ids.fill_(99)
    module(torch.arange(100, 900))
    out.sum().backward()
    assert (module.table.find(torch.arange(8)).embeddings == 0.5).all()
    assert not module.table.contains(torch.tensor([99])).any()


def test_ids_that_the_caller_overwrites_after_forward() -> None:
    """A loader may reuse its buffer; the lookup still means the ids it was called with."""
    module = fused()
    ids = torch.tensor([1, 2])
    out = module(ids)
    ids.fill_(7)
    out.sum().backward()
    assert row(module, 1) == row(module, 2) == [0.5, 0.5]
    assert not module.table.contains(torch.tensor([7])).any()


@pytest.mark.parametrize("leave", ["erase", "clear"])
def test_a_row_that_left_before_it_was_read_takes_its_gradient_when_it_is_back(leave: str) -> None:
    module = BatchedDynamicEmbeddingTables(
        [table_options(1, score_strategy=STEP)], learning_rate=1.0, seed=1
    )
    (table,) = module.tables
    ids, offsets = torch.tensor([7, 8]), torch.tensor([0, 1, 2])
    module.prefetch(ids, offsets)
    if leave == "erase":
        table.erase(ids)
    else:
        table.clear()
    out = module(ids, offsets)
    module(torch.tensor([8, 9]), offsets)
    fresh = table.find(torch.tensor([8])).embeddings
    out.sum().backward()
    assert torch.equal(table.find(torch.tensor([8])).embeddings, fresh - 1.0)
    assert table.stats().dropped_gradients == 1  # that of 7
