"""Admission inside training: who gets a row, what a rejected id reads, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pairs import constant, table_options

from dynamicemb import (
    AdmissionStrategy,
    ArgumentTypeError,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbInitializerArgs,
    DynamicEmbScoreStrategy,
    FrequencyAdmissionStrategy,
    InvalidArgumentError,
    KVCounter,
    OptimizerArgs,
    ProbabilityAdmissionStrategy,
)


def module_of(strategy: Any, counter: Any = None, **changes: Any) -> DynamicEmbedding:
    return DynamicEmbedding(
        3,
        options=table_options(3, admit_strategy=strategy, admission_counter=counter, **changes),
        optimizer="sgd",
        optimizer_args=OptimizerArgs(learning_rate=0.5),
        seed=1,
    )


def stored(module: Any, *ids: int) -> list[bool]:
    return module.table.contains(torch.tensor(ids)).tolist()


def test_frequency_counts_occurrences_over_batches() -> None:
    module = module_of(FrequencyAdmissionStrategy(3), KVCounter(1024))
    module(torch.tensor([1, 1, 2]))
    assert stored(module, 1, 2) == [False, False]
    module(torch.tensor([1, 2, 3, 3, 3]))
    assert stored(module, 1, 2, 3) == [True, False, True]
    module(torch.tensor([2]))
    assert stored(module, 2) == [True]
    assert module.table.stats().rejections == 3


def test_frequency_without_gradient_or_in_evaluation() -> None:
    module = module_of(FrequencyAdmissionStrategy(2), KVCounter(1024))
    module.eval()
    for _ in range(3):
        module(torch.tensor([1]))
    module.train()
    module(torch.tensor([1]))
    assert stored(module, 1) == [False]
    with torch.no_grad():
        module(torch.tensor([1]))
    assert stored(module, 1) == [True]


def test_counts_outlive_eviction() -> None:
    module = module_of(
        FrequencyAdmissionStrategy(2),
        KVCounter(1024),
        max_capacity=16,
        bucket_capacity=16,
        score_strategy=DynamicEmbScoreStrategy.STEP,
    )
    module(torch.tensor([1, 1]))
    assert stored(module, 1) == [True]
    others = torch.arange(100, 116)
    module(torch.cat([others, others]))
    assert stored(module, 1) == [False]
    module(torch.tensor([1]))  # one occurrence is enough: it was counted before
    assert stored(module, 1) == [True]


def test_rejected_ids_read_their_own_initialiser() -> None:
    module = module_of(FrequencyAdmissionStrategy(2, constant(0.25)), KVCounter(1024))
    assert module(torch.tensor([1])).tolist() == [[0.25] * 3]
    assert module(torch.tensor([1, 2])).tolist() == [[1.0] * 3, [0.25] * 3]
    assert module.eval()(torch.tensor([1, 2])).tolist() == [[1.0] * 3, [0.0] * 3]


def test_without_their_own_they_read_what_they_would_start_from() -> None:
    uniform = DynamicEmbInitializerArgs()
    module = module_of(FrequencyAdmissionStrategy(2), KVCounter(1024), initializer_args=uniform)
    ids = torch.arange(20)
    rejected = module(ids)
    assert len(module.table) == 0
    assert torch.equal(module(ids), rejected)
    assert len(module.table) == 20


def test_rejected_ids_take_no_gradient() -> None:
    module = module_of(FrequencyAdmissionStrategy(2, constant(0.25)), KVCounter(1024))
    module(torch.tensor([1, 2, 2])).sum().backward()
    assert module.table.stats().dropped_gradients == 0  # rejected, not lost
    assert len(module.table) == 1
    assert module.table.find(torch.tensor([2])).embeddings.tolist() == [[0.0] * 3]
    assert module(torch.tensor([1])).tolist() == [[1.0] * 3]


def test_rejected_ids_in_weighted_bags() -> None:
    options = table_options(
        2,
        admit_strategy=FrequencyAdmissionStrategy(2, constant(0.5)),
        admission_counter=KVCounter(64),
    )
    bag = DynamicEmbeddingBag(2, mode="sum", options=options)
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    out = bag(torch.tensor([1, 2, 2]), torch.tensor([0]), weights)
    assert out.tolist() == [[5.5, 5.5]]
    out.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [1.0, 2.0, 2.0]
    mean = DynamicEmbeddingBag(2, mode="mean", options=options)
    assert mean(torch.tensor([[1, 2, 2]])).tolist() == [[pytest.approx(2.5 / 3)] * 2]


@pytest.mark.parametrize(("probability", "repeats"), [(0.1, 1), (0.1, 5), (0.5, 2), (0.01, 30)])
@pytest.mark.parametrize("one_batch", [True, False])
def test_probability_of_being_in_after_k_sightings(
    probability: float, repeats: int, one_batch: bool
) -> None:
    count = 20_000
    module = module_of(ProbabilityAdmissionStrategy(probability, seed=3), max_capacity=2 * count)
    ids = torch.arange(count) * 7919
    if one_batch:
        module(ids.repeat(repeats))
    else:
        for _ in range(repeats):
            module(ids)
    expected = 1 - (1 - probability) ** repeats
    sigma = math.sqrt(count * expected * (1 - expected))
    assert abs(len(module.table) - count * expected) < 4 * sigma


def test_probability_is_deterministic_and_per_table() -> None:
    strategy = ProbabilityAdmissionStrategy(0.5, seed=3)
    first, second = module_of(strategy), module_of(strategy)
    for module in (first, second):
        for step in range(3):
            module(torch.arange(200) + 50 * step)
    assert torch.equal(
        first.table.state_dict()["ids"].sort()[0], second.table.state_dict()["ids"].sort()[0]
    )


class OddIds(AdmissionStrategy):
    """Admits odd ids; writes 10, 11, 12, ... into the rejected rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        self.calls.append((keys.tolist(), frequencies.tolist()))
        return keys % 2 == 1

    def initialize_non_admitted_embeddings(
        self, buffer: torch.Tensor, indices: torch.Tensor
    ) -> None:
        buffer[indices] = 10.0 + torch.arange(len(indices), dtype=buffer.dtype)[:, None]


