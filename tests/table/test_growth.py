"""Growth from `init_capacity` to `max_capacity`: when, how far, and that nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from reference import STRATEGIES
from tables import Clock, contents, make_table, reference_for, tensor


@pytest.mark.parametrize(
    ("max_capacity", "init_capacity", "start"),
    [
        (1024, None, 1024),
        (1024, 1024, 1024),
        (1024, 1, 16),
        (1024, 16, 16),
        (1024, 17, 32),
        (1024, 500, 512),
        (1024, 513, 1024),
        (80, 1, 16),  # 5 buckets at most: 5, 3, 2, 1
        (80, 33, 48),
        (80, 49, 80),
        (100, 40, 64),  # 7 buckets at most: 7, 4, 2, 1
    ],
)
def test_initial_capacity(max_capacity: int, init_capacity: int | None, start: int) -> None:
    table = make_table(max_capacity=max_capacity, init_capacity=init_capacity)
    assert table.capacity == start


def test_capacity_doubles_up_to_the_maximum() -> None:
    table = make_table(max_capacity=1000, init_capacity=16, max_load_factor=0.5)
    capacities = []
    for id_ in range(1000):
        table.find_or_insert(tensor([id_]))
        if table.capacity not in capacities:
            capacities.append(table.capacity)
    assert capacities == [16, 32, 64, 128, 256, 512, 1008]


@pytest.mark.parametrize(("load", "fits"), [(0.25, 8), (0.5, 16), (0.75, 24), (1.0, 32)])
def test_growth_happens_just_before_the_load_factor_is_passed(load: float, fits: int) -> None:
    table = make_table(
        max_capacity=4096, init_capacity=32, bucket_capacity=32, max_load_factor=load
    )
    table.insert(torch.arange(fits - 1), torch.zeros(fits - 1, 4))
    table.find_or_insert(tensor([*range(fits - 1), 10**6]))  # ids that are there do not count
    assert (len(table), table.capacity) == (fits, 32)
    table.find_or_insert(tensor([10**7]))
    assert (len(table), table.capacity) == (fits + 1, 64)
    assert table.load_factor == (fits + 1) / 64


def test_one_batch_may_double_several_times() -> None:
    table = make_table(max_capacity=1 << 20, init_capacity=16)
    table.find_or_insert(torch.arange(5000))
    assert table.capacity == 16384
    assert len(table) == 5000
    assert table.stats().failures == 0


def test_insert_grows_as_training_does() -> None:
    table = make_table(max_capacity=4096, init_capacity=16)
    rows = torch.arange(2000.0).reshape(500, 4)
    assert table.insert(torch.arange(500), rows).written.all()
    assert table.capacity == 1024
    assert torch.equal(table.find(torch.arange(500)).embeddings, rows)


@pytest.mark.parametrize("load", [0.0, -1.0])
def test_a_load_factor_of_zero_or_less_turns_growth_off(load: float) -> None:
    table = make_table(max_capacity=1024, init_capacity=32, max_load_factor=load)
    table.find_or_insert(torch.arange(500))
    assert table.capacity == 32
    assert len(table) == 32


def test_lookups_assignments_and_erasures_do_not_grow() -> None:
    table = make_table(max_capacity=1024, init_capacity=16)
    ids = torch.arange(100, 500)
    table.find(ids)
    table.contains(ids)
    table.assign(ids, torch.zeros(400, 4))
    table.erase(ids)
    assert (table.capacity, len(table)) == (16, 0)


def test_no_eviction_grows_too_and_stops_at_the_maximum() -> None:
    table = make_table("NO_EVICTION", max_capacity=64, init_capacity=16)
    table.find_or_insert(torch.arange(40))
    assert table.capacity == 64
    table.find_or_insert(torch.arange(40, 400))
    assert table.capacity == 64
    stats = table.stats()
    assert stats.size + stats.failures == 400
    assert stats.evictions == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, OptimizerKind.ADAM, OptimizerKind.ROWWISE_ADAGRAD])
def test_rows_states_and_scores_are_kept(dtype: torch.dtype, kind: OptimizerKind | None) -> None:
    optimizer = None if kind is None else Optimizer(kind, OptimizerArgs())
    table = make_table(
        dim=5,
        max_capacity=1 << 16,
        init_capacity=128,
        embedding_dtype=dtype,
        optimizer=optimizer,
    )
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(1)) - 30
    rows = torch.randn(60, 5).to(dtype)
    state = torch.randn(60, table.state_dim)
    scores = torch.arange(1000, 1060)
    table.insert(ids, rows, state=state if table.state_dim else None, scores=scores)
    assert table.capacity == 128
    table.find_or_insert(torch.arange(10_000, 20_000))
    assert table.capacity == 32768
    found = table.find(ids)
    assert found.found.all()
    assert torch.equal(found.embeddings, rows)
    assert torch.equal(found.state, state)
    assert torch.equal(found.scores, scores)
    assert len(table) == 10_060


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_capacity", [4096, 4000, 16 * 77])
def test_a_grown_table_has_the_slots_of_the_reference(strategy: str, max_capacity: int) -> None:
    clock = Clock(step=1)
    table = make_table(strategy, max_capacity=max_capacity, init_capacity=16, clock=clock)
    reference = reference_for(table, strategy, Clock(step=1))
    if strategy == "CUSTOMIZED":
        table.set_score(3)
        reference.custom_score = 3
    generator = torch.Generator().manual_seed(2)
    for size in (10, 30, 200, 1, 700, 700, 2000):
        ids = torch.randint(-5000, 5000, (size,), generator=generator)
        slots, _ = reference.find_or_insert(ids.tolist())
        assert table.find_or_insert(ids).slots.tolist() == slots
        assert table.capacity == reference.capacity
    assert contents(table).ids.tolist() == [e.id for e in reference.export()]


def test_the_order_of_growth_does_not_change_what_is_found() -> None:
    """Growing step by step or at once: the same rows, though perhaps in other slots."""
    slow = make_table(max_capacity=8192, init_capacity=128, bucket_capacity=128)
    fast = make_table(max_capacity=8192, bucket_capacity=128)
    for start in range(0, 3000, 100):
        slow.find_or_insert(torch.arange(start, start + 100))
    fast.find_or_insert(torch.arange(3000))
    assert slow.capacity == fast.capacity == 8192
    assert len(slow) == len(fast) == 3000
    a, b = contents(slow), contents(fast)
    assert sorted(a.ids.tolist()) == sorted(b.ids.tolist())


def test_clear_keeps_the_capacity_and_the_table_usable() -> None:
    table = make_table(max_capacity=1024, init_capacity=16)
    table.find_or_insert(torch.arange(300))
    capacity = table.capacity
    table.clear()
    assert (len(table), table.capacity) == (0, capacity)
    assert list(table.export()) == []
    table.find_or_insert(torch.arange(300))
    fresh = make_table(max_capacity=1024, init_capacity=capacity, clock=Clock(2))
    fresh.find_or_insert(torch.arange(300))
    assert contents(table).ids.tolist() == contents(fresh).ids.tolist()


MEMORY_SCRIPT = """
import sys, torch
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table import create_table

