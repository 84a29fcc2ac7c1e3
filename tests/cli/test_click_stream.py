"""The built-in stream: the same for the same numbers, from any example on, and drifting."""

from __future__ import annotations

import numpy as np
import torch

from dynamicemb.cli.training.batch import Batch
from dynamicemb.cli.training.stream import ClickStream, Population


def stream(seed: int = 0, days: int = 3) -> ClickStream:
    return ClickStream(days=days, examples_per_day=5000, new_ids=400, seed=seed)


def joined(batches: list[Batch]) -> tuple[torch.Tensor, ...]:
    """(labels, dense, ids of the users) of all examples."""
    return (
        torch.cat([one.labels for one in batches]),
        torch.cat([one.dense for one in batches]),
        torch.cat([one.ids[: one.size] for one in batches]),
    )


def test_the_same_seed_gives_the_same_examples() -> None:
    first, second = (list(stream().batches(0, 512)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.lengths, b.lengths)
        assert torch.equal(a.labels, b.labels)
    other = next(stream(seed=1).batches(0, 512))
    assert not torch.equal(first[0].ids, other.ids)


def test_examples_do_not_depend_on_where_reading_began_or_on_the_batch_size() -> None:
    whole = joined(list(stream().batches(0, 512)))
    for skip, size in ((0, 1000), (1, 512), (4096, 700), (4999, 333), (12_345, 512)):
        part = joined(list(stream().batches(skip, size)))
        assert all(torch.equal(a[skip:], b) for a, b in zip(whole, part, strict=True))


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    short, long = (next(stream(days=days).batches(9000, 512)) for days in (2, 5))
    assert torch.equal(short.ids, long.ids)


def test_all_examples_come_and_every_feature_has_its_bags() -> None:
    batches = list(stream().batches(0, 2048))
    assert [one.size for one in batches] == [2048] * 7 + [664]
    for one in batches:
        lengths = one.lengths.view(3, one.size)
        assert lengths[:2].eq(1).all()
        assert lengths[2].min() >= 1
        assert lengths[2].max() <= 5
        assert lengths.sum() == len(one.ids)


def test_old_ids_fade_and_new_ones_come_every_day() -> None:
    days = [Population(0, 1, day, births=300, fade=0.5, effects=1) for day in range(9)]
    assert len(np.intersect1d(days[0].ids, days[1].ids)) == len(days[0].ids) - 300
    assert len(np.intersect1d(days[0].ids, days[8].ids)) == 0
    same = np.flatnonzero(days[0].ids == days[0].ids[0])[0]
    later = np.flatnonzero(days[3].ids == days[0].ids[0])[0]
    assert days[0].effects[same] == days[3].effects[later]  # an id keeps its effects
    shares = []
    for day in days[:4]:
        drawn = day.ids[day.draw(np.random.default_rng(5), 20_000)]
        shares.append(np.isin(drawn, days[0].ids[:300]).mean())
    assert shares == sorted(shares, reverse=True)
    assert shares[3] < shares[0] / 4


def test_popularity_is_zipf() -> None:
    day = Population(0, 0, 0, births=1000, fade=0.5, effects=1)
    places = day.draw(np.random.default_rng(1), 100_000)
    newest = np.bincount(places[places < 1000], minlength=1000)
    assert 1.6 < newest[0] / newest[1] < 2.4
    assert 6 < newest[0] / newest[9] < 16


def test_labels_follow_the_odds() -> None:
    labels, odds = [], []
    for one in stream().batches(0, 1000):
        assert one.odds is not None
        labels.append(one.labels)
        odds.append(one.odds)
    likely = torch.sigmoid(torch.cat(odds))
    assert abs(torch.cat(labels).mean() - likely.mean()) < 0.01
    top = likely > 0.7
    assert abs(torch.cat(labels)[top].mean() - likely[top].mean()) < 0.03
