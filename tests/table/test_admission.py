"""Admission at the table: who enters, what a rejected id reads, and what is counted."""

from __future__ import annotations

import pytest
import torch

from dynamicemb.admission import (
    AdmissionStrategy,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)
from dynamicemb.errors import DynamicEmbError
from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from tables import contents, debug_value, equal_rows, make_table, scores_of, tensor

MINUS_ONE = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=-1.0)


class Recording(AdmissionStrategy):
    """Admits even ids and remembers what it was asked."""

    initializer_args = MINUS_ONE

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        self.asked.append((keys.tolist(), frequencies.tolist()))
        return keys % 2 == 0


def test_a_strategy_is_asked_about_missing_ids_in_order_with_their_counts() -> None:
    strategy = Recording()
    table = make_table("LFU", admit_strategy=strategy)
    asked = table.options.admit_strategy.asked  # a table may keep a copy
    out = table.find_or_insert(tensor([5, 4, 4, 5, 8, 5]))
    assert asked == [([5, 4, 8], [3, 2, 1])] or strategy.asked == [([5, 4, 8], [3, 2, 1])]
    assert out.slots.tolist() == [-2, 0, 0, -2, 1, -2]
    assert out.embeddings[:, 0].tolist() == [-1.0, 4.0, 4.0, -1.0, 8.0, -1.0]
    stats = table.stats()
    assert (stats.misses, stats.inserts, stats.rejections, stats.failures) == (3, 2, 1, 0)
    assert contents(table).ids.tolist() == [4, 8]
    assert scores_of(table, [4, 8]) == [2, 1]


def test_counts_given_by_the_caller_reach_the_strategy() -> None:
    table = make_table(
        admit_strategy=FrequencyAdmissionStrategy(10), admission_counter=KVCounter(64)
    )
    out = table.find_or_insert(tensor([1, 2, 1]), counts=tensor([6, 9, 4]))
    assert out.slots.tolist() == [0, -2, 0]


def test_frequency_admits_at_the_threshold() -> None:
    table = make_table(
        admit_strategy=FrequencyAdmissionStrategy(3, MINUS_ONE), admission_counter=KVCounter(64)
    )
    assert table.find_or_insert(tensor([1, 2, 2])).slots.tolist() == [-2, -2, -2]
    assert table.find_or_insert(tensor([1, 2])).slots.tolist() == [-2, 0]  # 2 was seen 3 times
    assert table.find_or_insert(tensor([1])).slots.tolist() == [1]
    assert table.stats().rejections == 3
    assert table.find_or_insert(tensor([9])).embeddings.tolist() == [[-1.0] * 4]


def test_counts_outlive_eviction() -> None:
    table = make_table(
        admit_strategy=FrequencyAdmissionStrategy(2), admission_counter=KVCounter(1024)
    )
    table.find_or_insert(tensor([1, 1]))
    for id_ in range(100, 116):
        table.find_or_insert(tensor([id_, id_]))
    assert not table.contains(tensor([1])).item()
    assert table.find_or_insert(tensor([1])).slots.item() >= 0


def test_looking_does_not_count() -> None:
    table = make_table(
        admit_strategy=FrequencyAdmissionStrategy(2), admission_counter=KVCounter(64)
    )
    for _ in range(5):
        table.find(tensor([1]))
        table.contains(tensor([1]))
    assert table.find_or_insert(tensor([1])).slots.tolist() == [-2]


def test_without_their_own_initialiser_rejected_ids_read_like_new_rows() -> None:
    table = make_table(
        admit_strategy=FrequencyAdmissionStrategy(2), admission_counter=KVCounter(64)
    )
    out = table.find_or_insert(tensor([17, 99]))
    assert out.slots.tolist() == [-2, -2]
    assert out.embeddings[:, 0].tolist() == [debug_value(17), debug_value(99)]


def test_a_strategy_may_write_the_rows_itself() -> None:
    class Writing(Recording):
        def initialize_non_admitted_embeddings(
            self, buffer: torch.Tensor, indices: torch.Tensor
        ) -> None:
            buffer[indices] = 6.5

    out = make_table(admit_strategy=Writing()).find_or_insert(tensor([1, 2, 3]))
    assert out.embeddings[:, 0].tolist() == [6.5, 2.0, 6.5]


def test_rejected_ids_evict_and_grow_nothing() -> None:
    table = make_table(max_capacity=64, init_capacity=16, admit_strategy=Recording())
    out = table.find_or_insert(torch.arange(1, 201, 2), return_evicted=True)
    assert out.slots.eq(-2).all()
    assert (len(table), table.capacity, len(out.evicted.ids)) == (0, 16, 0)


def test_given_rows_need_no_admission() -> None:
    table = make_table(admit_strategy=Recording())
    assert table.insert(tensor([1, 2]), torch.ones(2, 4)).written.all()
    assert table.find_or_insert(tensor([1])).slots.tolist() == [0]


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_probability_of_none_and_all(probability: float) -> None:
    table = make_table(max_capacity=1024, admit_strategy=ProbabilityAdmissionStrategy(probability))
    table.find_or_insert(torch.arange(200))
    assert len(table) == 200 * probability


def test_probability_after_k_sightings() -> None:
    """P(in after k sightings) = 1 - (1 - p)^k."""
    table = make_table(
        dim=1, max_capacity=1 << 17, admit_strategy=ProbabilityAdmissionStrategy(0.2, seed=3)
    )
    ids = torch.arange(20_000)
    for k in range(1, 6):
        table.find_or_insert(ids)
        assert len(table) / 20_000 == pytest.approx(1 - 0.8**k, abs=0.015)


@pytest.mark.parametrize("answer", ["short", "float", "list"])
def test_a_wrong_answer_is_refused_and_changes_nothing(answer: str) -> None:
    class Wrong(AdmissionStrategy):
        def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
            if len(keys) == 1:
                return torch.ones(1, dtype=torch.bool)
            yes = torch.ones(len(keys), dtype=torch.bool)
            return {"short": yes[1:], "float": yes.float(), "list": yes.tolist()}[answer]

    table = make_table("LFU", admit_strategy=Wrong())
    table.find_or_insert(tensor([1]))
    before, stats = contents(table), table.stats()
    with pytest.raises(DynamicEmbError, match="admit"):
        table.find_or_insert(tensor([1, 2, 3]))
    assert equal_rows(contents(table), before)
    assert table.stats() == stats


def test_a_strategy_that_raises_changes_nothing() -> None:
    class Raising(AdmissionStrategy):
        def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
            if len(keys) > 1:
                raise KeyError("no")
            return torch.ones(len(keys), dtype=torch.bool)

    table = make_table("STEP", admit_strategy=Raising())
    table.find_or_insert(tensor([1]))
    before, stats, step = contents(table), table.stats(), table.get_score()
    with pytest.raises(KeyError):
        table.find_or_insert(tensor([1, 2, 3]))
    assert equal_rows(contents(table), before)
    assert (table.stats(), table.get_score()) == (stats, step)
    assert table.find_or_insert(tensor([1, 7])).slots.tolist() == [0, 1]
