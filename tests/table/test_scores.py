"""What each strategy writes as the score, and `set_score` / `get_score`."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from dynamicemb.errors import (
    ArgumentTypeError,
    DynamicEmbError,
    InvalidArgumentError,
    UsageError,
)
from dynamicemb.options import DynamicEmbScoreStrategy
from dynamicemb.table import create_table
from reference import STRATEGIES
from tables import (
    STRATEGY,
    Clock,
    contents,
    make_options,
    make_table,
    score_list,
    score_tensor,
    scores_of,
    tensor,
)


def test_timestamp_is_one_reading_per_batch() -> None:
    clock = Clock(100)
    table = make_table(clock=clock)
    table.find_or_insert(tensor([1, 2, 1]))
    assert clock.readings == 1
    clock.time = 200
    table.find_or_insert(tensor([2, 3]))
    assert clock.readings == 2
    assert scores_of(table, [1, 2, 3]) == [100, 200, 200]


def test_timestamp_uses_all_64_bits() -> None:
    clock = Clock(2**64 - 1)
    table = make_table(clock=clock)
    table.find_or_insert(tensor([1]))
    assert scores_of(table, [1]) == [2**64 - 1]


def test_the_default_clock_counts_nanoseconds_forward() -> None:
    table = create_table(make_options())
    table.find_or_insert(tensor([1]))
    time.sleep(0.01)
    table.find_or_insert(tensor([2]))
    first, second = scores_of(table, [1, 2])
    assert 0 < first < second <= table.get_score()
    assert 10_000_000 <= second - first < 3_600_000_000_000


def test_step_starts_at_one_and_counts_training_batches() -> None:
    table = make_table("STEP")
    assert table.get_score() == 1
    table.find_or_insert(tensor([1, 2]))
    assert table.get_score() == 2
    table.find(tensor([1, 99]))
    table.contains(tensor([1]))
    table.insert(tensor([7]), torch.zeros(1, 4), scores=tensor([50]))
    table.assign(tensor([7]), torch.ones(1, 4))
    table.erase(tensor([99]))
    assert table.get_score() == 2
    table.find_or_insert(tensor([2, 3]))
    assert scores_of(table, [1, 2, 3, 7]) == [1, 2, 2, 50]
    assert table.get_score() == 3


def test_customized_writes_what_was_set() -> None:
    table = make_table("CUSTOMIZED")
    table.set_score(10)
    assert table.get_score() == 10
    table.find_or_insert(tensor([1, 2]))
    table.find_or_insert(tensor([3]))  # stays until it is set again
    table.set_score(2**64 - 1)
    table.find_or_insert(tensor([2, 4]))
    assert scores_of(table, [1, 2, 3, 4]) == [10, 2**64 - 1, 10, 2**64 - 1]
    assert table.get_score() == 2**64 - 1


def test_customized_must_be_set_before_training() -> None:
    table = make_table("CUSTOMIZED", name="clicks")
    with pytest.raises(UsageError, match="clicks"):
        table.find_or_insert(tensor([1]))
    assert len(table) == 0
    assert table.stats().misses == 0
    assert not table.find(tensor([1])).found.any()  # looking needs no score
    table.set_score(1)
    table.find_or_insert(tensor([1]))
    assert len(table) == 1


@pytest.mark.parametrize("score", [0, -1, 2**64])
def test_a_score_out_of_range_is_refused(score: int) -> None:
    table = make_table("CUSTOMIZED")
    table.set_score(5)
    with pytest.raises(InvalidArgumentError, match=str(score)):
        table.set_score(score)
    assert table.get_score() == 5


@pytest.mark.parametrize("score", [1.0, "1", None, True])
def test_a_score_that_is_no_integer_is_refused(score: object) -> None:
    table = make_table("CUSTOMIZED")
    table.set_score(5)
    with pytest.raises(ArgumentTypeError, match="score"):
        table.set_score(score)
    assert table.get_score() == 5


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "CUSTOMIZED"])
def test_only_customized_tables_take_a_score(strategy: str) -> None:
    table = make_table(strategy, name="clicks")
    before = table.get_score() if strategy == "STEP" else None
    with pytest.raises(DynamicEmbError, match="CUSTOMIZED") as raised:
        table.set_score(5)
    assert "clicks" in str(raised.value)
    if strategy == "STEP":
        assert table.get_score() == before


def test_a_score_that_decreases_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMICEMB_CSTM_SCORE_CHECK", raising=False)
    table = make_table("CUSTOMIZED")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.set_score(10)
        table.set_score(10)
        table.set_score(11)
    with pytest.warns(UserWarning, match="9"):
        table.set_score(9)
    assert table.get_score() == 9
    monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.set_score(3)
    assert table.get_score() == 3


def test_lfu_counts_occurrences() -> None:
    table = make_table("LFU")
    table.find_or_insert(tensor([1, 2, 1, 1]))
    assert scores_of(table, [1, 2]) == [3, 1]
    table.find_or_insert(tensor([2, 2, 3]))
    assert scores_of(table, [1, 2, 3]) == [3, 3, 1]


def test_lfu_takes_counts_from_the_caller() -> None:
    table = make_table("LFU")
    table.find_or_insert(tensor([1, 2, 1]), counts=tensor([10, 1, 5]))
    assert scores_of(table, [1, 2]) == [15, 1]
    table.find_or_insert(tensor([2]), counts=tensor([2**40]))
    assert scores_of(table, [2]) == [2**40 + 1]


@pytest.mark.parametrize("strategy", ["LFU", "TIMESTAMP_LFU"])
def test_a_count_at_its_end_stays_there(strategy: str) -> None:
    """Wrapping to 0 would make the most frequent id the first to be evicted."""
    words = 2 if strategy == "TIMESTAMP_LFU" else 1
    table = make_table(strategy)
    start = score_tensor([(1, 2**64 - 2)[-words:]], words)
    table.insert(tensor([1]), torch.zeros(1, 4), scores=start)
    for _ in range(3):
        table.find_or_insert(tensor([1, 1]))
        assert score_list(table.find(tensor([1])).scores)[0][-1] == 2**64 - 1
    table.find_or_insert(tensor([2, 2, 2]), counts=tensor([2**63 - 1] * 3))
    assert score_list(table.find(tensor([2])).scores)[0][-1] == 2**64 - 1


def test_counts_do_not_matter_to_the_other_strategies() -> None:
    table = make_table(clock=Clock(9))
    table.find_or_insert(tensor([1, 2]), counts=tensor([10, 3]))
    assert scores_of(table, [1, 2]) == [9, 9]


def test_no_eviction_numbers_its_rows() -> None:
    table = make_table("NO_EVICTION")
    table.find_or_insert(tensor([50, 40, 50]))
    table.find_or_insert(tensor([30, 40]))
    assert scores_of(table, [50, 40, 30]) == [0, 1, 2]
    table.erase(tensor([40]))
    table.find_or_insert(tensor([40]))
    assert scores_of(table, [50, 40, 30]) == [0, 3, 2]


def test_no_eviction_gives_no_number_to_an_id_that_fails() -> None:
    table = make_table("NO_EVICTION")
    table.find_or_insert(tensor(range(18)))
    table.erase(tensor([3]))
    table.find_or_insert(tensor([99]))
    assert scores_of(table, [15, 99]) == [15, 16]


@pytest.mark.parametrize("order", [1, -1])
def test_the_pair_keeps_time_and_count(order: int) -> None:
    both = (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
    clock = Clock(100)
    table = make_table(score_strategy=both[::order], clock=clock)
    table.find_or_insert(tensor([1, 1, 2]))
    clock.time = 200
    table.find_or_insert(tensor([2, 2, 3]))
    rows = contents(table)
    assert rows.scores.shape == (3, 2)
    assert rows.ids.tolist() == [1, 2, 3]
    assert score_list(rows.scores) == [(100, 2), (200, 3), (200, 1)]
    assert score_list(table.find(tensor([3])).scores) == [(200, 1)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_have_the_documented_shape(strategy: str) -> None:
    table = make_table(strategy)
    if strategy == "CUSTOMIZED":
        table.set_score(1)
    table.find_or_insert(tensor([1, 2]))
    shape = (2, 2) if isinstance(STRATEGY[strategy], tuple) else (2,)
    for scores in (table.find(tensor([1, 2])).scores, contents(table).scores):
        assert scores.dtype == torch.int64
        assert scores.shape == shape


@pytest.mark.parametrize(("strategy", "score"), [("LFU", 1), ("NO_EVICTION", 0)])
def test_get_score_of_the_strategies_without_a_counter(strategy: str, score: int) -> None:
    table = make_table(strategy)
    table.find_or_insert(tensor([1, 2, 2]))
    assert table.get_score() == score


@pytest.mark.parametrize("strategy", ["TIMESTAMP", "TIMESTAMP_LFU"])
def test_get_score_is_the_clock_now(strategy: str) -> None:
    clock = Clock(5)
    table = make_table(strategy, clock=clock)
    table.find_or_insert(tensor([1]))
    clock.time = 77
    assert table.get_score() == 77


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_clock_is_read_only_where_it_is_needed(strategy: str) -> None:
    clock = Clock(5)
    table = make_table(strategy, clock=clock)
    if strategy == "CUSTOMIZED":
        table.set_score(1)
    table.find(tensor([1]))
    table.contains(tensor([1]))
    list(table.export())
    assert clock.readings == 0
    table.find_or_insert(tensor([1]))
    assert clock.readings == (1 if strategy.startswith("TIMESTAMP") else 0)
