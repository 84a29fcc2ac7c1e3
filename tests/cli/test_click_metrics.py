"""Loss, AUC, normalised entropy and the sliding window."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dynamicemb.cli.training.metrics import Window, auc, log_loss, normalised_entropy


def test_auc_is_the_share_of_pairs_in_order_with_ties_counting_half() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.3).astype(np.float32)
    predictions = np.round(rng.normal(size=300) + labels, 1)
    positive, negative = predictions[labels == 1], predictions[labels == 0]
    pairs = positive[:, None] - negative[None, :]
    expected = ((pairs > 0).sum() + 0.5 * (pairs == 0).sum()) / pairs.size
    assert auc(labels, predictions) == pytest.approx(expected, abs=1e-12)


def test_auc_without_one_of_the_labels_is_not_a_number() -> None:
    assert math.isnan(auc(np.ones(3), np.arange(3.0)))
    assert math.isnan(normalised_entropy(np.zeros(3), np.arange(3.0)))


def test_loss_is_torchs_and_does_not_overflow() -> None:
    labels = np.array([0.0, 1.0, 1.0, 0.0], dtype=np.float32)
    logits = np.array([-300.0, 300.0, 0.5, 2.0], dtype=np.float32)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(labels)
    )
    assert log_loss(labels, logits) == pytest.approx(expected.item(), rel=1e-6)


def test_predicting_the_mean_has_normalised_entropy_1() -> None:
    labels = np.array([1.0] * 20 + [0.0] * 80, dtype=np.float32)
    assert normalised_entropy(labels, np.full(100, math.log(0.2 / 0.8))) == pytest.approx(1.0)


def test_the_window_holds_the_last_examples_in_whole_batches_and_is_restored() -> None:
    window = Window(("a", "b"), 25)
    for first in range(0, 100, 10):
        values = np.arange(first, first + 10, dtype=np.float32)
        window.add(values % 2, {"a": values, "b": -values})
    assert window.examples == 30
    assert window.logits("a").tolist() == list(range(70, 100))
    again = Window(("a", "b"), 25)
    again.restore(window.state())
    assert again.measure() == window.measure()
    assert again.examples == 30
