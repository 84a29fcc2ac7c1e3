"""The map from ids to slots: exact until full, then eviction by policy."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference_map import ReferenceMap

from dynamicemb.errors import DynamicEmbError, InvalidArgumentError
from dynamicemb.table.slot_map import IdSlots, Mapped, SlotMap, SlotMapState, SlotPolicy
from tables import EXTREME_IDS


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pairs(given: IdSlots) -> list[tuple[int, int]]:
    return list(zip(given.ids.tolist(), given.slots.tolist(), strict=True))


def as_lists(mapped: Mapped) -> tuple[Any, ...]:
    return mapped.slots.tolist(), pairs(mapped.inserted), pairs(mapped.evicted), mapped.refused


def make(policy: SlotPolicy, capacity: int = 4, **options: Any) -> SlotMap:
    if policy is SlotPolicy.TTL:
        options.setdefault("ttl", 3)
    return SlotMap(capacity, policy, **options)


@pytest.mark.parametrize("policy", list(SlotPolicy))
def test_the_first_ids_have_slots_of_their_own_in_order(policy: SlotPolicy) -> None:
    table = make(policy, 1000)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1)) - 500
    mapped = table.map(torch.cat([order, order]))
    assert mapped.slots.tolist() == [*range(1000), *range(1000)]
    assert pairs(mapped.inserted) == list(zip(order.tolist(), range(1000), strict=True))
    assert len(mapped.evicted) == mapped.refused == 0
    assert len(table) == 1000


def test_every_id_is_legal() -> None:
    table = SlotMap(len(EXTREME_IDS))
    assert table.map(ids(*EXTREME_IDS)).slots.tolist() == list(range(len(EXTREME_IDS)))
    assert table.find(ids(*EXTREME_IDS)).tolist() == list(range(len(EXTREME_IDS)))


def test_known_answers_of_torchrec_dynamic_embedding() -> None:
    table = SlotMap(16, SlotPolicy.LFU_LRU)
    assert table.map(ids(100, 101, 100, 102, 101)).slots.tolist() == [0, 1, 0, 2, 1]
    table = SlotMap(4, SlotPolicy.LFU_LRU)
    full = table.map(ids(100, 101, 102, 103, 104), evict=False)
    assert (full.slots.tolist(), full.refused) == ([0, 1, 2, 3, -1], 1)
    assert pairs(table.erase(ids(100, 102, 7))) == [(100, 0), (102, 2)]
    assert table.map(ids(101, 102, 103, 104)).slots.tolist() == [1, 0, 3, 2]


def test_finding_changes_nothing() -> None:
    table = SlotMap(2)
    table.map(ids(5, 6))
    for _ in range(10):
        assert table.find(ids(5, 7)).tolist() == [0, -1]
    assert pairs(table.map(ids(8)).evicted) == [(5, 0)]


def test_lru_takes_the_oldest_use() -> None:
    table = SlotMap(3, SlotPolicy.LRU)
    table.map(ids(1, 2, 3))
    table.map(ids(1))
    table.map(ids(2))
    mapped = table.map(ids(4, 5))
    assert pairs(mapped.evicted) == [(3, 2), (1, 0)]
    assert pairs(mapped.inserted) == [(4, 0), (5, 2)]


def test_lfu_counts_occurrences_and_given_counts() -> None:
    table = SlotMap(3, SlotPolicy.LFU)
    table.map(ids(1, 1, 1, 2, 2, 3), counts=ids(1, 1, 1, 9, 9, 2))
    assert table.state().counts.tolist() == [3, 18, 2]
    assert pairs(table.map(ids(4)).evicted) == [(3, 2)]
    assert pairs(table.map(ids(5)).evicted) == [(4, 2)]


def test_counts_stop_at_their_largest_value() -> None:
    table = SlotMap(2, SlotPolicy.LFU)
    for _ in range(3):
        table.map(ids(1, 2), counts=ids(2**62, 1))
    assert table.state().counts.tolist() == [2**32 - 1, 3]


@pytest.mark.parametrize("decay_exponent", [0.0, 0.5, 1.0, 2.0])
def test_distance_lfu_ranks_as_torchrec_does(decay_exponent: float) -> None:
    torchrec = pytest.importorskip("torchrec.modules.mc_modules")
    ranked: list[torch.Tensor] = []

    class Policy(torchrec.DistanceLFU_EvictionPolicy):  # type: ignore[misc, name-defined]
        def _compute_selected_eviction_and_replacement_indices(
            self, pivot: int, scores: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            ranked.append(scores[: pivot - 1])  # the last slot is TorchRec's own
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)

    generator = torch.Generator().manual_seed(3)
    table = SlotMap(50, SlotPolicy.DISTANCE_LFU, decay_exponent=decay_exponent)
    for _ in range(30):
        table.map(torch.randint(0, 50, (20,), generator=generator) ** 2 // 50)
    state, nothing = table.state(), torch.empty(0, dtype=torch.int64)
    n = len(state.ids)
    Policy(decay_exponent=decay_exponent).update_metadata_and_generate_eviction_scores(
        table.time,
        n + 1,
        nothing,
        nothing,
        nothing.bool(),
        nothing,
        {
            "counts": torch.cat([state.counts, ids(0)]),
            "last_access_iter": torch.cat([state.last, ids(0)]),
        },
        {"last_access_iter": nothing},
    )
    expected = torch.argsort(ranked[0], stable=True).tolist()
    assert len(set(ranked[0].tolist())) > 5
    assert table.evict(n).slots.tolist() == expected


def test_the_logarithm_of_uses_grows_at_random_and_comes_before_the_time() -> None:
    table = SlotMap(1000, SlotPolicy.LFU_LRU)
    everything = torch.arange(1000)
    table.map(everything)
    assert set(table.state().counts.tolist()) == {5}
    for _ in range(31):
        table.map(everything)
    # 31 draws with probability 1/32, and then 1/64 ...
    mean = float(table.state().counts.double().mean()) - 5
    assert 0.6 < mean < 0.85
    hot = table.state().counts
    assert table.evict(100).slots.tolist() == torch.nonzero(hot == 5)[:100, 0].tolist()


def test_ttl_evicts_what_is_older_and_nothing_else() -> None:
    table = SlotMap(3, SlotPolicy.TTL, ttl=10)
    table.map(ids(1, 2, 3), time=100)
    table.map(ids(1), time=105)
    refused = table.map(ids(4), time=110)
    assert (refused.slots.tolist(), refused.refused, len(refused.evicted)) == ([-1], 1, 0)
    mapped = table.map(ids(4, 3), time=111)  # 3 is used by this batch
    assert as_lists(mapped) == ([1, 2], [(4, 1)], [(2, 1)], 0)
    assert pairs(table.evict(9, expired=True, time=116)) == [(1, 0)]
    assert len(table.evict(9, expired=True)) == 0


def test_expired_ids_leave_in_bounded_work_per_step() -> None:
    table = SlotMap(10_000, SlotPolicy.TTL, ttl=1)
    table.map(torch.arange(10_000), time=1)
    gone = [len(table.map(ids(), time=3).evicted) for _ in range(11)]
    assert gone == [1024] * 9 + [10_000 - 9 * 1024, 0]


@pytest.mark.parametrize("policy", [p for p in SlotPolicy if p is not SlotPolicy.TTL])
def test_a_batch_never_takes_the_slots_it_uses(policy: SlotPolicy) -> None:
    table = SlotMap(3, policy)
    table.map(ids(1, 2, 3))
    mapped = table.map(ids(9, 3, 8, 1, 7, 6))
    assert mapped.slots.tolist() == [1, 2, -1, 0, -1, -1]
    assert mapped.refused == 3
    assert table.map(ids(6)).refused == 0


def test_pinned_slots_stay() -> None:
    table = SlotMap(3)
    first = table.map(ids(1, 2, 1), pin=True)
    table.map(ids(3))
    assert pairs(table.evict(3)) == [(3, 2)]
    assert table.map(ids(4, 5)).slots.tolist() == [2, -1]
    assert len(table.erase(ids(1))) == 0
    table.unpin(first.slots[:2])
    assert pairs(table.evict(3)) == [(2, 1), (4, 2)]  # 1 was pinned twice
    table.unpin(first.slots[2:])
    assert pairs(table.evict(3)) == [(1, 0)]
    table.pin(ids(-1))


def test_the_index_grows_when_a_bucket_is_full() -> None:
    # 200 ids of one bucket of a map whose index has 36 buckets of 64.
    from dynamicemb.hashing import mix

    candidates = torch.arange(40_000)
    buckets = int(1000 / 0.44 / 64) + 1
    same = candidates[(((mix(candidates) >> 32) & 0xFFFFFFFF) * buckets >> 32) == 3][:200]
    assert len(same) == 200
    table = SlotMap(1000)
    other = torch.arange(-500, 0)
    assert table.map(torch.cat([other, same])).slots.tolist() == list(range(700))
    assert table.find(torch.cat([other, same])).tolist() == list(range(700))


def run_both(
    policy: SlotPolicy, capacity: int, universe: int, batch: int, steps: int, seed: int
) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"decay_exponent": 0.75, "min_used_freq_power": 1}
    if policy is SlotPolicy.TTL:
        options["ttl"] = 4
    real, reference = (
        SlotMap(capacity, policy, **options),
        ReferenceMap(capacity, policy, **options),
    )
    in_flight: list[list[int]] = []
    for step in range(steps):
        drift = step * universe // steps
        given = [int(universe * rng.random() ** 3) + drift for _ in range(rng.randint(0, batch))]
        counts = [rng.randint(1, 5) for _ in given] if rng.random() < 0.3 else None
        evict = rng.random() < 0.9
        mapped = real.map(
            torch.tensor(given, dtype=torch.int64),
            counts=None if counts is None else torch.tensor(counts, dtype=torch.int64),
            evict=evict,
        )
        assert as_lists(mapped) == reference.map(given, counts, evict=evict), step
        if rng.random() < 0.3:
            in_flight.append(mapped.slots.tolist())
            real.pin(mapped.slots)
            for slot in in_flight[-1]:
                reference.pins[slot] = reference.pins.get(slot, 0) + 1
        if in_flight and rng.random() < 0.3:
            done = in_flight.pop(0)
            real.unpin(torch.tensor(done, dtype=torch.int64))
            for slot in done:
                reference.pins[slot] -= 1
        if rng.random() < 0.1:
            count = rng.randint(0, capacity // 4)
            assert pairs(real.evict(count)) == reference.evict(count), step
        if rng.random() < 0.05:
            copy = make(policy, capacity, **options)
            copy.restore(real.state())
            real = copy
            for slots in in_flight:
                real.pin(torch.tensor(slots, dtype=torch.int64))
    state = real.state()
    assert list(zip(state.ids.tolist(), state.slots.tolist(), strict=True)) == [
        (use.id, slot) for slot, use in sorted(reference.slots.items())
    ]


@pytest.mark.parametrize("policy", list(SlotPolicy))
def test_it_does_what_the_reference_does(policy: SlotPolicy) -> None:
    for seed in range(20):
        run_both(policy, 13, 40, 20, 60, seed)
    run_both(policy, 5000, 12_000, 1500, 60, 99)  # several rounds of candidates


@pytest.mark.parametrize("policy", [one for one in SlotPolicy if one is not SlotPolicy.TTL])
def test_many_go_after_most_were_used_again(policy: SlotPolicy) -> None:
    options: dict[str, Any] = {"min_used_freq_power": 0}
    real = SlotMap(3000, policy, **options)
    reference = ReferenceMap(3000, policy, **options)
    rng = random.Random(7)
    for step, share in enumerate((2, 9, 30, 1)):
        for _ in range(3):
            given = rng.choices(range(-1500, 1500), k=2500)
            assert as_lists(real.map(torch.tensor(given))) == reference.map(given), step
        count = len(real) // share
        assert pairs(real.evict(count)) == reference.evict(count), step
    assert len(real) == 0


def test_slots_go_to_a_given_tensor_where_refused_ids_change_nothing() -> None:
    table = SlotMap(3, SlotPolicy.LFU_LRU)
    out = torch.full((5,), 70)
    mapped = table.map(ids(5, 6, 5, 7, 8), out=out, evict=False)
    assert mapped.slots is out
    assert (out.tolist(), mapped.refused) == ([0, 1, 0, 2, 70], 1)
    assert table.map(ids(8, 8, 5, 9, 9), out=out, evict=False).refused == 2
    assert out.tolist() == [0, 1, 0, 2, 70]
    for bad in (torch.zeros(4).long(), torch.zeros(10).long()[::2], torch.zeros(5)):
        with pytest.raises(DynamicEmbError, match="out"):
            table.map(ids(5, 6, 5, 7, 8), out=bad)


@pytest.mark.parametrize("policy", list(SlotPolicy))
def test_threads_change_nothing(policy: SlotPolicy) -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(5)
        table = make(policy, 150_000)
        log = []
        for _ in range(8):
            batch = (torch.rand(60_000, generator=generator) ** 3 * 10**6).long()
            log.append(as_lists(table.map(batch)))
        results.append((log, table.state().counts.tolist()))
    torch.set_num_threads(2)
    assert results[0] == results[1] == results[2]


def test_used_since_gives_what_a_saver_must_write() -> None:
    table = SlotMap(4)
    table.map(ids(1, 2), time=5)
    table.map(ids(2, 3), time=6)
    assert pairs(table.used_since(5)) == [(2, 1), (3, 2)]
    assert pairs(table.used_since()) == [(1, 0), (2, 1), (3, 2)]
    assert len(table.used_since(6)) == 0


def test_bad_input_is_refused_and_changes_nothing() -> None:
    table = SlotMap(4)
    table.map(ids(1, 2), time=5)
    before = table.state()
    calls: list[Any] = [
        lambda: SlotMap(0),
        lambda: SlotMap(4, SlotPolicy.TTL),
        lambda: SlotMap(4, ttl=0),
        lambda: SlotMap(4, "lru"),  # type: ignore[arg-type]
        lambda: SlotMap(4, decay_exponent=-1.0),
        lambda: SlotMap(4, min_used_freq_power=32),
        lambda: table.map(torch.tensor([1.5])),
        lambda: table.map(ids(1).reshape(1, 1)),
        lambda: table.map(ids(3), time=4),
        lambda: table.map(ids(3), counts=ids(0)),
        lambda: table.map(ids(3), counts=ids(1, 1)),
        lambda: table.evict(-1),
        lambda: table.evict(1, expired=True),
        lambda: table.pin(ids(4)),
        lambda: table.restore(SlotMapState(ids(1, 1), ids(0, 1), ids(0, 0), ids(1, 1), 5, 0)),
        lambda: table.restore(SlotMapState(ids(1, 2), ids(0, 0), ids(0, 0), ids(1, 1), 5, 0)),
        lambda: table.restore(SlotMapState(ids(1), ids(4), ids(0), ids(1), 5, 0)),
        lambda: table.restore(SlotMapState(ids(1), ids(0), ids(6), ids(1), 5, 0)),
    ]
    for call in calls:
        with pytest.raises(DynamicEmbError):
            call()
    after = table.state()
    assert (after.ids.tolist(), after.slots.tolist(), after.last.tolist(), after.time) == (
        before.ids.tolist(),
        before.slots.tolist(),
        before.last.tolist(),
        before.time,
    )
    with pytest.raises(InvalidArgumentError, match="time"):
        table.map(ids(3), time=4)
