"""Optimizer arguments: documented defaults, mapping of types, state layout, refusals."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
from typing import Any

import pytest
import torch

from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError
from dynamicemb.optimizers import (
    SUPPORTED_OPTIM_TYPES,
    EmbOptimType,
    Optimizer,
    OptimizerArgs,
    OptimizerKind,
    get_optimizer_ckpt_state_dim,
    get_optimizer_state_dim,
    get_required_arg,
    optim_name,
    string_to_opt_type,
)

KIND = OptimizerKind


class Unrelated(enum.Enum):
    ADAM = "adam"


def test_defaults_are_the_documented_ones() -> None:
    assert dataclasses.asdict(OptimizerArgs()) == {
        "stochastic_rounding": True,
        "gradient_clipping": False,
        "max_gradient": 1.0,
        "max_norm": 0.0,
        "learning_rate": 0.01,
        "eps": 1e-8,
        "initial_accumulator_value": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.0,
        "weight_decay_mode": 0,
        "eta": 0.001,
        "momentum": 0.9,
        "counter_halflife": -1,
        "adjustment_iter": -1,
        "adjustment_ub": 1.0,
        "learning_rate_mode": -1,
        "grad_sum_decay": -1,
        "tail_id_threshold": 0,
        "is_tail_id_thresh_ratio": 0,
        "total_hash_size": 0,
        "weight_norm_coefficient": 0,
        "lower_bound": 0,
        "regularization_mode": 0,
        "dampening": 0.0,
        "nesterov": False,
        "lr_decay": 0.0,
        "maximize": False,
        "lambda1": 0.0,
        "lambda2": 0.0,
        "beta": 0.0,
    }


def test_kind_numbers_are_fixed() -> None:
    assert [(kind.name, kind.value) for kind in KIND] == [
        ("SGD", 0),
        ("MOMENTUM", 1),
        ("ADAM", 2),
        ("ADAGRAD", 3),
        ("ROWWISE_ADAGRAD", 4),
        ("PARTIAL_ROWWISE_ADAM", 5),
        ("FTRL", 6),
        ("SMART_DECAY_ADAM", 7),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (EmbOptimType.ADAM, "ADAM"),
        ("adam", "ADAM"),
        ("ADAM", "ADAM"),
        ("exact_row_wise_adagrad", "EXACT_ROWWISE_ADAGRAD"),
        ("EXACT_ROWWISE_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"),
        ("momentum_sgd", "MOMENTUM_SGD"),
        ("Ftrl", "FTRL"),
    ],
)
def test_a_type_is_named_by_a_member_a_name_or_a_value(value: Any, expected: str) -> None:
    assert optim_name(value) == expected


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("rmsprop", InvalidArgumentError),
        (3, ArgumentTypeError),
        (None, ArgumentTypeError),
        (Unrelated.ADAM, ArgumentTypeError),
    ],
)
def test_unknown_type_lists_the_allowed_ones(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="optimizer type.*SGD, EXACT_SGD.*ADAM.*FTRL"):
        optim_name(value)


@pytest.mark.parametrize("optim_type", list(EmbOptimType))
def test_a_type_is_supported_or_refused_by_name(optim_type: EmbOptimType) -> None:
    if optim_type.name in SUPPORTED_OPTIM_TYPES:
        assert isinstance(Optimizer.from_emb_optim_type(optim_type).kind, KIND)
    else:
        with pytest.raises(
            InvalidArgumentError, match=f"{optim_type.name}.*allowed.*EXACT_ADAGRAD"
        ):
            Optimizer.from_emb_optim_type(optim_type)


@pytest.mark.parametrize(
    ("optim_type", "kind", "state"),
    [
        ("SGD", KIND.SGD, 0),
        ("EXACT_SGD", KIND.SGD, 0),
        ("MOMENTUM_SGD", KIND.MOMENTUM, 8),
        ("ADAM", KIND.ADAM, 16),
        ("EXACT_ADAGRAD", KIND.ADAGRAD, 8),
        ("EXACT_ROWWISE_ADAGRAD", KIND.ROWWISE_ADAGRAD, 1),
        ("ROWWISE_ADAGRAD", KIND.ROWWISE_ADAGRAD, 1),
        ("PARTIAL_ROWWISE_ADAM", KIND.PARTIAL_ROWWISE_ADAM, 9),
        ("FTRL", KIND.FTRL, 16),
        ("SMART_DECAY_ADAM", KIND.SMART_DECAY_ADAM, 18),
    ],
)
def test_kind_and_state(optim_type: str, kind: KIND, state: int) -> None:
    optimizer = Optimizer.from_emb_optim_type(optim_type)
    assert optimizer.kind is kind
    assert optimizer.state_dim(8) == state
    assert get_optimizer_state_dim(optim_type, 8) == state
    assert get_optimizer_state_dim(optim_type, 8, torch.float16) == state
    assert get_optimizer_ckpt_state_dim(optim_type, 8) == state
    assert torch.equal(optimizer.initial_state(8), torch.zeros(state))


def test_state_dim_refusals() -> None:
    assert get_optimizer_state_dim(EmbOptimType.NONE, 8) == 0
    with pytest.raises(InvalidArgumentError, match="LAMB.*allowed"):
        get_optimizer_state_dim(EmbOptimType.LAMB, 8)
    with pytest.raises(InvalidArgumentError, match="dim is 0"):
        Optimizer.from_emb_optim_type("sgd").state_dim(0)


@pytest.mark.parametrize("kind", list(KIND))
def test_initial_accumulator_value(kind: KIND) -> None:
    optimizer = Optimizer(kind, OptimizerArgs(initial_accumulator_value=0.25))
    accumulates = kind in (KIND.ADAGRAD, KIND.ROWWISE_ADAGRAD, KIND.FTRL)
    assert optimizer.state_initial_value() == (0.25 if accumulates else 0.0)


def test_ftrl_starts_z_at_zero_and_n_at_the_initial_value() -> None:
    optimizer = Optimizer(KIND.FTRL, OptimizerArgs(initial_accumulator_value=0.5))
    assert optimizer.initial_state(2).tolist() == [0.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("kind", list(KIND))
def test_weight_decay_mode(kind: KIND) -> None:
    by_itself = kind in (
        KIND.ADAM,
        KIND.PARTIAL_ROWWISE_ADAM,
        KIND.SMART_DECAY_ADAM,
    )
    assert Optimizer(kind, OptimizerArgs()).decoupled_weight_decay is by_itself
    assert not Optimizer(kind, OptimizerArgs(weight_decay_mode=1)).decoupled_weight_decay
    if kind is KIND.FTRL:  # its weight is a function of z and n: there is nothing to decay
        with pytest.raises(InvalidArgumentError, match="weight_decay_mode is 2"):
            Optimizer(kind, OptimizerArgs(weight_decay_mode=2))
    else:
        assert Optimizer(kind, OptimizerArgs(weight_decay_mode=2)).decoupled_weight_decay


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": math.nan}, InvalidArgumentError, "learning_rate is nan.*>= 0"),
        ({"learning_rate": -0.1}, InvalidArgumentError, "learning_rate is -0.1.*>= 0"),
        ({"learning_rate": "0.1"}, ArgumentTypeError, "learning_rate"),
        ({"eps": -1e-8}, InvalidArgumentError, "eps"),
        ({"beta1": 1.0}, InvalidArgumentError, "beta1 is 1.0.*< 1.0"),
        ({"beta2": -0.1}, InvalidArgumentError, "beta2"),
        ({"max_gradient": 0.0}, InvalidArgumentError, "max_gradient is 0.0.*> 0"),
        ({"weight_decay": math.inf}, InvalidArgumentError, "weight_decay is inf"),
        ({"weight_decay_mode": 3}, InvalidArgumentError, r"0 \(NONE\), 1 \(L2\), 2 \(DECOUPLE\)"),
        ({"weight_decay_mode": "l2"}, ArgumentTypeError, "weight_decay_mode"),
        ({"stochastic_rounding": 1}, ArgumentTypeError, "stochastic_rounding.*True or False"),
        ({"lambda1": -1.0}, InvalidArgumentError, "lambda1"),
        ({"max_norm": None}, ArgumentTypeError, "max_norm"),
    ],
)
def test_bad_numbers(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OptimizerArgs(**arguments)


@pytest.mark.parametrize(
    "name",
    [
        "max_norm",
        "eta",
        "counter_halflife",
        "adjustment_iter",
        "adjustment_ub",
        "learning_rate_mode",
        "grad_sum_decay",
        "tail_id_threshold",
        "is_tail_id_thresh_ratio",
        "total_hash_size",
        "weight_norm_coefficient",
        "lower_bound",
        "regularization_mode",
    ],
)
def test_what_nothing_implements_is_refused(name: str) -> None:
    two: dict[str, Any] = {name: 2}
    args = OptimizerArgs(**two)
    with pytest.raises(InvalidArgumentError, match=f"{name} is 2.*nothing implements"):
        Optimizer.from_emb_optim_type("adam", args)


@pytest.mark.parametrize(
    ("name", "value", "kinds"),
    [
        ("dampening", 0.1, {KIND.MOMENTUM}),
        ("nesterov", True, {KIND.MOMENTUM}),
        ("lr_decay", 0.1, {KIND.ADAGRAD, KIND.ROWWISE_ADAGRAD}),
        ("lambda1", 0.1, {KIND.FTRL}),
        ("lambda2", 0.1, {KIND.FTRL}),
        ("beta", 1.0, {KIND.FTRL}),
        ("maximize", True, set(KIND)),
        ("weight_decay", 0.1, set(KIND)),
    ],
)
@pytest.mark.parametrize("kind", list(KIND))
def test_an_argument_is_used_or_refused(
    kind: KIND, name: str, value: Any, kinds: set[KIND]
) -> None:
    args = OptimizerArgs(**{name: value})
    if kind in kinds:
        assert getattr(Optimizer(kind, args).args, name) == value
    else:
        with pytest.raises(InvalidArgumentError, match=f"{name} is .*{kind.name}"):
            Optimizer(kind, args)


def test_nesterov_needs_momentum_and_no_dampening() -> None:
    with pytest.raises(InvalidArgumentError, match="nesterov.*momentum above 0"):
        Optimizer(KIND.MOMENTUM, OptimizerArgs(nesterov=True, momentum=0.0))
    with pytest.raises(InvalidArgumentError, match="nesterov.*dampening 0"):
        Optimizer(KIND.MOMENTUM, OptimizerArgs(nesterov=True, dampening=0.5))


def test_an_optimizer_has_its_own_copy_of_the_arguments() -> None:
    args = OptimizerArgs(learning_rate=0.5)
    optimizer = Optimizer.from_emb_optim_type("sgd", args)
    args.learning_rate = 0.1
    assert optimizer.args.learning_rate == 0.5
    optimizer.set_learning_rate(0.25)
    assert (optimizer.args.learning_rate, args.learning_rate) == (0.25, 0.1)
    with pytest.raises(InvalidArgumentError, match="learning_rate"):
        optimizer.set_learning_rate(math.nan)
    assert optimizer.args.learning_rate == 0.25


def test_optimizers_compare_by_value_and_their_kind_is_fixed() -> None:
    optimizer = Optimizer.from_emb_optim_type("adam")
    assert optimizer == Optimizer.from_emb_optim_type(EmbOptimType.ADAM, OptimizerArgs())
    assert copy.deepcopy(optimizer) == optimizer
    assert optimizer != Optimizer.from_emb_optim_type("adam", OptimizerArgs(beta1=0.5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.kind = KIND.SGD  # type: ignore[misc]


def test_wrong_argument_objects() -> None:
    with pytest.raises(ArgumentTypeError, match="args"):
        Optimizer.from_emb_optim_type("adam", {"learning_rate": 0.1})  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="kind.*SGD, MOMENTUM"):
        Optimizer(2, OptimizerArgs())  # type: ignore[arg-type]


def test_string_to_opt_type_and_required_arg() -> None:
    for optim_type in EmbOptimType:
        assert string_to_opt_type(optim_type.value) is optim_type
        assert str(optim_type) == optim_type.value
    with pytest.raises(ValueError, match="'adamw'.*adam"):
        string_to_opt_type("adamw")
    assert get_required_arg({"lr": 0.1}, "lr") == 0.1
    with pytest.raises(ValueError, match="'eps'.*lr"):
        get_required_arg({"lr": 0.1}, "eps")
