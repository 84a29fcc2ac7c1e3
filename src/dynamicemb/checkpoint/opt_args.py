"""A table's hyper-parameters and options as JSON, the former as existing tools read them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from dynamicemb.errors import CorruptCheckpointError, DynamicEmbError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import (
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbTableOptions,
    ScoreStrategy,
    get_evict_strategy,
)

#: By fbgemm's values, and ours.
_TYPE_OF_KIND = {
    OptimizerKind.SGD: "sgd",
    OptimizerKind.MOMENTUM: "momentum_sgd",
    OptimizerKind.ADAM: "adam",
    OptimizerKind.ADAGRAD: "exact_adagrad",
    OptimizerKind.ROWWISE_ADAGRAD: "exact_row_wise_adagrad",
    OptimizerKind.PARTIAL_ROWWISE_ADAM: "partial_row_wise_adam",
    OptimizerKind.FTRL: "ftrl",
    OptimizerKind.SMART_DECAY_ADAM: "smart_decay_adam",
}
_ADAM = ("beta1", "beta2", "eps", "weight_decay")
_ADAGRAD = ("eps", "initial_accumulator_value")
# The numbers that upstream keeps of each kind; kinds of ours keep all they use.
_NUMBERS: dict[OptimizerKind, tuple[str, ...]] = {
    OptimizerKind.SGD: (),
    OptimizerKind.MOMENTUM: ("momentum", "dampening", "nesterov", "weight_decay"),
    OptimizerKind.ADAM: _ADAM,
    OptimizerKind.ADAGRAD: _ADAGRAD,
    OptimizerKind.ROWWISE_ADAGRAD: _ADAGRAD,
    OptimizerKind.PARTIAL_ROWWISE_ADAM: _ADAM,
    OptimizerKind.FTRL: (
        "lambda1",
        "lambda2",
        "beta",
        "initial_accumulator_value",
        "weight_decay",
    ),
    OptimizerKind.SMART_DECAY_ADAM: _ADAM,
}
_COUNTS_ITERATIONS = (
    OptimizerKind.ADAM,
    OptimizerKind.PARTIAL_ROWWISE_ADAM,
    OptimizerKind.SMART_DECAY_ADAM,
)
_EVICT_NAMES = {
    DynamicEmbEvictStrategy.LRU: "KLru",
    DynamicEmbEvictStrategy.LFU: "KLfu",
    DynamicEmbEvictStrategy.CUSTOMIZED: "KCustomized",
}


def opt_args_json(
    optimizer: Optimizer, strategy: ScoreStrategy, *, iteration: int, step: int, dist_type: str
) -> dict[str, Any]:
    """The content of ``<table>_opt_args.json``."""
    args = asdict(optimizer.args)
    content: dict[str, Any] = {
        "opt_type": _TYPE_OF_KIND[optimizer.kind],
        "lr": args["learning_rate"],
    }
    if optimizer.kind in _COUNTS_ITERATIONS:
        content["iters"] = iteration
    content |= {name: args[name] for name in _NUMBERS[optimizer.kind]}
    return content | {
        "evict_strategy": evict_strategy_text(strategy),
        "dist_type": dist_type,
        "step_score": step,
    }


def evict_strategy_text(strategy: ScoreStrategy) -> str:
    """How upstream writes the way a table evicts."""
    return f"EvictStrategy.{_EVICT_NAMES[get_evict_strategy(strategy)]}"


def optimizer_from_json(content: Mapping[str, Any], where: str) -> Optimizer:
    """The optimizer of a ``<table>_opt_args.json``; numbers it does not have are the defaults."""
    kinds = {one: kind for kind, one in _TYPE_OF_KIND.items()}
    name = content.get("opt_type")
    if name not in kinds:
        raise CorruptCheckpointError(
            f"opt_type in {where} is {name!r}; allowed: {', '.join(kinds)}"
        )
    kind = kinds[name]
    numbers = {key: content[key] for key in _NUMBERS[kind] if key in content}
    if "lr" in content:
        numbers["learning_rate"] = content["lr"]
    try:
        return Optimizer(kind, replace(OptimizerArgs(), **numbers))
    except DynamicEmbError as error:
        raise CorruptCheckpointError(f"{where}: {error}") from error


def options_json(options: DynamicEmbTableOptions) -> dict[str, Any]:
    """Every option as a word or a number, to be read by people. Objects are named by their class
    alone: what a store or strategy keeps inside is not for a file."""
    return {item.name: _plain(getattr(options, item.name)) for item in fields(options)}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, DynamicEmbInitializerArgs):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__
