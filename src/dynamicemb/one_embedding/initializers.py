"""How new rows start: dictionaries that say which distribution, and what they mean here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamicemb.errors import check_choice, check_number, wrong_type, wrong_value
from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

InitializerOptions = dict[str, Any]

_KEYS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "constant": ("value",),
    "trunc_normal": ("mean", "std", "a", "b"),
}


def make_uniform_initializer(low: float = 0.0, high: float = 1.0) -> InitializerOptions:
    """Uniform over ``[low, high)``."""
    return _checked({"type": "uniform", "low": low, "high": high})


def make_normal_initializer(mean: float = 0.0, std: float = 1.0) -> InitializerOptions:
    """Normal with this mean and standard deviation."""
    return _checked({"type": "normal", "mean": mean, "std": std})


def make_constant_initializer(value: float) -> InitializerOptions:
    """Every number is ``value``."""
    return _checked({"type": "constant", "value": value})


def make_trunc_normal_initializer(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> InitializerOptions:
    """Normal, of which only what lies in ``[a, b]`` is drawn; the bounds are absolute."""
    return _checked({"type": "trunc_normal", "mean": mean, "std": std, "a": a, "b": b})


def _checked(options: InitializerOptions) -> InitializerOptions:
    initializer_args("initializer", options)
    return options


def initializer_args(name: str, options: object) -> DynamicEmbInitializerArgs:
    """What the dictionary ``options`` of one of the functions above means; ``name`` is for the
    error if it is none of them."""
    if not isinstance(options, Mapping):
        raise wrong_type(name, options, "a dictionary of make_uniform_initializer and the like")
    kind = options.get("type")
    check_choice(f"type of {name}", kind, _KEYS)
    keys = _KEYS[str(kind)]
    if set(options) != {"type", *keys}:
        raise wrong_value(name, dict(options), f"the keys type, {', '.join(keys)}")
    numbers = [check_number(f"{key} of {name}", options[key]) for key in keys]
    mode = DynamicEmbInitializerMode
    if kind == "uniform":
        return DynamicEmbInitializerArgs(mode.UNIFORM, lower=numbers[0], upper=numbers[1])
    if kind == "normal":
        return DynamicEmbInitializerArgs(mode.NORMAL, mean=numbers[0], std_dev=numbers[1])
    if kind == "constant":
        return DynamicEmbInitializerArgs(mode.CONSTANT, value=numbers[0])
    mean, std, low, high = numbers
    return DynamicEmbInitializerArgs(
        mode.TRUNCATED_NORMAL, mean=mean, std_dev=std, lower=low, upper=high
    )
