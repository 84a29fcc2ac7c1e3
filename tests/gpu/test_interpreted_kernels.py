"""The kernels under Triton's interpreter give the engine's bits, for every option at least once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
#: What a script starts with: the interpreter is chosen when kernels are imported.
PRELUDE = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = sys.argv[1:3]
import interpreter
"""
SCRIPT = """
from dynamicemb.table.cpu import CpuTable
from lives import SHAPES, live
for name in sys.argv[4:]:
    try:
        live(SHAPES[name], (CpuTable, interpreter.new_table), int(sys.argv[3]))
    except Exception as error:
        raise AssertionError(f"{name}: {error}") from error
"""


def run(script: str, steps: int, names: list[str]) -> str:
    """What a script prints, in a process of its own."""
    out = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(HERE), str(HERE.parent), str(steps), *names],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


def names() -> list[str]:
    sys.path.insert(0, str(HERE))
    try:
        from lives import SHAPES
    finally:
        sys.path.remove(str(HERE))
    return list(SHAPES)


FULL_BUCKETS = """
from dynamicemb.table.cpu import CpuTable
from dynamicemb.table import cuda_batch
from full_buckets import live
cuda_batch.PLACES, cuda_batch.COMMITTED = 8, 16  # so that the ids of a bucket meet other programs
cuda_batch.CROWDED = 3  # some batches are placed by sorting
for seed in sys.argv[4:]:
    print(live((CpuTable, interpreter.new_table), int(seed), int(sys.argv[3])))
"""
LOWERED = """
from full_buckets import lowered
for how in sys.argv[4:]:
    print(*lowered(interpreter.new_table, how))
"""
REPLAYED = """
import torch
from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbTableOptions
from dynamicemb import DynamicEmbPoolingMode, DynamicEmbScoreStrategy
import eager_graph
interpreter.use_for_all_tables()

def trained(replayed, strategy, pooling, n):
    options = DynamicEmbTableOptions(
        dim=16, max_capacity=64, bucket_capacity=32,
        score_strategy=DynamicEmbScoreStrategy[strategy],
    )
    tables = BatchedDynamicEmbeddingTables(
        [options] * 2, pooling_mode=DynamicEmbPoolingMode[pooling], learning_rate=0.1, seed=1
    )
    if replayed:
        eager_graph.use_for(tables._group._replay)
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for step in range(int(sys.argv[3])):
        ids = torch.randint(step // 4, n * 3 // 2 + step // 4, (n,), generator=generator)
        bags = torch.tensor([0, n // 4, n // 2, n // 2 + 1, n])
        outputs.append(tables(ids, bags))
        outputs[-1].backward(torch.rand(outputs[-1].shape, generator=generator))
    spaces = tables._group.layout.workspaces._idle
    assert any(one.graph is not None for one in spaces) == replayed
    return [*outputs, *(one for t in tables.tables for one in t.state_dict().values())]

for case in zip(sys.argv[4::3], sys.argv[5::3], map(int, sys.argv[6::3])):
    for a, b in zip(*(trained(how, *case) for how in (False, True)), strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b), case
"""


def test_batches_that_are_replayed_give_the_same_bits() -> None:
    """The kernels of a graph find ids and output by their addresses."""
    cases = [("STEP", "NONE", "40"), ("STEP", "SUM", "40"), ("LFU", "NONE", "40")]
    run(REPLAYED, 8, [word for case in (*cases, ("STEP", "NONE", "8")) for word in case])


def test_full_buckets_let_go_what_the_engine_lets_go() -> None:
    seeds = ["0", "3", "5", "11"]  # of 16, 64, 16, 32 slots; TIMESTAMP twice, STEP, CUSTOMIZED
    out = run(FULL_BUCKETS, 30, seeds)
    assert all(int(served) > 5 for served in out.split())


def test_a_row_whose_score_was_lowered_leaves_before_those_in_the_queue() -> None:
    out = run(LOWERED, 0, ["train", "insert", "assign"])
    assert out.splitlines() == ["0 1 31 2"] * 3


@pytest.mark.parametrize("part", range(2))
def test_the_interpreter_gives_the_bits_of_the_engine(part: int) -> None:
    run(SCRIPT, 3, names()[part::2])
