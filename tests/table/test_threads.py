"""One thread and two give the same bytes: outputs, slots, evictions, content."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from reference import STRATEGIES
from tables import Clock, contents, make_table

BATCH = 30_000  # several chunks of work, so that threads share it
NORMAL = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL)


def skewed(count: int, ids: int, generator: torch.Generator) -> torch.Tensor:
    """Ids with many duplicates and a long tail, spread over 64 bits."""
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    return (torch.pow(float(ids), u).long() - 1) * 0x9E3779B97F4A7C1


def run(threads: int, strategy: str, **options: Any) -> list[torch.Tensor]:
    """Everything that a random run gives back, with this number of threads."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(11)
    table = make_table(
        strategy,
        dim=6,
        seed=5,
        initializer_args=NORMAL,
        optimizer=Optimizer(OptimizerKind.ADAGRAD, OptimizerArgs(initial_accumulator_value=0.1)),
        clock=Clock(step=1),
        **options,
    )
    if strategy == "CUSTOMIZED":
        table.set_score(4)
    seen: list[torch.Tensor] = []

    def keep(rows: Any) -> None:
        seen.extend((rows.ids, rows.embeddings, rows.state, rows.scores))

    for round_ in range(6):
        ids = skewed(BATCH, 40_000, generator)
        out = table.find_or_insert(ids, return_evicted=True)
        seen += [out.embeddings, out.slots]
        keep(out.evicted)
        ids = skewed(BATCH, 60_000, generator)
        found = table.find(ids)
        seen += [found.found, found.embeddings, found.state, found.scores[found.found]]
        seen.append(table.contains(ids))
        if round_ % 2:
            values = torch.randn(BATCH, 6, generator=generator)
            written = table.insert(ids, values, state=-values, return_evicted=True)
            seen.append(written.written)
            keep(written.evicted)
            seen.append(table.assign(ids.flip(0), values))
            seen.append(table.erase(skewed(BATCH, 60_000, generator)))
        keep(contents(table, batch_size=7777))
    stats = table.stats()
    seen.append(torch.tensor([stats.hits, stats.misses, stats.inserts, stats.evictions]))
    seen.append(torch.tensor([stats.failures, stats.size, stats.capacity]))
    return seen


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for position, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"output {position} differs"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_tables_evict_alike(strategy: str) -> None:
    options = {"max_capacity": 8192, "bucket_capacity": 128, "max_load_factor": 0.0}
    one, two = run(1, strategy, **options), run(2, strategy, **options)
    assert_same(one, two)
    evictions, failures = one[-2][3].item(), one[-1][0].item()
    if strategy == "NO_EVICTION":
        assert evictions == 0
        assert failures > 10_000
    else:
        assert evictions > 10_000


@pytest.mark.parametrize("bucket_capacity", [16, 128, 2**63 - 1])
def test_tables_grow_alike(bucket_capacity: int) -> None:
    options = {
        "max_capacity": 1 << 17 if bucket_capacity < 2**63 - 1 else 4096,
        "init_capacity": 1024,
        "bucket_capacity": bucket_capacity,
    }
    assert_same(run(1, "LFU", **options), run(2, "LFU", **options))


@pytest.mark.parametrize("threads", [1, 2])
def test_two_runs_are_equal(threads: int) -> None:
    options = {"max_capacity": 16384, "bucket_capacity": 64}
    assert_same(run(threads, "TIMESTAMP", **options), run(threads, "TIMESTAMP", **options))


@pytest.mark.parametrize("threads", [3, 5])
def test_an_odd_number_of_threads_changes_nothing(threads: int) -> None:
    options = {"max_capacity": 16384, "bucket_capacity": 64}
    assert_same(run(1, "TIMESTAMP_LFU", **options), run(threads, "TIMESTAMP_LFU", **options))


def test_one_batch_or_many_threads_with_admission() -> None:
    from dynamicemb.admission import FrequencyAdmissionStrategy, KVCounter

    def admitting(threads: int) -> list[torch.Tensor]:
        return run(
            threads,
            "LFU",
            max_capacity=16384,
            bucket_capacity=64,
            admit_strategy=FrequencyAdmissionStrategy(3),
            admission_counter=KVCounter(4096),
        )

    assert_same(admitting(1), admitting(2))


def test_calls_from_several_python_threads() -> None:
    """Readers beside a writer see whole rows: what is found is what its id says, never a mix."""
    table = make_table(dim=32, max_capacity=1 << 15, init_capacity=256, bucket_capacity=128)
    stop = threading.Event()
    problems: list[str] = []

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not stop.is_set():
            ids = torch.randint(0, 90_000, (3000,), generator=generator)
            found = table.find(ids)
            expected = ids[found.found].float().unsqueeze(1).expand(-1, 32)
            if not torch.equal(found.embeddings[found.found], expected):
                problems.append("find gave a wrong row")
            for rows in table.export(batch_size=5000):
                if not torch.equal(rows.embeddings, rows.ids.float().unsqueeze(1).expand(-1, 32)):
                    problems.append("export gave a wrong row")

    def write(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            ids = torch.randint(0, 90_000, (3000,), generator=generator)
            out = table.find_or_insert(ids)
            there = out.slots >= 0
            if not out.embeddings[there].eq(ids[there].float().unsqueeze(1)).all():
                problems.append("find_or_insert gave a wrong row")
            table.erase(ids[:500])

    readers = [threading.Thread(target=read, args=(seed,)) for seed in (1, 2)]
    writers = [threading.Thread(target=write, args=(seed,)) for seed in (3, 4)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert problems == []
    stats = table.stats()
    rows = contents(table)
    assert len(rows.ids.unique()) == len(rows.ids) == len(table) == stats.size


@pytest.mark.parametrize("count", [20_000, 400_000])
def test_a_batch_keeps_the_order_of_first_occurrences(count: int) -> None:
    """Whatever pieces it is split in: running numbers follow the first occurrences, counts are of
    the whole batch, and every occurrence reads the row of its id."""
    generator = torch.Generator().manual_seed(count)
    ids = skewed(count, count // 2, generator)
    distinct, place, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    positions = torch.arange(count)
    first = torch.full_like(distinct, count).scatter_reduce_(0, place, positions, "amin")
    rank = torch.empty_like(first)
    rank[first.argsort()] = torch.arange(len(first))
    room = {"max_capacity": 2**20, "init_capacity": 2**20, "bucket_capacity": 128}
    numbered, counted = make_table("NO_EVICTION", **room), make_table("LFU", **room)
    for table, expected in ((numbered, rank), (counted, counts)):
        out = table.find_or_insert(ids.to(table.device))
        found = table.find(distinct.to(table.device))
        assert torch.equal(found.scores.cpu(), expected)
        assert torch.equal(out.embeddings.cpu(), found.embeddings.cpu()[place])
