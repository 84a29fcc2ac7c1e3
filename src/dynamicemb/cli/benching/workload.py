"""What is looked up: a table of random 64-bit ids, and batches drawn from it.

``uniform`` draws every id equally often; ``zipf`` draws the k-th most popular one with weight
k ** -1.05. Popularity has nothing to do with the order of the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DIM = 64
BATCH = 65_536
BAG = 10
ZIPF_EXPONENT = 1.05
DISTRIBUTIONS = ("uniform", "zipf")


@dataclass(frozen=True)
class Batch:
    """One batch. ``rows`` are the row numbers of ``ids`` in a static table: what the peers get."""

    distribution: str
    index: int
    ids: Tensor
    rows: Tensor
    offsets: Tensor
    grad: Tensor


class Workload:
    """``n`` distinct random ids; ``ids[row]`` is the id that a static table keeps in ``row``. Rows
    have ``dim`` columns; ids and batches are on ``device``."""

    def __init__(self, n: int, *, dim: int = DIM, device: torch.device | str = "cpu") -> None:
        generator = np.random.default_rng(1)
        ids = np.unique(generator.integers(-(2**62), 2**62, size=n + n // 1000 + 1000))
        generator.shuffle(ids)
        self.n, self.dim, self.device = n, dim, torch.device(device)
        self.ids = torch.from_numpy(np.ascontiguousarray(ids[:n])).to(device)
        self._cdf: NDArray[np.float64] | None = None
        self._by_popularity: NDArray[np.int64] | None = None

    def batches(self, distribution: str, *, size: int = BATCH, bag: int = 1) -> list[Batch]:
        """At least 16 batches (fewer if they are very large) of ``size // bag`` bags of ``bag``.

        Together they touch a million ids or more, so that small batches are not served from cache.
        """
        bags = size // bag
        generator = np.random.default_rng(2)
        offsets = (torch.arange(bags + 1, dtype=torch.int64, device="cpu") * bag).to(self.device)
        grad = (
            torch.rand(bags, self.dim, generator=torch.Generator().manual_seed(3), device="cpu")
            - 0.5
        )
        grad = grad.to(self.device)
        count = max(16 if size < 2**19 else 4, math.ceil(2**20 / size))
        result = []
        for index in range(count):
            rows = torch.from_numpy(self._draw(generator, distribution, bags * bag))
            rows = rows.to(self.device)
            result.append(Batch(distribution, index, self.ids[rows], rows, offsets, grad))
        return result

    def _draw(
        self, generator: np.random.Generator, distribution: str, size: int
    ) -> NDArray[np.int64]:
        if distribution == "uniform":
            return generator.integers(0, self.n, size=size)
        if self._cdf is None or self._by_popularity is None:
            self._cdf = np.cumsum(np.arange(1, self.n + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
            self._cdf /= self._cdf[-1]
            self._by_popularity = np.random.default_rng(7).permutation(self.n)
        rank = np.searchsorted(self._cdf, generator.random(size))
        return self._by_popularity[np.minimum(rank, self.n - 1)]
