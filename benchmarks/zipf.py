"""Ids with a power law, and the hit rate that a least-recently-used cache has on them."""

from __future__ import annotations

import math

import torch


class Zipf:
    """Ids 0 to ``ids`` - 1, where id k has a share of (k + 1) ** -alpha."""

    def __init__(self, ids: int, alpha: float, seed: int) -> None:
        weights = torch.arange(1, ids + 1, dtype=torch.float64) ** -alpha
        self.shares = weights / weights.sum()
        self._edges = torch.cumsum(self.shares, 0)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> torch.Tensor:
        chances = torch.rand(count, generator=self._generator, dtype=torch.float64)
        return torch.searchsorted(self._edges, chances).clamp_(max=len(self._edges) - 1)

    def lru_hit_rate(self, slots: int) -> float:
        """Che's approximation for a cache of ``slots`` rows."""
        if slots >= len(self.shares):
            return 1.0
        low, high = 0.0, 1.0
        while self._inside(high) < slots:
            high *= 2
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self._inside(middle) < slots else (low, middle)
        return float((self.shares * -torch.expm1(-self.shares * high)).sum())

    def _inside(self, window: float) -> float:
        assert math.isfinite(window)
        return float((-torch.expm1(-self.shares * window)).sum())
