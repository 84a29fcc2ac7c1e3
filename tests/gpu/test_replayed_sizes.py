"""Which batches are captured as a graph: those of sizes that come again, a few times each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:2]
import torch
import dry_run, eager_graph
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table import cuda, cuda_group

dry_run.pretend()
table = cuda.CudaTable(DynamicEmbTableOptions(dim=8, max_capacity=4096), seed=1, device="cpu")
group = cuda_group.CudaTableGroup([table])
replay, captured, replayed = group._replay, [], []
eager_graph.use_for(replay)
capture = replay._capture

def noted(space, key, n, out):
    captured.append(n)
    done = capture(space, key, n, out)
    space.graph.launches.replay = lambda: replayed.append(n)
    return done

replay._capture = noted
for n in map(int, sys.argv[2:]):
    group.find_or_insert(torch.arange(n), (0, n))
print(len(captured), len(replayed))
"""


def counts(sizes: list[int]) -> list[int]:
    """(captured, replayed) batches."""
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), *map(str, sizes)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return [int(number) for number in out.stdout.split()]


def test_sizes_that_take_turns_keep_their_graphs() -> None:
    assert counts([100] * 20) == [1, 17]
    assert counts([100, 110, 120] * 20) == [3, 3 * 17]


def test_more_sizes_than_graphs_are_not_captured_over_and_over() -> None:
    captured, replayed = counts([100, 110, 120, 130, 140] * 20)
    assert captured == 3 * 5 < replayed
