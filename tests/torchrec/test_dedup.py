"""Distinct ids of a batch, and counts that travel with them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all

from dynamicemb.hashing import mix, unmix
from dynamicemb.shard import dedup as module
from dynamicemb.shard.dedup import counts_of, dedup, distinct_per_table

EXTREMES = [0, -1, -2, -3, -4, 2**63 - 1, -(2**63), 1]


def reference(ids: list[int], bounds: list[int]) -> tuple[list[int], list[int], list[int]]:
    found: list[int] = []
    places: list[int] = []
    counts: list[int] = []
    for begin, end in pairwise(bounds):
        known: dict[int, int] = {}
        for one in ids[begin:end]:
            if one not in known:
                known[one] = len(found)
                found.append(one)
                counts.append(0)
            places.append(known[one])
            counts[known[one]] += 1
    return found, places, counts


@pytest.mark.parametrize("device_code", ["engine", "torch"])
@pytest.mark.parametrize("size", [0, 1, 2, 17, 1000])
def test_distinct_ids_in_order_of_first_occurrence(
    size: int, device_code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_code == "torch":  # what other devices run
        monkeypatch.setattr(module, "_distinct_on_cpu", module._distinct)
    generator = torch.Generator().manual_seed(size)
    pool = torch.randint(-(2**63), 2**63 - 1, (max(size // 3, 1),), generator=generator)
    pool = torch.cat([pool, torch.tensor(EXTREMES)])
    ids = pool[torch.randint(0, len(pool), (size,), generator=generator)]
    bounds = [0, size // 4, size // 4, size]
    found = distinct_per_table(ids, bounds)
    expected = reference(ids.tolist(), bounds)
    assert found.ids.tolist() == expected[0]
    assert found.places.tolist() == expected[1]
    assert found.counts.tolist() == expected[2]
    assert sum(found.sizes) == len(found.ids)


def test_features_keep_their_shape() -> None:
    features = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor([5, 5, 7, 5, 7, 9, 5, 5]),
        lengths=torch.tensor([2, 1, 0, 2, 2, 1]),
    )
    sent, distinct = dedup(features, [2, 1], counted=True)
    assert sent.keys() == ["a", "b", "c"]
    assert sent.stride() == 2
    assert sent.values().tolist() == [5, 7, 9, 5]
    assert sent.lengths().tolist() == [1, 1, 0, 0, 1, 1]
    assert distinct.sizes == [2, 2]
    assert counts_of(sent).tolist() == [3, 2, 1, 2]
    assert torch.equal(sent.values()[distinct.places], features.values())
    assert dedup(features, [2, 1], counted=False)[0].weights_or_none() is None


def test_counts_are_exact_through_torchrecs_operators() -> None:
    counts = torch.tensor([1, 2**24 + 1, 2**53 + 1, 2**62 + 3])
    features = KeyedJaggedTensor(
        keys=["a"],
        values=torch.tensor([-1, 8, 3, -(2**63)]),
        lengths=torch.tensor([4]),
        weights=counts.view(torch.float64),
    )
    sent, back = bucketize_kjt_before_all2all(
        features,
        num_buckets=3,
        block_sizes=torch.zeros(1, dtype=torch.int64),
        output_permute=True,
        keep_original_indices=True,
    )
    assert torch.equal(counts_of(sent)[back.long()], counts)
    assert torch.equal(sent.values()[back.long()], features.values())


def test_the_hash_can_be_undone() -> None:
    ids = torch.cat([torch.tensor(EXTREMES), torch.arange(-1000, 1000) * 2654435761])
    assert torch.equal(unmix(mix(ids)), ids)
