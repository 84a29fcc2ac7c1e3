"""How good predictions are: loss, AUC and normalised entropy over a sliding window."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np


def auc(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The share of (click, no click) pairs in the right order, ties counting half; NaN if one of
    the two is missing."""
    _, inverse, counts = np.unique(predictions, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # ties share the mean of their ranks
    clicks = labels > 0.5
    positive = int(clicks.sum())
    negative = len(labels) - positive
    if positive == 0 or negative == 0:
        return math.nan
    return float((rank[clicks].sum() - positive * (positive + 1) / 2) / (positive * negative))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """The mean cross entropy in nats."""
    # log(1 + exp(x)) - label * x, in a form that does not overflow
    x = logits.astype(np.float64)
    return float(np.mean(np.maximum(x, 0) - x * labels + np.log1p(np.exp(-np.abs(x)))))


def normalised_entropy(labels: np.ndarray, logits: np.ndarray) -> float:
    """The loss over that of always predicting the share of clicks: below 1 is better than knowing
    nothing about the examples; NaN if all labels are the same."""
    rate = float(labels.mean())
    if rate in (0.0, 1.0):
        return math.nan
    return log_loss(labels, logits) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


class Window:
    """Labels and logits of the last ``size`` examples, for several predictors at once.

    Whole batches come and go, so it holds at least ``size`` examples once so many have come.
    """

    def __init__(self, names: tuple[str, ...], size: int) -> None:
        self.names, self.size = names, size
        self._batches: deque[np.ndarray] = deque()  # [1 + names, examples] float32
        self.examples = 0

    def add(self, labels: np.ndarray, logits: dict[str, np.ndarray]) -> None:
        rows = [labels, *(logits[name] for name in self.names)]
        self._append(np.stack(rows).astype(np.float32, copy=False))

    def _append(self, batch: np.ndarray) -> None:
        self._batches.append(batch)
        self.examples += batch.shape[1]
        while self.examples - self._batches[0].shape[1] >= self.size:
            self.examples -= self._batches.popleft().shape[1]

    def labels(self) -> np.ndarray:
        return self._row(0)

    def logits(self, name: str) -> np.ndarray:
        return self._row(1 + self.names.index(name))

    def _row(self, row: int) -> np.ndarray:
        return np.concatenate([batch[row] for batch in self._batches])

    def measure(self) -> dict[str, dict[str, float]]:
        """``{predictor: {"loss", "auc", "ne"}}`` over the window."""
        labels = self.labels()
        result = {}
        for name in self.names:
            logits = self.logits(name)
            result[name] = {
                "loss": log_loss(labels, logits),
                "auc": auc(labels, logits),
                "ne": normalised_entropy(labels, logits),
            }
        return result

    def state(self) -> list[np.ndarray]:
        return list(self._batches)

    def restore(self, state: list[Any]) -> None:
        self._batches.clear()
        self.examples = 0
        for batch in state:
            self._append(np.asarray(batch, dtype=np.float32))