def test_a_strategy_of_the_users() -> None:
    strategy = OddIds()
    module = module_of(strategy)
    out = module(torch.tensor([4, 1, 6, 4]))
    assert out[:, 0].tolist() == [10.0, 1.0, 11.0, 10.0]
    assert strategy.calls == [([4, 1, 6], [2, 1, 1])]
    out.sum().backward()
    assert stored(module, 1, 4, 6) == [True, False, False]
    module(torch.tensor([1, 1]))  # nothing is missing: the strategy is not asked
    assert len(strategy.calls) == 1
    assert module.eval()(torch.tensor([4]))[0, 0] == 0.0


def test_a_strategy_of_the_users_in_half_precision() -> None:
    module = DynamicEmbedding(
        3, options=table_options(3, admit_strategy=OddIds(), embedding_dtype=torch.bfloat16)
    )
    assert module(torch.tensor([4, 6])).tolist() == [[10.0] * 3, [11.0] * 3]


class Bad(AdmissionStrategy):
    def __init__(self, result: Any) -> None:
        self.result = result

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (torch.ones(3), ArgumentTypeError, "Bad.admit.*bool"),
        (torch.ones(2, dtype=torch.bool), InvalidArgumentError, r"Bad.admit.*\(2,\).*\(3,\)"),
        (torch.ones(3, 1, dtype=torch.bool), InvalidArgumentError, r"Bad.admit.*\(3, 1\)"),
        (None, ArgumentTypeError, "Bad.admit.*bool"),
        ([True, True, True], ArgumentTypeError, "Bad.admit.*bool"),
        (ZeroDivisionError("mine"), ZeroDivisionError, "mine"),
    ],
)
def test_bad_masks_are_refused_and_the_table_is_unchanged(
    result: Any, error: type[Exception], message: str
) -> None:
    module = module_of(Bad(result), score_strategy=DynamicEmbScoreStrategy.STEP)
    module.table.insert(torch.tensor([1]), torch.zeros(1, 3), scores=torch.tensor([5]))
    before = module.table.state_dict()
    with pytest.raises(error, match=message):
        module(torch.tensor([1, 2, 3, 4]))
    after = module.table.state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_a_mask_that_is_not_contiguous() -> None:
    module = module_of(Bad(torch.tensor([True, False, False, False, True, False])[::2]))
    module(torch.tensor([7, 8, 9]))
    assert stored(module, 7, 8, 9) == [True, False, True]


def test_insert_asks_no_strategy() -> None:
    module = module_of(ProbabilityAdmissionStrategy(0.0))
    module.table.insert(torch.tensor([1]), torch.zeros(1, 3))
    assert stored(module, 1) == [True]
