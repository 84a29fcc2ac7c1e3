"""How rows start, as objects that fill a buffer: an import path that existing code uses.

Tables need none of them; they take :class:`DynamicEmbInitializerArgs`. Values are those that a
table with the same seed would give the same ids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from dynamicemb.errors import wrong_type, wrong_value
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbTableOptions,
)
from dynamicemb.table import Table, create_table

__all__ = [
    "BaseDynamicEmbInitializer",
    "ConstantInitializer",
    "DebugInitializer",
    "NormalInitializer",
    "TruncatedNormalInitializer",
    "UniformInitializer",
    "create_initializer_from_args",
]


class BaseDynamicEmbInitializer:
    """Fills rows of a buffer by the numbers of ``args``, whose own ``mode`` does not matter: the
    subclass is the mode. A value is a pure function of seed, id and column.

    ``seed``: default drawn from torch's generator, so that ``torch.manual_seed`` governs it.
    ``args`` is copied and never changed; missing bounds are 0.0 and 1.0.
    """

    mode: ClassVar[DynamicEmbInitializerMode]

    def __init__(self, args: DynamicEmbInitializerArgs, *, seed: int | None = None) -> None:
        if not isinstance(args, DynamicEmbInitializerArgs):
            raise wrong_type("args", args, "DynamicEmbInitializerArgs")
        if not hasattr(self, "mode"):
            raise wrong_type("initializer", type(self).__name__, "one of its subclasses")
        self.args = replace(args, mode=self.mode)
        self.seed = seed
        self._tables: dict[tuple[int, torch.dtype, torch.device], Table] = {}

    def __call__(
        self, buffer: torch.Tensor, indices: torch.Tensor, keys: torch.Tensor | None = None
    ) -> None:
        """Write ``buffer[indices]``, in place: the rows of the ids ``keys``, one per index.

        ``buffer``: [n, dim], float32, float16, bfloat16. ``indices``: [k], int64, from 0 to n - 1.
        ``keys``: [k], any 64-bit ids; default: the indices themselves. All on one device.
        """
        if not isinstance(buffer, torch.Tensor) or buffer.dim() != 2 or buffer.shape[1] == 0:
            raise wrong_type("buffer", getattr(buffer, "shape", buffer), "a tensor [n, dim]")
        table = self._table(buffer)
        places = table.check_ids("indices", indices)
        ids = places if keys is None else table.check_ids("keys", keys)
        if len(ids) != len(places):
            raise wrong_value("len(keys)", len(ids), f"{len(places)}, as many as indices")
        if len(places) == 0:
            return
        low, high = (int(bound) for bound in torch.aminmax(places))
        if low < 0 or high >= len(buffer):
            wrong = low if low < 0 else high
            raise wrong_value("indices", wrong, f"0 to {len(buffer) - 1}, the rows of buffer")
        with torch.no_grad():
            buffer.index_copy_(0, places, table.initial_rows(ids, self.args))

    def _table(self, buffer: torch.Tensor) -> Table:
        """An empty table with rows like those of ``buffer``: it knows how they start."""
        key = (buffer.shape[1], buffer.dtype, buffer.device)
        if key not in self._tables:
            dim, dtype, device = key
            options = DynamicEmbTableOptions(dim=dim, max_capacity=1, embedding_dtype=dtype)
            self._tables[key] = create_table(options, seed=self.seed, device=device)
            self.seed = self._tables[key].seed
        return self._tables[key]


class NormalInitializer(BaseDynamicEmbInitializer):
    """``mean`` and ``std_dev``."""

    mode = DynamicEmbInitializerMode.NORMAL


class TruncatedNormalInitializer(BaseDynamicEmbInitializer):
    """``mean`` and ``std_dev``, inside ``lower`` and ``upper``."""

    mode = DynamicEmbInitializerMode.TRUNCATED_NORMAL


class UniformInitializer(BaseDynamicEmbInitializer):
    """Between ``lower`` and ``upper``."""

    mode = DynamicEmbInitializerMode.UNIFORM


class ConstantInitializer(BaseDynamicEmbInitializer):
    """``value``."""

    mode = DynamicEmbInitializerMode.CONSTANT


class DebugInitializer(BaseDynamicEmbInitializer):
    """The id modulo 100,000, in every column."""

    mode = DynamicEmbInitializerMode.DEBUG


_OF_MODE = {one.mode: one for one in BaseDynamicEmbInitializer.__subclasses__()}


def create_initializer_from_args(
    args: DynamicEmbInitializerArgs, *, seed: int | None = None
) -> BaseDynamicEmbInitializer:
    """The initializer of ``args.mode``."""
    if not isinstance(args, DynamicEmbInitializerArgs):
        raise wrong_type("args", args, "DynamicEmbInitializerArgs")
    if args.mode not in _OF_MODE:
        raise wrong_value("args.mode", args.mode, ", ".join(mode.name for mode in _OF_MODE))
    return _OF_MODE[args.mode](args, seed=seed)
