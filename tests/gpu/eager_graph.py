"""Graphs of training batches where there is no GPU: their launches are started one by one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class EagerGraph:
    """Stands in for a captured graph."""

    def __init__(self, replay: Any, space: Any, key: Any, n: int, out: torch.Tensor | None) -> None:
        self.key, self.n = key, n
        self.branches = SimpleNamespace(
            sorting=nullcontext,
            numbering=nullcontext,
            grouping=nullcontext,
            join_numbers=lambda: None,
            join=lambda: None,
        )
        self.addresses = torch.zeros(4, dtype=torch.int64)
        self.bounds = torch.zeros(replay._layout.tables + 1, dtype=torch.int64)
        self.launches = SimpleNamespace(replay=lambda: replay.start(self, space, out))


def use_for(replay: Any) -> None:
    """From now on batches of a size that came before are replayed."""

    def capture(space: Any, key: Any, n: int, out: torch.Tensor | None) -> bool:
        space.set_graph(EagerGraph(replay, space, key, n, out))
        return True

    replay._works, replay._capture = True, capture
