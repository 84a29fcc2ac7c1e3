"""Who is evicted when a bucket is full, and what the caller gets of it."""

from __future__ import annotations

import pytest
import torch

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from tables import (
    Clock,
    contents,
    debug_value,
    ids_of_bucket,
    make_table,
    score_list,
    score_tensor,
    tensor,
)


def test_the_oldest_id_goes_first() -> None:
    table = make_table()
    for id_ in range(16):
        table.find_or_insert(tensor([id_]))
    table.find_or_insert(tensor([0, 2]))  # 1 is now the oldest, then 3
    evicted = [
        table.find_or_insert(tensor([new]), return_evicted=True).evicted.ids.item()
        for new in (100, 101, 102)
    ]
    assert evicted == [1, 3, 4]
    assert contents(table).ids.tolist() == [0, 100, 2, 101, 102, *range(5, 16)]


def test_equal_scores_evict_the_lowest_slot() -> None:
    table = make_table(clock=Clock(7))
    table.find_or_insert(tensor(range(16)))
    out = table.find_or_insert(tensor([50, 51, 52]), return_evicted=True)
    assert out.evicted.ids.tolist() == [0, 1, 2]
    assert out.slots.tolist() == [0, 1, 2]
    # All scores are 7 still, so the next batch starts at slot 0 again.
    assert table.find_or_insert(tensor([60]), return_evicted=True).evicted.ids.tolist() == [50]


def test_an_id_of_the_batch_is_never_a_victim() -> None:
    table = make_table()
    table.find_or_insert(tensor(range(16)))
    # Slots 0..14 are hits of this batch wherever they stand in it: only 15 can go.
    out = table.find_or_insert(tensor([100, *range(15), 101]), return_evicted=True)
    assert out.evicted.ids.tolist() == [15]
    assert out.slots.tolist() == [15, *range(15), -1]
    assert table.stats().failures == 1


def test_the_row_just_inserted_is_not_evicted_by_the_same_batch() -> None:
    table = make_table()
    out = table.find_or_insert(tensor(range(20)))
    assert out.slots.tolist() == [*range(16), -1, -1, -1, -1]
    assert contents(table).ids.tolist() == list(range(16))


def test_evicted_rows_come_in_the_order_of_the_ids_that_evict_them() -> None:
    table = make_table(max_capacity=64, max_load_factor=0.0)
    buckets = [ids_of_bucket(b, 4, 40) for b in range(4)]
    for bucket in buckets:
        for id_ in bucket[:16]:
            table.find_or_insert(tensor([id_]))
    newcomers = [buckets[b][20 + k] for k, b in enumerate([3, 0, 2, 0, 1, 3, 0])]
    out = table.find_or_insert(tensor([*newcomers, newcomers[0]]), return_evicted=True)
    victims = [buckets[b][k] for b, k in [(3, 0), (0, 0), (2, 0), (0, 1), (1, 0), (3, 1), (0, 2)]]
    assert out.evicted.ids.tolist() == victims
    assert out.slots.tolist() == [48, 0, 32, 1, 16, 49, 2, 48]


def test_an_evicted_row_comes_back_whole() -> None:
    optimizer = Optimizer(OptimizerKind.ADAM, OptimizerArgs())
    table = make_table(optimizer=optimizer)
    embeddings = torch.arange(64.0).reshape(16, 4)
    state = torch.arange(128.0).reshape(16, 8) + 0.5
    scores = tensor(range(100, 116))
    table.insert(tensor(range(16)), embeddings, state=state, scores=scores)
    out = table.find_or_insert(tensor([77, 78]), return_evicted=True)
    assert out.evicted.ids.tolist() == [0, 1]
    assert torch.equal(out.evicted.embeddings, embeddings[:2])
    assert torch.equal(out.evicted.state, state[:2])
    assert out.evicted.scores.tolist() == [100, 101]
    found = table.find(tensor([77, 78]))
    assert found.state.tolist() == [[0.0] * 8] * 2  # nothing of the old row is left
    assert found.embeddings.tolist() == [[77.0] * 4, [78.0] * 4]


def test_an_id_that_was_evicted_starts_anew() -> None:
    table = make_table()
    table.insert(tensor(range(16)), torch.full((16, 4), 9.0), scores=tensor(range(16)))
    table.find_or_insert(tensor([500]))
    assert table.find_or_insert(tensor([0])).embeddings.tolist() == [[debug_value(0)] * 4]


def test_nothing_is_handed_back_unasked() -> None:
    table = make_table()
    table.find_or_insert(tensor(range(16)))
    assert table.find_or_insert(tensor([100])).evicted is None
    written = table.insert(tensor([101]), torch.zeros(1, 4))
    assert written.evicted is None
    assert table.stats().evictions == 2


