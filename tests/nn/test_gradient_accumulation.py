"""Gradients wait for a step: they add up, zero_grad forgets them, memory stays bounded."""

from __future__ import annotations

import gc
import resource
import threading
from typing import Any

import pytest
import torch
from pairs import embedding_pair, rows_of, table_options, wild
from torch import nn

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbedding, UsageError

ROWS, DIM = 24, 6


def step_both(ours: Any, dense: Any, optimizers: Any, batches: Any) -> None:
    for ids, gradient in batches:
        ours(wild(ids)).backward(gradient)
        dense(ids).backward(gradient)
    for optimizer in optimizers:
        optimizer.step()


def random_batches(count: int, size: int = 10) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(0, ROWS, (size,)), torch.randn(size, DIM)) for _ in range(count)]


def assert_same(ours: Any, dense: Any) -> None:
    torch.testing.assert_close(rows_of(ours, ROWS), dense.weight.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backwards", [1, 2, 3, 4, 5, 6, 11])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_several_backwards_make_one_step(backwards: int, set_to_none: bool) -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (ours, dense)]
    everything = (torch.arange(ROWS), torch.randn(ROWS, DIM))  # dense Adam moves every row
    for step in range(3):
        step_both(ours, dense, optimizers, [everything, *random_batches(backwards - 1)])
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        assert ours.table.iteration == step + 1
    assert_same(ours, dense)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("through", ["optimizer", "module"])
@pytest.mark.parametrize("backwards", [1, 7])
def test_zero_grad_forgets(set_to_none: bool, through: str, backwards: int) -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, dense)]
    for ids, gradient in random_batches(backwards):
        ours(wild(ids)).backward(gradient)
    if through == "optimizer":
        optimizers[0].zero_grad(set_to_none=set_to_none)
    else:
        ours.zero_grad(set_to_none=set_to_none)
    optimizers[0].step()
    assert torch.equal(rows_of(ours, ROWS), dense.weight)
    step_both(ours, dense, optimizers, random_batches(2))
    assert_same(ours, dense)


@pytest.mark.parametrize("gradient", [0.0, 1e-30])
def test_zero_grad_forgets_gradients_whose_norm_is_zero(gradient: float) -> None:
    """Adam would still move rows by its momentum."""
    ours, _ = embedding_pair(ROWS, DIM)
    optimizer = torch.optim.Adam(ours.parameters(), lr=0.5)
    ours(wild(torch.arange(4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (ours(wild(torch.arange(4))) * gradient).sum().backward()
    optimizer.zero_grad()
    before = rows_of(ours, ROWS)
    optimizer.step()
    assert torch.equal(rows_of(ours, ROWS), before)


def test_a_gradient_of_zero_is_a_gradient() -> None:
    """A step with it moves rows by momentum, as it does dense ones."""
    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (ours, dense)]
    everything = torch.arange(ROWS)
    for gradient in (torch.randn(ROWS, DIM), torch.zeros(ROWS, DIM)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        step_both(ours, dense, optimizers, [(everything, gradient)])
    assert_same(ours, dense)


def test_a_grad_of_none_by_hand_forgets() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    ours(wild(torch.arange(4))).sum().backward()
    for parameter in ours.parameters():
        parameter.grad = None
    optimizer.step()
    assert torch.equal(rows_of(ours, ROWS), dense.weight)


@pytest.mark.parametrize("backwards", [1, 2, 7])
def test_a_second_step_without_zero_grad_uses_the_gradient_again(backwards: int) -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (ours, dense)]
    batches = [(torch.arange(ROWS), torch.randn(ROWS, DIM)), *random_batches(backwards - 1)]
    step_both(ours, dense, optimizers, batches)
    for optimizer in optimizers:
        optimizer.step()
    assert_same(ours, dense)
    step_both(ours, dense, optimizers, random_batches(1))  # and then adds the next to it
    assert_same(ours, dense)


def test_autograd_grad_keeps_nothing() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, dense)]
    scale = torch.ones(4, 1, requires_grad=True)
    head = nn.Linear(DIM, 1)
    loss = head(ours(wild(torch.arange(4))) * scale).sum()
    torch.autograd.grad(loss, [scale, *head.parameters()])
    torch.autograd.grad(ours(wild(torch.arange(4))).sum(), ours.parameters())
    step_both(ours, dense, optimizers, random_batches(1))
    assert_same(ours, dense)


def test_backward_with_inputs_that_leave_the_rows_out() -> None:
    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, dense)]
    head = nn.Linear(DIM, 1)
    head(ours(wild(torch.arange(4)))).sum().backward(inputs=list(head.parameters()))
    step_both(ours, dense, optimizers, random_batches(1))
    assert_same(ours, dense)


def test_a_second_backward_through_one_lookup_is_refused() -> None:
    ours, _ = embedding_pair(ROWS, DIM)
    loss = ours(wild(torch.arange(4))).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="second time"):
        loss.backward()


