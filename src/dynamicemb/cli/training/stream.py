"""The built-in stream of clicks: ids that nobody counted beforehand.

Users and items have ids anywhere in the 64-bit range. Every day new ones appear, by popularity a
Zipf distribution, and the popularity of the old ones falls by a constant factor until they are
gone. An example is a user, the item shown, the items the user saw before it, and dense features.
Every id has hidden effects, drawn once; a click is a coin whose odds are the sum of the effects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from dynamicemb.cli.training.batch import Batch, Schema, Source

#: Popularity below which an id is gone, as a share of what it was born with.
GONE = 0.01
DENSE = ("hour_sin", "hour_cos", "price", "position")
DENSE_EFFECTS = np.array([0.3, 0.2, -0.4, -0.3], dtype=np.float32)
USERS, ITEMS, EXAMPLES = 0, 1, 2  # streams of random numbers
BLOCK = 4096  # examples that are drawn together
SEEN = 2  # the column of _Part that has several ids for an example


class Population:
    """The ids of one day with their effects; a function of (seed, kind, day)."""

    def __init__(
        self, seed: int, kind: int, day: int, *, births: int, fade: float, effects: int
    ) -> None:
        days = math.ceil(math.log(GONE) / math.log(fade))
        ids, weights, hidden = [], [], []
        zipf = 1.0 / np.arange(1, births + 1)
        for age in range(days):
            # Days before the first have numbers too, counted from a day that is old enough.
            rng = np.random.default_rng([seed, kind, day - age + days])
            ids.append(rng.integers(-(2**63), 2**63 - 1, births, endpoint=True))
            hidden.append(rng.normal(size=(births, effects)).astype(np.float32))
            weights.append(zipf * fade**age)
        self.ids = np.concatenate(ids)
        self.effects = np.concatenate(hidden)
        self._cumulative = np.cumsum(np.concatenate(weights))
        self._cumulative /= self._cumulative[-1]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Places of ``count`` ids, by popularity."""
        places = np.searchsorted(self._cumulative, rng.random(count), side="right")
        return np.minimum(places, len(self.ids) - 1)


class ClickStream(Source):
    """``days`` days of examples; the same for the same numbers, from any example on."""

    schema = Schema(dense=DENSE, tables={"user": ("user",), "item": ("item", "seen")})

    def __init__(self, *, days: int, examples_per_day: int, new_ids: int, seed: int) -> None:
        self._per_day, self._births, self._seed = examples_per_day, new_ids, seed
        self.examples = days * examples_per_day
        self.description = (
            f"synthetic clicks: {days} days of {examples_per_day:,} examples, "
            f"{new_ids:,} new items and {max(1, new_ids // 2):,} new users a day, seed {seed}"
        )

    def day_of(self, examples: int) -> float:
        return examples / self._per_day

    def batches(self, skip: int, size: int) -> Iterator[Batch]:
        assert self.examples is not None
        block = _Part.empty()
        begin = skip // BLOCK * BLOCK
        drop = skip - begin
        while begin < self.examples:
            part = self._block(begin, min(BLOCK, self.examples - begin))
            block = _Part.join(block, part.after(drop))
            begin, drop = begin + BLOCK, 0
            while len(block.labels) >= size:
                yield block.before(size).batch()
                block = block.after(size)
        if len(block.labels):
            yield block.batch()

    def _block(self, begin: int, size: int) -> _Part:
        """Examples ``begin`` to ``begin + size``, which may be of two days or more."""
        parts = []
        end = begin + size
        while begin < end:
            day = begin // self._per_day
            stop = min(end, (day + 1) * self._per_day)
            parts.append(self._of_day(day, begin, stop - begin))
            begin = stop
        return _Part.join(*parts)

    def _of_day(self, day: int, begin: int, size: int) -> _Part:
        users, items = self._populations(day)
        rng = np.random.default_rng([self._seed, EXAMPLES, begin])
        user, item = users.draw(rng, size), items.draw(rng, size)
        lengths = rng.integers(1, 6, size)
        seen = items.draw(rng, int(lengths.sum()))
        dense = rng.normal(size=(size, len(DENSE))).astype(np.float32)
        bag = np.repeat(np.arange(size), lengths)
        seen_effect = np.bincount(bag, items.effects[seen, 1], minlength=size) / lengths
        odds = users.effects[user, 0] + items.effects[item, 0] + seen_effect
        odds += dense @ DENSE_EFFECTS - 1.0
        labels = rng.random(size) < 1.0 / (1.0 + np.exp(-odds))
        return _Part(
            users.ids[user],
            items.ids[item],
            items.ids[seen],
            lengths,
            dense,
            labels.astype(np.float32),
            odds.astype(np.float32),
        )

    def _populations(self, day: int) -> tuple[Population, Population]:
        known = getattr(self, "_today", None)
        if known is None or known[0] != day:
            users = Population(
                self._seed, USERS, day, births=max(1, self._births // 2), fade=0.7, effects=1
            )
            items = Population(self._seed, ITEMS, day, births=self._births, fade=0.5, effects=2)
            self._today = known = (day, users, items)
        return known[1], known[2]


class _Part:
    """Some examples in columns."""

    def __init__(self, *columns: np.ndarray) -> None:
        self.columns = columns
        self.user, self.item, self.seen, self.lengths, self.dense, self.labels, self.odds = columns

    @staticmethod
    def empty() -> _Part:
        ids, numbers = np.empty(0, np.int64), np.empty(0, np.float32)
        return _Part(ids, ids, ids, ids, np.empty((0, len(DENSE)), np.float32), numbers, numbers)

    @staticmethod
    def join(*parts: _Part) -> _Part:
        return _Part(*(np.concatenate(some) for some in zip(*(p.columns for p in parts))))  # noqa: B905

    def before(self, count: int) -> _Part:
        """The first ``count`` examples."""
        seen = int(self.lengths[:count].sum())
        return _Part(*(one[: seen if n == SEEN else count] for n, one in enumerate(self.columns)))

    def after(self, count: int) -> _Part:
        """The examples after the first ``count``."""
        seen = int(self.lengths[:count].sum())
        return _Part(*(one[seen if n == SEEN else count :] for n, one in enumerate(self.columns)))

    def batch(self) -> Batch:
        size = len(self.labels)
        lengths = np.concatenate([np.ones(2 * size, dtype=np.int64), self.lengths])
        return Batch(
            dense=torch.from_numpy(self.dense.copy()),
            ids=torch.from_numpy(np.concatenate([self.user, self.item, self.seen])),
            lengths=torch.from_numpy(lengths),
            labels=torch.from_numpy(self.labels.copy()),
            odds=torch.from_numpy(self.odds.copy()),
        )
