"""Admission strategies by themselves: who is admitted, determinism, value equality, refusals."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

from dynamicemb import embedding_admission, types
from dynamicemb.admission import (
    AdmissionStrategy,
    Counter,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError, UsageError
from dynamicemb.options import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
)

EDGE_IDS = torch.tensor([-1, -4, -(2**63), 0, 2**63 - 1])
#: Seed 42, first call; computed with Python integers.
GOLDEN_DRAWS = [
    0.2454041279746073,
    0.5067828152291166,
    0.7284235465301439,
    0.1163765131011204,
    0.4468187216651177,
]
CONSTANT = DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT, value=0.5)


def ones(keys: torch.Tensor) -> torch.Tensor:
    return torch.ones(keys.shape, dtype=torch.int64)


# --- the counter's configuration --------------------------------------------------------------


def test_kv_counter_defaults_and_equality() -> None:
    counter = KVCounter(1000)
    assert (counter.capacity, counter.bucket_capacity, counter.key_type) == (
        1000,
        1024,
        torch.int64,
    )
    assert counter == KVCounter(capacity=1000, bucket_capacity=1024, key_type=torch.int64)
    assert hash(counter) == hash(KVCounter(1000))
    KVCounter(1, MAX_BUCKET_CAPACITY, torch.uint64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": 0}, InvalidArgumentError, "capacity is 0.*from 1"),
        ({"capacity": math.nan}, ArgumentTypeError, "capacity is nan.*integer"),
        ({"capacity": 8, "bucket_capacity": 17}, InvalidArgumentError, "17.*multiple of 16"),
        ({"capacity": 8, "key_type": torch.int32}, InvalidArgumentError, "key_type.*int64.*uint64"),
    ],
)
def test_bad_kv_counter(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KVCounter(**arguments)


# --- frequency --------------------------------------------------------------------------------


def test_frequency_admits_from_the_threshold_on() -> None:
    strategy = FrequencyAdmissionStrategy(3)
    mask = strategy.admit(EDGE_IDS, torch.tensor([0, 2, 3, 4, 2**62]))
    assert mask.dtype is torch.bool
    assert mask.tolist() == [False, False, True, True, True]
    assert FrequencyAdmissionStrategy(0).admit(EDGE_IDS, 0 * ones(EDGE_IDS)).all()


def test_frequency_values() -> None:
    assert FrequencyAdmissionStrategy(3, CONSTANT) == FrequencyAdmissionStrategy(
        threshold=3, initializer_args=copy.deepcopy(CONSTANT)
    )
    assert FrequencyAdmissionStrategy(3) != FrequencyAdmissionStrategy(4)
    assert FrequencyAdmissionStrategy(3) != FrequencyAdmissionStrategy(3, CONSTANT)
    assert len({FrequencyAdmissionStrategy(3), FrequencyAdmissionStrategy(3)}) == 1
    assert FrequencyAdmissionStrategy(3, CONSTANT).initializer_args is CONSTANT


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threshold": -1}, InvalidArgumentError, "threshold is -1.*from 0"),
        ({"threshold": 1.5}, ArgumentTypeError, "threshold is 1.5.*integer"),
        (
            {"threshold": 1, "initializer_args": 0.0},
            ArgumentTypeError,
            "initializer_args.*DynamicEmbInitializerArgs",
        ),
    ],
)
def test_bad_frequency_strategy(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FrequencyAdmissionStrategy(**arguments)


@pytest.mark.parametrize(
    "strategy", [FrequencyAdmissionStrategy(2), ProbabilityAdmissionStrategy(0.5)]
)
def test_bad_batches(strategy: AdmissionStrategy) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\(5,\).*\(4,\).*same length"):
        strategy.admit(EDGE_IDS, torch.ones(4, dtype=torch.int64))
    with pytest.raises(InvalidArgumentError, match="keys.dtype is torch.int32.*int64"):
        strategy.admit(EDGE_IDS.int(), ones(EDGE_IDS))
    with pytest.raises(InvalidArgumentError, match="frequencies.dtype is torch.float32.*int64"):
        strategy.admit(EDGE_IDS, ones(EDGE_IDS).float())
    empty = torch.empty(0, dtype=torch.int64)
    assert strategy.admit(empty, empty).shape == (0,)


# --- probability ------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("frequency", [1, 2, 7, 100])
def test_share_of_admitted_ids(probability: float, frequency: int) -> None:
    keys = torch.arange(200_000) - 100_000
    mask = ProbabilityAdmissionStrategy(probability, seed=5).admit(keys, frequency * ones(keys))
    expected = 1 - (1 - probability) ** frequency
    deviation = math.sqrt(expected * (1 - expected) / keys.numel())
    assert abs(mask.double().mean().item() - expected) <= 5 * deviation + 1e-12


def test_certain_and_impossible() -> None:
    keys = torch.arange(1000)
    for frequency in (1, 2, 3, 2**62):
        assert ProbabilityAdmissionStrategy(1.0).admit(keys, frequency * ones(keys)).all()
        assert not ProbabilityAdmissionStrategy(0.0).admit(keys, frequency * ones(keys)).any()
    assert not ProbabilityAdmissionStrategy(1.0).admit(keys, 0 * ones(keys)).any()
    assert ProbabilityAdmissionStrategy(0.01).admit(keys, 2**62 * ones(keys)).all()
    assert ProbabilityAdmissionStrategy(1).admit(EDGE_IDS, ones(EDGE_IDS)).all()


def test_rejection_probability_is_the_power() -> None:
    for probability in (0.5, 0.1, 1e-6):
        strategy = ProbabilityAdmissionStrategy(probability)
        frequencies = torch.tensor([0, 1, 2, 3, 10, 31, 64, 1000])
        power = (1 - probability) ** frequencies.double()
        got = strategy._rejection_probability(frequencies)
        assert torch.allclose(got, power, rtol=1e-12, atol=2.0**-53)


def test_a_draw_depends_on_seed_id_and_call_only() -> None:
    keys = torch.randint(-(2**62), 2**62, (5000,), generator=torch.Generator().manual_seed(0))
    frequencies = keys % 3 + 1
    order = torch.randperm(keys.numel(), generator=torch.Generator().manual_seed(1))
    first = ProbabilityAdmissionStrategy(0.4, seed=9)
    second = ProbabilityAdmissionStrategy(0.4, seed=9)
    torch.manual_seed(123)
    for call in range(3):
        expected = first.admit(keys, frequencies)
        assert torch.equal(second.admit(keys[order], frequencies[order]), expected[order])
        assert first.calls == second.calls == call + 1
    one_by_one = ProbabilityAdmissionStrategy(0.4, seed=9)
    for key, frequency, admitted in zip(keys[:50], frequencies[:50], expected[:50], strict=True):
        one_by_one.calls = 2
        assert one_by_one.admit(key[None], frequency[None]).item() == admitted.item()


def test_calls_and_seeds_draw_independently() -> None:
    keys = torch.arange(100_000)
    strategy = ProbabilityAdmissionStrategy(0.5)
    masks = [strategy.admit(keys, ones(keys)) for _ in range(3)]
    masks += [
        ProbabilityAdmissionStrategy(0.5, seed=seed).admit(keys, ones(keys)) for seed in (1, -7)
    ]
    for i, left in enumerate(masks):
        for right in masks[:i]:
            assert abs((left == right).double().mean().item() - 0.5) < 0.01


def test_a_run_continues_from_its_call_count() -> None:
    keys = torch.arange(1000)
    strategy = ProbabilityAdmissionStrategy(0.5, seed=3)
    strategy.admit(keys, ones(keys))
    for restored in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert restored.calls == 1
    restored = copy.deepcopy(strategy)
    assert torch.equal(restored.admit(keys, ones(keys)), strategy.admit(keys, ones(keys)))


def test_more_occurrences_never_hurt() -> None:
    keys = torch.arange(10_000)
    previous = torch.zeros(keys.shape, dtype=torch.bool)
    for frequency in (1, 2, 3, 5, 17, 64, 1000):
        mask = ProbabilityAdmissionStrategy(0.05).admit(keys, frequency * ones(keys))
        assert (mask | ~previous).all()
        previous = mask


def test_uint64_ids_draw_like_their_bits() -> None:
    signed = ProbabilityAdmissionStrategy(0.5).admit(EDGE_IDS, ones(EDGE_IDS))
    unsigned = ProbabilityAdmissionStrategy(0.5).admit(EDGE_IDS.view(torch.uint64), ones(EDGE_IDS))
    assert torch.equal(signed, unsigned)


def test_the_draw_is_fixed_for_good() -> None:
    """A changed hash would change every training run that is resumed."""
    strategy = ProbabilityAdmissionStrategy(0.5, seed=42)
    assert strategy._draw(EDGE_IDS).tolist() == GOLDEN_DRAWS


def test_probability_values() -> None:
    strategy = ProbabilityAdmissionStrategy(0.5, seed=1)
    strategy.admit(EDGE_IDS, ones(EDGE_IDS))
    assert strategy == ProbabilityAdmissionStrategy(0.5, seed=1)
    assert hash(strategy) == hash(ProbabilityAdmissionStrategy(0.5, seed=1))
    assert strategy != ProbabilityAdmissionStrategy(0.5, seed=2)
    assert strategy != ProbabilityAdmissionStrategy(0.25, seed=1)
    assert strategy != ProbabilityAdmissionStrategy(0.5, seed=1, initializer_args=CONSTANT)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"probability": 1.1}, InvalidArgumentError, "probability is 1.1.*>= 0.0 and <= 1.0"),
        ({"probability": -0.1}, InvalidArgumentError, "probability"),
        ({"probability": math.nan}, InvalidArgumentError, "probability is nan"),
        ({"probability": "1"}, ArgumentTypeError, "probability"),
        ({"probability": 0.5, "seed": 0.5}, ArgumentTypeError, "seed"),
        ({"probability": 0.5, "seed": 2**64}, InvalidArgumentError, "seed"),
        ({"probability": 0.5, "initializer_args": 1}, ArgumentTypeError, "initializer_args"),
    ],
)
def test_bad_probability_strategy(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ProbabilityAdmissionStrategy(**arguments)


# --- the base classes -------------------------------------------------------------------------


class Writes(AdmissionStrategy):
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return keys > 0

    def initialize_non_admitted_embeddings(
        self, buffer: torch.Tensor, indices: torch.Tensor
    ) -> None:
        buffer[indices] = 7.0


class Leaves(AdmissionStrategy):
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return keys > 0


def test_the_hook_counts_only_if_it_is_overridden() -> None:
    buffer = torch.zeros(3, 2)
    assert Writes().writes_rejected_rows
    Writes().initialize_non_admitted_embeddings(buffer, torch.tensor([1]))
    assert buffer.tolist() == [[0.0, 0.0], [7.0, 7.0], [0.0, 0.0]]
    for strategy in (
        Leaves(),
        FrequencyAdmissionStrategy(1),
        ProbabilityAdmissionStrategy(0.5),
    ):
        assert not strategy.writes_rejected_rows
        assert strategy.initializer_args is None
        with pytest.raises(UsageError, match=f"{type(strategy).__name__}.*initializer_args"):
            strategy.initialize_non_admitted_embeddings(buffer, torch.tensor([0]))


def test_only_frequency_requires_a_counter() -> None:
    assert FrequencyAdmissionStrategy(2).requires_counter
    assert not ProbabilityAdmissionStrategy(0.5).requires_counter
    assert not Leaves().requires_counter


def test_abstract_classes_cannot_be_made() -> None:
    for abstract in (AdmissionStrategy, Counter):
        with pytest.raises(TypeError, match="abstract"):
            abstract()  # type: ignore[abstract]


def test_import_paths_of_existing_code() -> None:
    assert embedding_admission.KVCounter is KVCounter
    assert types.AdmissionStrategy is AdmissionStrategy
    assert types.Counter is Counter
    assert [one.name for one in types.MemoryType] == ["DEVICE", "MANAGED", "PINNED_HOST", "HOST"]
    assert [one.name for one in types.CopyMode] == ["EMBEDDING", "VALUE"]
    for int_type in (types.KEY_TYPE, types.SCORE_TYPE, types.COUNTER_TYPE):
        assert int_type is torch.int64
    for float_type in (types.EMBEDDING_TYPE, types.OPT_STATE_TYPE):
        assert float_type is torch.float32
