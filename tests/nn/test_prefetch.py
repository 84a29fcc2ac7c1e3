"""prefetch: first in, first out, the same bits as without, and rows that stay until used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import table_options

from dynamicemb import (
    ArgumentTypeError,
    BatchedDynamicEmbeddingTables,
    DynamicEmbScoreStrategy,
    InvalidArgumentError,
    UsageError,
)

OFFSETS = torch.tensor([0, 10, 20, 30, 40])


def module_of(**changes: Any) -> BatchedDynamicEmbeddingTables:
    fields: dict[str, Any] = {"max_capacity": 64, "bucket_capacity": 16} | changes
    fields["score_strategy"] = DynamicEmbScoreStrategy.STEP
    return BatchedDynamicEmbeddingTables(
        [table_options(3, **fields), table_options(5, **fields)],
        optimizer="adam",
        learning_rate=0.1,
        seed=1,
    )


def batches(count: int, ids: int = 30) -> list[torch.Tensor]:
    return [torch.randint(0, ids, (40,)) for _ in range(count)]


def contents(module: BatchedDynamicEmbeddingTables) -> list[torch.Tensor]:
    return [tensor for table in module.tables for tensor in table.state_dict().values()]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_same_bits_as_without(depth: int) -> None:
    data = batches(12)
    gradients = torch.randn(12, 2, 8)
    plain, ahead = module_of(), module_of()
    outputs: list[list[torch.Tensor]] = [[], []]
    for ids, gradient in zip(data, gradients, strict=True):
        out = plain(ids, OFFSETS)
        outputs[0].append(out.detach())
        out.backward(gradient)
    for ids in data[:depth]:
        ahead.prefetch(ids, OFFSETS)
    for step, (ids, gradient) in enumerate(zip(data, gradients, strict=True)):
        if step + depth < len(data):
            ahead.prefetch(data[step + depth], OFFSETS)
        out = ahead(ids, OFFSETS)
        outputs[1].append(out.detach())
        out.backward(gradient)
    for one, two in zip(*outputs, strict=True):
        assert torch.equal(one, two)
    for one, two in zip(contents(plain), contents(ahead), strict=True):
        assert torch.equal(one, two)


def test_rows_of_prefetched_batches_are_not_evicted_by_later_ones() -> None:
    module = BatchedDynamicEmbeddingTables(
        [table_options(2, max_capacity=16, bucket_capacity=16)], learning_rate=0.5
    )
    first, second = torch.arange(10), torch.arange(100, 110)
    module.prefetch(first, torch.tensor([0, 10]))
    module.prefetch(second, torch.tensor([0, 10]))  # six free slots, four find none
    assert module.tables[0].contains(first).all()
    assert module.tables[0].stats().failures == 4
    module(first, torch.tensor([0, 10])).sum().backward()
    assert (module.tables[0].find(first).embeddings == 0.5).all()
    assert module.tables[0].stats().dropped_gradients == 0


def test_another_batch_than_the_oldest_is_refused_and_nothing_is_lost() -> None:
    module = module_of()
    one, two = batches(2)
    module.prefetch(one, OFFSETS)
    with pytest.raises(UsageError, match="prefetched"):
        module(two, OFFSETS)
    with pytest.raises(UsageError, match="prefetched"):
        module(torch.arange(400), 10 * OFFSETS)
    with pytest.raises(UsageError, match="prefetched"):
        module(one, torch.tensor([0, 10, 25, 30, 40]))
    module(one, OFFSETS).sum().backward()
    module(two, OFFSETS).sum().backward()


def test_frequency_counters_are_occurrences() -> None:
    module = BatchedDynamicEmbeddingTables(
        [table_options(2, score_strategy=DynamicEmbScoreStrategy.LFU)]
    )
    ids, offsets = torch.tensor([4, 5, 4]), torch.tensor([0, 3])
    module.prefetch(ids, offsets, frequency_counters=torch.tensor([10, 20, 5]))
    module(ids, offsets)
    assert module.tables[0].find(torch.tensor([4, 5])).scores.tolist() == [15, 20]
    with pytest.raises(ArgumentTypeError, match="frequency_counters"):
        module.prefetch(ids, offsets, frequency_counters=[1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="counts"):
        module.prefetch(ids, offsets, frequency_counters=torch.tensor([1, 0, 1]))
    assert module.tables[0].find(torch.tensor([4, 5])).scores.tolist() == [15, 20]


def test_evaluation_between_prefetch_and_forward() -> None:
    module = module_of()
    (ids,) = batches(1)
    module.prefetch(ids, OFFSETS)
    module.eval()
    sizes = [len(table) for table in module.tables]
    module.prefetch(torch.arange(1000, 1040), OFFSETS)  # nothing to do in evaluation
    module(torch.arange(1000, 1040), OFFSETS)
    assert [len(table) for table in module.tables] == sizes
    module.train()
    module(ids, OFFSETS).sum().backward()


def test_growth_between_prefetch_and_forward() -> None:
    small = {"max_capacity": 4096, "init_capacity": 16}
    module, other = module_of(**small), module_of(**small)
    data = [torch.arange(40 * step, 40 * step + 40) for step in range(20)]
    for ids in data:
        module.prefetch(ids, OFFSETS)
    assert module.tables[0].capacity > 16
    for ids in data:
        assert torch.equal(module(ids, OFFSETS), other(ids, OFFSETS))


def test_a_buffer_that_the_caller_reuses() -> None:
    module, other = module_of(), module_of()
    data = batches(4)
    buffer = torch.empty_like(data[0])
    for ids in data:
        buffer.copy_(ids)
        module.prefetch(buffer, OFFSETS)
    for ids in data:
        assert torch.equal(module(ids, OFFSETS), other(ids, OFFSETS))


def test_counted_once() -> None:
    module = module_of()
    (ids,) = batches(1)
    module.prefetch(ids, OFFSETS)
    module(ids, OFFSETS)
    assert module.get_score() == {"t0": 2, "t1": 2}
