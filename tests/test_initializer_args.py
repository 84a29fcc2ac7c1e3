"""How new rows start: documented defaults, value equality, refusals, bounds that are completed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    complete_initializer_args,
)

MODE = DynamicEmbInitializerMode


def test_initializer_defaults_are_the_documented_ones() -> None:
    args = DynamicEmbInitializerArgs()
    assert args.mode is MODE.UNIFORM
    assert (args.mean, args.std_dev, args.lower, args.upper, args.value) == (
        0.0,
        1.0,
        None,
        None,
        0.0,
    )


def test_initializer_args_compare_with_their_mode() -> None:
    assert DynamicEmbInitializerArgs(MODE.NORMAL) != DynamicEmbInitializerArgs(MODE.UNIFORM)
    assert DynamicEmbInitializerArgs(MODE.CONSTANT, value=1) == DynamicEmbInitializerArgs(
        MODE.CONSTANT, value=1.0
    )
    assert len({DynamicEmbInitializerArgs(), DynamicEmbInitializerArgs()}) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "uniform"}, ArgumentTypeError, "mode.*NORMAL, TRUNCATED_NORMAL, UNIFORM"),
        ({"mean": math.nan}, InvalidArgumentError, "mean is nan"),
        ({"std_dev": -1.0}, InvalidArgumentError, r"std_dev is -1.0.*>= 0"),
        ({"value": math.inf}, InvalidArgumentError, "value is inf"),
        ({"value": 1e300}, InvalidArgumentError, "value is 1e"),
        ({"value": "0"}, ArgumentTypeError, "value is '0'"),
        ({"lower": 2.0, "upper": 1.0}, InvalidArgumentError, r"lower is 2.0.*upper \(1.0\)"),
        ({"upper": math.nan}, InvalidArgumentError, "upper is nan"),
        (
            {"mode": MODE.TRUNCATED_NORMAL, "std_dev": 0.0},
            InvalidArgumentError,
            "std_dev is 0.0.*more than 0",
        ),
        (
            {"mode": MODE.TRUNCATED_NORMAL, "lower": 1.0, "upper": 1.0},
            InvalidArgumentError,
            "lower is 1.0",
        ),
    ],
)
def test_bad_initializer_args(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DynamicEmbInitializerArgs(**arguments)


@pytest.mark.parametrize("mode", [MODE.UNIFORM, MODE.TRUNCATED_NORMAL])
def test_missing_bounds_are_completed_without_touching_the_argument(mode: MODE) -> None:
    config = SimpleNamespace(num_embeddings=100)
    args = DynamicEmbInitializerArgs(mode)
    completed = complete_initializer_args(args, embedding_config=config)
    assert (completed.lower, completed.upper) == (-0.1, 0.1)
    assert (args.lower, args.upper) == (None, None)
    assert complete_initializer_args(completed, embedding_config=config) is completed
    without = complete_initializer_args(args)
    assert (without.lower, without.upper) == (0.0, 1.0)


def test_each_bound_is_completed_on_its_own() -> None:
    config = SimpleNamespace(num_embeddings=4)
    lower = complete_initializer_args(
        DynamicEmbInitializerArgs(lower=-2.0), embedding_config=config
    )
    upper = complete_initializer_args(DynamicEmbInitializerArgs(upper=2.0), embedding_config=config)
    assert (lower.lower, lower.upper) == (-2.0, 0.5)
    assert (upper.lower, upper.upper) == (-0.5, 2.0)


def test_modes_without_bounds_are_complete() -> None:
    for mode in (MODE.NORMAL, MODE.CONSTANT, MODE.DEBUG):
        args = DynamicEmbInitializerArgs(mode)
        assert complete_initializer_args(args) is args
