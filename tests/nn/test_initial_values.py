"""What rows of DynamicEmbedding and DynamicEmbeddingBag start from."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairs import constant

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError

LFU = DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.LFU, init_capacity=1024)
IDS = torch.arange(2000)
MODULES = [DynamicEmbedding, DynamicEmbeddingBag]


def rows(kind: Any, dim: int = 64, **arguments: Any) -> torch.Tensor:
    """The rows that new ids get."""
    module = kind(dim, seed=3, max_capacity=4096, **arguments)
    module(IDS if kind is DynamicEmbedding else IDS[:, None])
    return module.table.find(IDS).embeddings


@pytest.mark.parametrize("kind", MODULES)
def test_the_same_with_options_that_have_no_initializer(kind: Any) -> None:
    """They were uniform between 0 and 1 with options, and none was below 0."""
    without = rows(kind)
    assert abs(without.mean().item()) < 0.001
    assert without.std().item() == pytest.approx(0.05, rel=0.01)
    for options in (LFU, copy.deepcopy(LFU), pickle.loads(pickle.dumps(LFU)), replace(LFU, dim=64)):
        assert torch.equal(rows(kind, options=options), without)
    assert torch.equal(rows(kind, optimizer="adam", dtype=torch.float32), without)


@pytest.mark.parametrize("kind", MODULES)
def test_an_initializer_in_the_options_is_used(kind: Any) -> None:
    as_default = DynamicEmbInitializerArgs()  # of the options, but asked for
    assert as_default == LFU.initializer_args
    for args in (as_default, replace(LFU.initializer_args), copy.copy(as_default)):
        given = rows(kind, options=replace(LFU, initializer_args=args))
        assert 0.0 < given.min().item() < 0.001
        assert 0.999 < given.max().item() < 1.0
    options = replace(LFU, initializer_args=constant(2.0))
    assert (rows(kind, options=options) == 2.0).all()
    changed = replace(LFU, initializer_args=LFU.initializer_args)
    changed.initializer_args = DynamicEmbInitializerArgs()
    changed.initializer_args.upper = 0.5
    assert 0.499 < rows(kind, options=changed).max().item() < 0.5


@pytest.mark.parametrize("options", [None, LFU])
@pytest.mark.parametrize("kind", MODULES)
def test_init_std_and_init_range(kind: Any, options: DynamicEmbTableOptions | None) -> None:
    normal = rows(kind, options=options, init_std=0.2)
    assert normal.std().item() == pytest.approx(0.2, rel=0.01)
    assert abs(normal.mean().item()) < 0.002
    assert (rows(kind, options=options, init_std=0) == 0).all()
    for bounds, low, high in ((0.1, -0.1, 0.1), ((0.2, 0.3), 0.2, 0.3), (0, 0.0, 0.0)):
        uniform = rows(kind, options=options, init_range=bounds)
        assert uniform.min().item() == pytest.approx(low, abs=1e-4)
        assert uniform.max().item() == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_std": -1}, InvalidArgumentError, "init_std is -1; allowed: a finite number >= 0"),
        ({"init_std": "0.1"}, ArgumentTypeError, "init_std is '0.1'"),
        ({"init_range": -0.5}, InvalidArgumentError, "init_range is -0.5"),
        ({"init_range": (1, 0)}, InvalidArgumentError, "the lower bound first"),
        ({"init_range": (1, 2, 3)}, InvalidArgumentError, "the two bounds"),
        ({"init_range": float("inf")}, InvalidArgumentError, "finite"),
        (
            {"init_std": 0.1, "init_range": 0.1},
            InvalidArgumentError,
            "init_std and init_range are given; allowed: one of them",
        ),
        (
            {"init_std": 0.1, "options": replace(LFU, initializer_args=constant(1.0))},
            InvalidArgumentError,
            r"init_std and options\.initializer_args are given",
        ),
    ],
)
def test_what_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DynamicEmbedding(4, **arguments)


def test_copies_and_tables_of_their_own_keep_what_they_had() -> None:
    module = DynamicEmbedding(4, seed=1, init_std=0.3)
    expected = module.table.initial_rows(IDS)
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(one(IDS), expected)
    other = DynamicEmbedding(4, seed=2)
    other.load_state_dict(module.state_dict())
    assert other.table.options.initializer_args.std_dev == 0.05  # configuration, not content


def test_other_modules_keep_the_options_own_default() -> None:
    module = BatchedDynamicEmbeddingTables([replace(LFU, dim=8, max_capacity=4096)])
    module(IDS, torch.arange(2001))
    started = module.tables[0].find(IDS).embeddings
    assert 0.0 < started.min().item() < 0.001
    assert 0.999 < started.max().item() < 1.0


def test_options_are_equal_by_value_whoever_chose_their_initializer() -> None:
    given = replace(LFU, initializer_args=DynamicEmbInitializerArgs())
    assert given == LFU
    assert hash(given) == hash(LFU)
    assert repr(given) == repr(LFU)
    uniform = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM)
    assert uniform == LFU.initializer_args
