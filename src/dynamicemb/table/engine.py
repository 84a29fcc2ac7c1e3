"""Our options in the engine's words."""

from __future__ import annotations

import math

import torch

from dynamicemb import _engine
from dynamicemb.optimizers import Optimizer, OptimizerKind
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
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
PAIR_STRATEGY = 5
LFU_STRATEGY = 3
TRAIN, INSERT, ASSIGN, LOCATE = range(4)  # the engine's BatchMode


def threads() -> int:
    """Threads of one engine call."""
    return torch.get_num_threads()


def address(tensor: torch.Tensor | None) -> int:
    """Where the numbers of ``tensor`` start; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def engine_initializer(args: DynamicEmbInitializerArgs, seed: int) -> _engine.Initializer:
    """The engine's form of ``args``, with the bounds completed."""
    args = complete_initializer_args(args)
    cdf, spread = (0.0, 1.0), args.std_dev
    if args.mode is DynamicEmbInitializerMode.TRUNCATED_NORMAL:
        assert args.lower is not None
        assert args.upper is not None
        low, high = ((x - args.mean) / args.std_dev for x in (args.lower, args.upper))
        if low + high > 0:  # draw from the mirrored range: floats are finer near 0 than near 1
            low, high, spread = -high, -low, -spread
        cdf = (0.5 * math.erfc(-low / math.sqrt(2.0)), 0.5 * math.erfc(-high / math.sqrt(2.0)))
    return _engine.Initializer(
        mode=_MODES[args.mode],
        value=args.value,
        lower=0.0 if args.lower is None else args.lower,
        upper=1.0 if args.upper is None else args.upper,
        mean=args.mean,
        std_dev=spread,
        cdf_lower=cdf[0],
        cdf_upper=cdf[1],
        seed=seed,
    )


def state_layout(optimizer: Optimizer, dim: int) -> tuple[int, bool, list[float]]:
    """(columns in the row, whether a scalar goes with it, initial values)."""
    scalar = optimizer.kind in (OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.PARTIAL_ROWWISE_ADAM)
    initial = optimizer.initial_state(dim).tolist()
    return len(initial) - scalar, scalar, initial
