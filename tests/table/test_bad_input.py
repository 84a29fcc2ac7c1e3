"""Bad input is a typed error that names the argument, and the table is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dynamicemb.errors import (
    ArgumentTypeError,
    DynamicEmbError,
    InvalidArgumentError,
)
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import Table, create_group, create_table
from tables import contents, equal_rows, make_options, make_table, tensor

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def table() -> Iterator[Table]:
    """A table with three rows; afterwards it must be the same to the last bit."""
    table = make_table(
        "LFU", max_capacity=64, optimizer=Optimizer(OptimizerKind.ADAGRAD, OptimizerArgs())
    )
    table.find_or_insert(tensor([1, 2, 2, 3]))
    before, stats = contents(table), table.stats()
    yield table
    assert equal_rows(contents(table), before)
    assert table.stats() == stats
    assert table.find_or_insert(tensor([4])).slots.item() >= 0  # and it still works


ROWS = torch.zeros(2, 4)
TAKE_IDS: dict[str, Callable[[Table, Any], Any]] = {
    "find": lambda table, ids: table.find(ids),
    "contains": lambda table, ids: table.contains(ids),
    "find_or_insert": lambda table, ids: table.find_or_insert(ids),
    "insert": lambda table, ids: table.insert(ids, ROWS),
    "assign": lambda table, ids: table.assign(ids, ROWS),
    "erase": lambda table, ids: table.erase(ids),
}


@pytest.mark.parametrize("operation", TAKE_IDS)
@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.uint8),
        [1, 2],
        None,
        7,
    ],
    ids=["float32", "int32", "bool", "float64", "uint8", "list", "none", "number"],
)
def test_ids_of_the_wrong_type(table: Table, operation: str, ids: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"\bids\b"):
        TAKE_IDS[operation](table, ids)


@pytest.mark.parametrize("operation", TAKE_IDS)
@pytest.mark.parametrize("shape", [(), (2, 1), (1, 2), (0, 2)], ids=str)
def test_ids_of_the_wrong_shape(table: Table, operation: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\bids\b"):
        TAKE_IDS[operation](table, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("operation", TAKE_IDS)
def test_ids_on_the_wrong_device(table: Table, operation: str) -> None:
    with pytest.raises(DynamicEmbError, match=r"\bids\b.*meta"):
        TAKE_IDS[operation](table, torch.zeros(2, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("operation", TAKE_IDS)
def test_sparse_ids(table: Table, operation: str) -> None:
    with pytest.raises(DynamicEmbError, match=r"\bids\b"):
        TAKE_IDS[operation](table, torch.zeros(2, dtype=torch.int64).to_sparse())


BAD_ROWS = {
    "too few": (torch.zeros(1, 4), InvalidArgumentError),
    "too many": (torch.zeros(3, 4), InvalidArgumentError),
    "too narrow": (torch.zeros(2, 3), InvalidArgumentError),
    "too wide": (torch.zeros(2, 5), InvalidArgumentError),
    "flat": (torch.zeros(8), InvalidArgumentError),
    "cube": (torch.zeros(2, 2, 2), InvalidArgumentError),
    "integers": (torch.zeros(2, 4, dtype=torch.int64), ArgumentTypeError),
    "complex": (torch.zeros(2, 4, dtype=torch.complex64), ArgumentTypeError),
    "list": ([[0.0] * 4] * 2, ArgumentTypeError),
    "none": (None, ArgumentTypeError),
    "meta": (torch.zeros(2, 4, device="meta"), DynamicEmbError),
}


@pytest.mark.parametrize("operation", ["insert", "assign"])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_embeddings(table: Table, operation: str, case: str) -> None:
    rows, error = BAD_ROWS[case]
    with pytest.raises(error, match=r"\bembeddings\b"):
        getattr(table, operation)(tensor([1, 9]), rows)


@pytest.mark.parametrize("operation", ["insert", "assign"])
@pytest.mark.parametrize("case", [c for c in BAD_ROWS if c != "none"])
def test_bad_state(table: Table, operation: str, case: str) -> None:
    state, error = BAD_ROWS[case]
    with pytest.raises(error, match=r"\bstate\b"):
        getattr(table, operation)(tensor([1, 9]), ROWS, state=state)


@pytest.mark.parametrize("operation", ["insert", "assign"])
@pytest.mark.parametrize(
    ("scores", "error"),
    [
        (torch.zeros(1, dtype=torch.int64), InvalidArgumentError),
        (torch.zeros(3, dtype=torch.int64), InvalidArgumentError),
        (torch.zeros(2, 2, dtype=torch.int64), InvalidArgumentError),
        (torch.zeros(2), ArgumentTypeError),
        (torch.zeros(2, dtype=torch.int32), ArgumentTypeError),
        ([1, 2], ArgumentTypeError),
        (torch.zeros(2, dtype=torch.int64, device="meta"), DynamicEmbError),
    ],
    ids=["short", "long", "pairs", "float", "int32", "list", "meta"],
)
def test_bad_scores(table: Table, operation: str, scores: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\bscores\b"):
        getattr(table, operation)(tensor([1, 9]), ROWS, scores=scores)


def test_the_pair_needs_two_words() -> None:
    table = make_table("TIMESTAMP_LFU")
    for scores in (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(InvalidArgumentError, match=r"\bscores\b"):
            table.insert(tensor([1, 2]), ROWS, scores=scores)
    assert len(table) == 0


def test_state_for_a_table_without_state() -> None:
    table = make_table()
    with pytest.raises(InvalidArgumentError, match=r"\bstate\b"):
        table.insert(tensor([1, 2]), ROWS, state=torch.zeros(2, 4))
    assert len(table) == 0


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        (torch.ones(1, dtype=torch.int64), InvalidArgumentError),
        (torch.ones(3, dtype=torch.int64), InvalidArgumentError),
        (torch.ones(2, 1, dtype=torch.int64), InvalidArgumentError),
        (torch.ones(2), ArgumentTypeError),
        ([1, 1], ArgumentTypeError),
        (torch.tensor([1, -1]), InvalidArgumentError),
        (torch.ones(2, dtype=torch.int64, device="meta"), DynamicEmbError),
    ],
    ids=["short", "long", "column", "float", "list", "negative", "meta"],
)
def test_bad_counts(table: Table, counts: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\bcounts\b"):
        table.find_or_insert(tensor([1, 9]), counts=counts)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dim": 0}, "dim"),
        ({"dim": -4}, "dim"),
        ({"dim": 4.0}, "dim"),
        ({"dim": None}, "dim"),
        ({"max_capacity": 0}, "max_capacity"),
        ({"max_capacity": -1}, "max_capacity"),
        ({"max_capacity": None}, "max_capacity"),
        ({"max_capacity": NAN}, "max_capacity"),
        ({"max_capacity": 1e6}, "max_capacity"),
        ({"init_capacity": 0}, "init_capacity"),
        ({"init_capacity": -16}, "init_capacity"),
        ({"init_capacity": 17}, "init_capacity"),
        ({"bucket_capacity": 17}, "bucket_capacity"),
        ({"bucket_capacity": 0}, "bucket_capacity"),
        ({"bucket_capacity": 8}, "bucket_capacity"),
        ({"bucket_capacity": -16}, "bucket_capacity"),
        ({"max_load_factor": NAN}, "max_load_factor"),
        ({"max_load_factor": INF}, "max_load_factor"),
        ({"max_load_factor": 1.5}, "max_load_factor"),
        ({"max_load_factor": "0.5"}, "max_load_factor"),
        ({"embedding_dtype": torch.float64}, "embedding_dtype"),
        ({"embedding_dtype": torch.int8}, "embedding_dtype"),
        ({"safe_check_mode": "error"}, "safe_check_mode"),
        ({"score_strategy": "LRU"}, "score_strategy"),
    ],
    ids=str,
)
def test_options_that_make_no_table(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(DynamicEmbError, match=rf"\b{name}\b"):
        create_table(make_options(**changes))


def test_options_changed_after_they_were_made_are_checked_again() -> None:
    options = make_options()
    options.bucket_capacity = 17
    with pytest.raises(InvalidArgumentError, match="bucket_capacity"):
        create_table(options)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"optimizer": "adam"}, "optimizer"),
        ({"name": 5}, "name"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"clock": 17}, "clock"),
        ({"device": "meta"}, "device"),
        ({"device": "nonsense"}, "device"),
    ],
    ids=str,
)
def test_bad_arguments_of_create_table(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(DynamicEmbError, match=rf"\b{name}\b"):
        create_table(make_options(), **arguments)


@pytest.mark.parametrize("options", [None, {}, 5], ids=str)
def test_options_of_the_wrong_kind(options: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"\boptions\b"):
        create_table(options)


def test_a_clock_that_gives_no_time_changes_nothing() -> None:
    readings: list[Any] = [5]
    table = make_table(clock=lambda: readings[-1])
    table.find_or_insert(tensor([1, 2]))
    before, stats = contents(table), table.stats()
    for bad in (None, 1.5, -1, 2**64):
        readings.append(bad)
        with pytest.raises(DynamicEmbError, match="clock"):
            table.find_or_insert(tensor([2, 3]))
    assert equal_rows(contents(table), before)
    assert table.stats() == stats


def test_a_clock_that_raises_changes_nothing() -> None:
    calls: list[int] = []

    def clock() -> int:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("no time")
        return 5

    table = make_table(clock=clock)
    table.find_or_insert(tensor([1, 2]))
    before, stats = contents(table), table.stats()
    with pytest.raises(KeyError, match="no time"):
        table.find_or_insert(tensor([2, 3]))
    assert equal_rows(contents(table), before)
    assert table.stats() == stats


def test_nan_and_infinity_are_rows_like_others() -> None:
    table = make_table()
    rows = torch.tensor([[NAN, INF, -INF, 0.0]])
    table.insert(tensor([1]), rows)
    assert torch.equal(table.find(tensor([1])).embeddings.nan_to_num(7.0), rows.nan_to_num(7.0))


def test_a_group_has_each_table_once(table: Table) -> None:
    with pytest.raises(InvalidArgumentError, match="one table twice; allowed: each once"):
        create_group([table, make_table(max_capacity=64), table])
    with pytest.raises(InvalidArgumentError, match="at least one table"):
        create_group([])
