"""Our options as plain numbers, for the engine and for the kernels."""

from __future__ import annotations

import math

import torch

from dynamicemb.optimizers import Optimizer
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbTableOptions,
    complete_initializer_args,
)

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_MODES = {
    DynamicEmbInitializerMode.CONSTANT: 0,
    DynamicEmbInitializerMode.UNIFORM: 1,
    DynamicEmbInitializerMode.NORMAL: 2,
    DynamicEmbInitializerMode.TRUNCATED_NORMAL: 3,
    DynamicEmbInitializerMode.DEBUG: 4,
}
LFU_STRATEGY, NO_EVICTION_STRATEGY, PAIR_STRATEGY = 3, 4, 5


def strategy_number(options: DynamicEmbTableOptions) -> int:
    """The engine's number of the score strategy."""
    strategy = options.score_strategy
    return PAIR_STRATEGY if isinstance(strategy, tuple) else int(strategy)


def has_batch_scores(strategy: int) -> bool:
    """Whether all rows of a batch take one score, by which rows are evicted."""
    return strategy not in (LFU_STRATEGY, NO_EVICTION_STRATEGY, PAIR_STRATEGY)


def initializer_numbers(args: DynamicEmbInitializerArgs) -> dict[str, float]:
    """The numbers of ``args`` by the engine's names, with the bounds completed; mode is one of
    0 to 4."""
    args = complete_initializer_args(args)
    cdf, spread = (0.0, 1.0), args.std_dev
    if args.mode is DynamicEmbInitializerMode.TRUNCATED_NORMAL:
        assert args.lower is not None
        assert args.upper is not None
        low, high = ((x - args.mean) / args.std_dev for x in (args.lower, args.upper))
        if low + high > 0:  # draw from the mirrored range: floats are finer near 0 than near 1
            low, high, spread = -high, -low, -spread
        cdf = (0.5 * math.erfc(-low / math.sqrt(2.0)), 0.5 * math.erfc(-high / math.sqrt(2.0)))
    return {
        "mode": _MODES[args.mode],
        "value": args.value,
        "lower": 0.0 if args.lower is None else args.lower,
        "upper": 1.0 if args.upper is None else args.upper,
        "mean": args.mean,
        "std_dev": spread,
        "cdf_lower": cdf[0],
        "cdf_upper": cdf[1],
    }


def state_layout(optimizer: Optimizer, dim: int) -> tuple[int, bool, list[float]]:
    """(columns in the row, whether a scalar goes with it, initial values)."""
    initial = optimizer.initial_state(dim).tolist()
    scalar = optimizer.has_scalar_state
    return len(initial) - scalar, scalar, initial
