"""The C++ engine, and our options in its words."""

from __future__ import annotations

from typing import Any

import torch

from dynamicemb import _engine as _engine
from dynamicemb.options import DynamicEmbInitializerArgs
from dynamicemb.table.numbers import initializer_numbers

TRAIN, INSERT, ASSIGN, LOCATE = range(4)  # the engine's BatchMode


def threads() -> int:
    """Threads of one engine call."""
    return torch.get_num_threads()


def address(tensor: torch.Tensor | None) -> int:
    """Where the numbers of ``tensor`` start; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def engine_initializer(args: DynamicEmbInitializerArgs, seed: int) -> _engine.Initializer:
    """The engine's form of ``args``, with the bounds completed."""
    numbers: dict[str, Any] = initializer_numbers(args)
    return _engine.Initializer(**numbers, seed=seed)
