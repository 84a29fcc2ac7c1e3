"""Whole modules of the engine and of the GPU's kernels through the same random operations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


def lives(*arguments: str) -> tuple[int, int]:
    """(operations, replayed batches) of lives in which nothing differed."""
    out = subprocess.run(
        [sys.executable, str(HERE / "module_lives.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE.parent), str(HERE)))},
    )
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    numbers = re.search(r"(\d+) operations, (\d+) replayed batches", out.stdout)
    assert numbers is not None
    return int(numbers[1]), int(numbers[2])


@pytest.mark.parametrize("seed", ["1", "6", "10"])  # lives in which batches are replayed
def test_modules_on_both_devices_agree_operation_by_operation(seed: str) -> None:
    operations, replayed = lives("--seed", seed, "--seeds", "1")
    assert operations == 50
    assert replayed > 0