@pytest.mark.not_on_a_gpu  # one thread of autograd does all backwards of a device
def test_backwards_in_two_threads_at_once_are_refused() -> None:
    """They would share what waits for the step; dense gradients are only added up."""
    module = DynamicEmbedding(4)
    reached, go_on = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            reached.set()
            assert go_on.wait(600)
            return gradient

    # Of two lookups in one backward, the later one comes first; the other waits.
    first = Waits.apply(module(torch.arange(4)))
    loss = first.sum() + module(torch.arange(4)).sum()
    other = module(torch.arange(2)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    try:
        assert reached.wait(600)
        with pytest.raises(UsageError, match="two threads at once"):
            other.backward()
    finally:
        go_on.set()
        thread.join()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = module.table.find(torch.arange(4)).embeddings
    optimizer.step()
    assert torch.allclose(before - module.table.find(torch.arange(4)).embeddings, torch.tensor(2.0))


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("on purpose")

    ours, dense = embedding_pair(ROWS, DIM)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, dense)]
    with pytest.raises(RuntimeError, match="on purpose"):
        Fails.apply(ours(wild(torch.arange(4)))).sum().backward()
    step_both(ours, dense, optimizers, random_batches(1))
    assert_same(ours, dense)


def test_many_backwards_without_a_step_do_not_grow_memory() -> None:
    module = DynamicEmbedding(64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ids = torch.arange(2000)

    def backwards(count: int) -> int:
        for _ in range(count):
            module(ids).sum().backward()
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    start = backwards(20)
    assert backwards(120) - start < 25_000  # kB; keeping all gradients would take 60 MB
    before = module.table.find(ids).embeddings
    optimizer.step()
    moved = before - module.table.find(ids).embeddings
    torch.testing.assert_close(moved, torch.full((2000, 64), 14.0), rtol=1e-4, atol=1e-4)


def batched(**changes: Any) -> BatchedDynamicEmbeddingTables:
    return BatchedDynamicEmbeddingTables(
        [table_options(3), table_options(5)], learning_rate=0.5, **changes
    )


def test_separate_step_sums_the_backwards_since_the_last_step() -> None:
    module = batched(separate_step=True)
    offsets = torch.tensor([0, 2, 3])
    for ids in (torch.tensor([1, 2, 7]), torch.tensor([1, 1, 8]), torch.tensor([1, 3, 7])):
        module(ids, offsets).sum().backward()
    assert module.tables[0].find(torch.tensor([1])).embeddings.tolist() == [[1.0] * 3]
    module.step()
    rows = [
        t.find(torch.tensor(i)).embeddings[:, 0].tolist()
        for t, i in zip(module.tables, ([1, 2, 3], [7, 8]), strict=True)
    ]
    assert rows == [[1 - 4 * 0.5, 0.5, 0.5], [0.0, 0.5]]
    module.step()  # nothing new
    assert module.tables[0].find(torch.tensor([1])).embeddings[0, 0] == -1.0
    assert [table.iteration for table in module.tables] == [1, 1]


def test_separate_step_equals_the_fused_update_for_one_backward() -> None:
    results = []
    for separate in (False, True):
        torch.manual_seed(3)
        module = BatchedDynamicEmbeddingTables(
            [table_options(3), table_options(5)],
            optimizer="adam",
            seed=1,
            separate_step=separate,
            learning_rate=0.1,
        )
        for _ in range(4):
            ids = torch.randint(0, 20, (12,))
            offsets = torch.tensor([0, 3, 6, 9, 12])
            module(ids, offsets).backward(torch.randn(2, 8))
            if separate:
                module.step()
        results.append([table.find(torch.arange(20)) for table in module.tables])
    for fused, stepped in zip(*results, strict=True):
        assert torch.equal(fused.embeddings, stepped.embeddings)
        assert torch.equal(fused.state, stepped.state)


def test_separate_step_zero_grad_forgets() -> None:
    module = batched(separate_step=True)
    module(torch.tensor([1, 7]), torch.tensor([0, 1, 2])).sum().backward()
    module.zero_grad()
    module.step()
    assert module.tables[0].find(torch.tensor([1])).embeddings.tolist() == [[1.0] * 3]


def test_separate_step_under_a_torch_optimizer() -> None:
    module = batched(separate_step=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    module(torch.tensor([1, 7]), torch.tensor([0, 1, 2])).sum().backward()
    optimizer.step()
    assert module.tables[0].find(torch.tensor([1])).embeddings.tolist() == [[0.75] * 3]


def test_step_on_a_fused_module_is_refused() -> None:
    with pytest.raises(UsageError, match=r"step\(\).*fused"):
        batched().step()


def test_clipping_with_separate_steps_acts_on_every_backward() -> None:
    module = BatchedDynamicEmbeddingTables(
        [table_options(2)],
        separate_step=True,
        learning_rate=1.0,
        gradient_clipping=True,
        max_gradient=0.5,
    )
    for _ in range(3):
        module(torch.tensor([1]), torch.tensor([0, 1])).backward(torch.tensor([[9.0, 0.25]]))
    module.step()
    rows = module.tables[0].find(torch.tensor([1])).embeddings
    assert rows.tolist() == [[1 - 1.5, 1 - 0.75]]
