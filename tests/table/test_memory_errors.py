"""Memory that cannot be had is a typed error, and the table is as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynamicemb.errors import InvalidArgumentError, OutOfMemoryError
from dynamicemb.options import MAX_BUCKET_CAPACITY
from tables import make_table, tensor

PRELUDE = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from dynamicemb.errors import OutOfMemoryError
from dynamicemb.table import create_table
from tables import Clock, contents, equal_rows, make_options, make_table, tensor

torch.set_num_threads(1)
torch.zeros(1 << 16).sum()

def address_space():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()

def allow(extra):
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard if extra is None else address_space() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
"""

CONSTRUCTION = """
allow(64 << 20)
for _ in range(3):
    try:
        make_table(dim=64, max_capacity=1 << 24)
    except OutOfMemoryError as error:
        assert isinstance(error, MemoryError)
        print(error)
    else:
        raise SystemExit("a table of 4 GiB was made in 64 MiB")
    gone = address_space()
table = make_table(dim=64, max_capacity=1 << 12)  # what fits, fits
table.find_or_insert(torch.arange(100))
assert len(table) == 100
assert address_space() - gone < 16 << 20
"""

GROWTH = """
table = make_table(
    "STEP", dim=64, max_capacity=1 << 24, init_capacity=1 << 12, bucket_capacity=128)
table.find_or_insert(torch.arange(1000))
table.find_or_insert(torch.arange(500))
before, stats, capacity, step = contents(table), table.stats(), table.capacity, table.get_score()
big = torch.arange(200_000)  # wants 2^19 slots: 128 MiB of rows
rows = torch.zeros(200_000, 64)  # before the limit: it is not ours to fail here
allow(96 << 20)
for attempt in (
    lambda: table.find_or_insert(big),
    lambda: table.insert(big, rows),
):
    try:
        attempt()
    except OutOfMemoryError as error:
        print(error)
    else:
        raise SystemExit(f"grew to {table.capacity}")
    assert table.capacity == capacity
    assert table.stats() == stats
    assert table.get_score() == step
    assert equal_rows(contents(table), before)
table.find_or_insert(torch.arange(1000, 1200))  # smaller batches go on
assert len(table) == 1200
allow(None)
table.find_or_insert(big)
assert len(table) == 200_000, len(table)
assert table.stats().failures == 0
assert torch.equal(table.find(before.ids).embeddings, before.embeddings)
"""


@pytest.mark.parametrize("script", [CONSTRUCTION, GROWTH], ids=["construction", "growth"])
def test_in_little_address_space(script: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert "bytes" in out.stdout  # the error says how much was wanted


@pytest.mark.parametrize("dim", [1 << 20, 1 << 40, 2**63 - 1])
def test_more_bytes_than_an_address_can_name(dim: int) -> None:
    with pytest.raises((OutOfMemoryError, InvalidArgumentError)):
        make_table(dim=dim, max_capacity=1 << 31)


@pytest.mark.parametrize("max_capacity", [(1 << 31) + 1, 1 << 50, 2**63 - 1])
@pytest.mark.parametrize("bucket_capacity", [16, 128, MAX_BUCKET_CAPACITY])
@pytest.mark.parametrize("init_capacity", [None, 16])
def test_more_slots_than_a_table_can_have(
    max_capacity: int, bucket_capacity: int, init_capacity: int | None
) -> None:
    with pytest.raises(InvalidArgumentError, match="max_capacity"):
        make_table(
            max_capacity=max_capacity,
            bucket_capacity=bucket_capacity,
            init_capacity=init_capacity,
        )


def test_a_maximum_that_is_never_reached_costs_nothing() -> None:
    table = make_table(max_capacity=1 << 31, init_capacity=1000)
    assert table.capacity == 1024
    assert table.find_or_insert(tensor(range(300))).slots.ge(0).all()