def test_no_eviction_gives_empty_rows() -> None:
    evicted = make_table().find_or_insert(tensor([1]), return_evicted=True).evicted
    assert evicted.ids.shape == (0,)
    assert evicted.embeddings.shape == (0, 4)


def test_lfu_evicts_the_rarest() -> None:
    table = make_table("LFU")
    table.find_or_insert(tensor([i for i in range(16) for _ in range(i + 2)]))
    table.find_or_insert(tensor([0] * 5))  # 7 times in all: now 1 (3 times) is the rarest
    out = table.find_or_insert(tensor([100]), return_evicted=True)
    assert out.evicted.ids.tolist() == [1]
    assert score_list(out.evicted.scores) == [(3,)]
    # A newcomer always enters, and may be the next to go.
    assert table.find_or_insert(tensor([101]), return_evicted=True).evicted.ids.tolist() == [100]


def test_the_pair_evicts_by_count_and_not_by_time() -> None:
    table = make_table("TIMESTAMP_LFU", clock=Clock(10, step=1))
    for id_ in range(16):
        table.find_or_insert(tensor([id_] * (16 - id_)))  # the youngest is the rarest
    out = table.find_or_insert(tensor([100, 101]), return_evicted=True)
    assert out.evicted.ids.tolist() == [15, 14]
    assert score_list(out.evicted.scores) == [(26, 1), (25, 2)]


def test_the_pair_breaks_ties_by_slot_and_not_by_time() -> None:
    clock = Clock(100)
    table = make_table("TIMESTAMP_LFU", clock=clock)
    for id_ in range(16):
        clock.time = 100 - id_
        table.find_or_insert(tensor([id_]))
    assert table.find_or_insert(tensor([100]), return_evicted=True).evicted.ids.tolist() == [0]


@pytest.mark.parametrize("strategy", ["TIMESTAMP", "STEP", "CUSTOMIZED", "LFU"])
def test_scores_compare_as_unsigned(strategy: str) -> None:
    table = make_table(strategy)
    if strategy == "CUSTOMIZED":
        table.set_score(1)
    scores = [2**64 - 1, 2**63, 2**63 - 1, 2**63 + 1, *range(2**32, 2**32 + 12)]
    table.insert(tensor(range(16)), torch.zeros(16, 4), scores=tensor(scores))
    victims = []
    for new in range(100, 115):
        out = table.insert(
            tensor([new]), torch.zeros(1, 4), scores=tensor([2**64 - 1]), return_evicted=True
        )
        victims.append(out.evicted.ids.item())
    # The last one has the score of the newcomers, and the lowest slot among them.
    assert victims == [*range(4, 16), 2, 1, 3]


def test_the_pair_compares_counts_as_unsigned() -> None:
    table = make_table("TIMESTAMP_LFU")
    scores = [(0, 2**64 - 1), (2**64 - 1, 2**63), (5, 2**63 - 1)] + [(9, 2**64 - 1)] * 13
    table.insert(tensor(range(16)), torch.zeros(16, 4), scores=score_tensor(scores, words=2))
    out = table.find_or_insert(tensor([100]), return_evicted=True)
    assert out.evicted.ids.tolist() == [2]
    assert score_list(out.evicted.scores) == [(5, 2**63 - 1)]


@pytest.mark.parametrize("width", [16, 32, 48, 128, 1024])
def test_a_bucket_of_any_width_finds_its_smallest_score(width: int) -> None:
    table = make_table("CUSTOMIZED", max_capacity=width, bucket_capacity=width)
    table.set_score(10**6)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    table.insert(torch.arange(width), torch.zeros(width, 4), scores=order + 5)
    by_score = torch.argsort(order).tolist()
    out = table.find_or_insert(torch.arange(width, 2 * width), return_evicted=True)
    assert out.evicted.ids.tolist() == by_score
    assert out.slots.tolist() == by_score


def test_a_free_slot_comes_before_any_victim() -> None:
    table = make_table()
    table.find_or_insert(tensor(range(16)))
    table.erase(tensor([9, 4]))
    out = table.find_or_insert(tensor([100, 101, 102]), return_evicted=True)
    assert out.slots.tolist() == [4, 9, 0]
    assert out.evicted.ids.tolist() == [0]


def test_lookups_do_not_protect_from_eviction() -> None:
    table = make_table()
    for id_ in range(16):
        table.find_or_insert(tensor([id_]))
    before = contents(table).scores.tolist()
    table.find(tensor([0, 1, 2]))
    table.contains(tensor([0]))
    assert contents(table).scores.tolist() == before
    assert table.find_or_insert(tensor([100]), return_evicted=True).evicted.ids.tolist() == [0]
