"""Every pair of failing operations in a life with writes, flushes, compaction and a snapshot."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiers"))
from two_errors import live


@pytest.mark.stress
def test_every_pair(memory_path: Path) -> None:
    operations = live(memory_path / "s", 2**40, 2**41, long=True)
    pairs = 0
    for first in range(operations):
        for then in range(first + 1, operations + 8):  # a failure makes more of them
            shutil.rmtree(memory_path / "s")
            live(memory_path / "s", first, then, long=True)
            pairs += 1
    assert pairs > 2000