def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096

init_capacity = int(sys.argv[1]) or None
rows = int(sys.argv[2])
torch.zeros(1 << 20).sum()
ids = torch.arange(rows)
before = rss()
table = create_table(DynamicEmbTableOptions(
    dim=64, max_capacity=1 << 28, init_capacity=init_capacity))
made = rss()
for batch in ids.split(4096):
    table.find(batch)
    if init_capacity:
        table.find_or_insert(batch)
used = rss()
print(made - before, used - made, table.stats().bytes, len(table))
"""


def memory_of(init_capacity: int, rows: int) -> list[int]:
    out = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(init_capacity), str(rows)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert out.returncode == 0, out.stderr
    return [int(word) for word in out.stdout.split()]


def test_memory_is_what_is_used_and_not_what_is_allowed() -> None:
    """2^28 rows of 64 would be 64 GiB; with 50,000 rows the table needs tens of MiB."""
    made, used, reported, size = memory_of(init_capacity=1024, rows=50_000)
    assert size == 50_000
    assert made < 8 << 20
    rows_alone = 50_000 * 64 * 4
    assert rows_alone <= reported < 4 * rows_alone  # 2^17 slots keep the load under 0.5
    assert used < 4.5 * rows_alone


def test_a_large_empty_table_costs_nothing() -> None:
    made, used, _, _ = memory_of(init_capacity=0, rows=50_000)
    assert made < 16 << 20
    assert used < 16 << 20  # looking up ids that are not there touches no memory
