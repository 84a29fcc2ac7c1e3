"""Every variant of the inner loops gives the same bits, whatever processor it was made for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import torch
from dynamicemb import _engine
from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from tables import Clock, contents, make_table
from twin import random_lives

digest = hashlib.sha256()

def add(*tensors):
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

generator = torch.Generator().manual_seed(1)
for mode in ("UNIFORM", "NORMAL", "TRUNCATED_NORMAL", "DEBUG"):
    args = DynamicEmbInitializerArgs(
        mode=DynamicEmbInitializerMode[mode], mean=0.1, std_dev=0.3, lower=-0.5, upper=0.7)
    for dim, dtype in ((1, torch.float32), (7, torch.float16), (19, torch.bfloat16),
                       (64, torch.float32), (33, torch.float16)):
        table = make_table("LFU", dim=dim, embedding_dtype=dtype, initializer_args=args, seed=9,
                           max_capacity=4096, bucket_capacity=112, max_load_factor=0.0)
        for _ in range(3):
            ids = torch.randint(-9000, 9000, (6000,), generator=generator)
            out = table.find_or_insert(ids, return_evicted=True)
            add(out.embeddings, out.slots, out.evicted.ids, out.evicted.embeddings)
            found = table.find(ids)
            add(found.found, found.embeddings)
        rows = contents(table)
        add(rows.ids, rows.embeddings, rows.scores)
for strategy in ("TIMESTAMP", "LFU"):
    for width in (16, 128):
        random_lives(strategy, width, 700, seed=5)
print(_engine.instruction_set(), digest.hexdigest())
"""


def run(instruction_set: str | None) -> tuple[str, str]:
    """The variant that ran (a processor may not have the one asked for) and its digest."""
    environment = {k: v for k, v in os.environ.items() if k != "DYNAMICEMB_ISA"}
    if instruction_set is not None:
        environment["DYNAMICEMB_ISA"] = instruction_set
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
    name, digest = out.stdout.split()
    return name, digest


@pytest.fixture(scope="module")
def usual() -> tuple[str, str]:
    return run(None)


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_variants_agree(instruction_set: str, usual: tuple[str, str]) -> None:
    name, digest = run(instruction_set)
    if name != instruction_set:
        pytest.skip(f"this processor runs {name} instead of {instruction_set}")
    assert digest == usual[1], f"{name} and {usual[0]} differ"


def test_an_unknown_instruction_set_is_refused() -> None:
    out = subprocess.run(
        [sys.executable, "-c", "import dynamicemb.table"],
        env={**os.environ, "DYNAMICEMB_ISA": "avx3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode != 0
    assert "DYNAMICEMB_ISA is 'avx3'; allowed: baseline, avx2, avx512" in out.stderr
