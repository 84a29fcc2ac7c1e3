"""Checked calls, and batches that wait for their forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynamicemb.table import Lookup, Pooling


@dataclass
class Plan:
    """A checked call, not changed any more: the ids to look up, and how they become the output.

    ``keep``: where padding ids were left out, the places (int64) of the others among the ``count``
    ids of the call.
    """

    ids: torch.Tensor
    bounds: Sequence[int] | torch.Tensor
    pooling: Pooling
    count: int
    keep: torch.Tensor | None = None


class Prefetched:
    """A batch that waits for its forward, made on the stream that is current now.

    ``lookup``: ``None`` if its rows are being read ahead. ``counts``: of the ids, if given.
    """

    def __init__(self, plan: Plan, lookup: Lookup | None, counts: torch.Tensor | None) -> None:
        self.plan, self.lookup, self.counts = plan, lookup, counts
        self._made: Any = None
        if plan.ids.is_cuda:
            self._made = torch.cuda.current_stream(plan.ids.device).record_event()

    def order(self) -> None:
        """Let the current stream use what another one may have made."""
        if self._made is not None:
            stream = torch.cuda.current_stream(self.plan.ids.device)
            stream.wait_event(self._made)
            for tensor in (self.plan.ids, self.plan.bounds, self.counts):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)


def same_batch(one: Plan, two: Plan) -> bool:
    """Whether two plans look up the same ids in the same tables."""
    return _equal_bounds(one.bounds, two.bounds) and torch.equal(one.ids, two.ids)


def _equal_bounds(a: Sequence[int] | torch.Tensor, b: Sequence[int] | torch.Tensor) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a is b or (not isinstance(a, torch.Tensor) and a == b)
