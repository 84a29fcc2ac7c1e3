"""Ten thousand openings beside a process that replaces the checkpoint without end, with an oracle
for every row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))
from generations import CHAIN_READERS, READERS
from openings import open_beside_a_writer

FAST = ("ServingTable", "ServingTable(verify)", "serve, again", "load", "load(verify_first=False)")
# Diff needs something to compare with. An index is written under the lock of the dumps, which this
# writer holds nearly all the time.
ALL = [name for name in READERS if name not in ("diff", "build_serving_index")]


@pytest.mark.stress
@pytest.mark.parametrize(
    ("kind", "openings", "names"),
    [
        ("dump", 10_000, [*FAST, *FAST, *ALL]),
        ("dump with an index", 2_000, [*FAST[:3], "build_serving_index"]),
        ("folder", 2_000, ["ServingTable", "ServingTable(verify)", "serve"]),
        ("chain", 1_000, list(CHAIN_READERS)),
    ],
)
def test_every_opening_has_one_state(
    memory_path: Path, kind: str, openings: int, names: list[str]
) -> None:
    seen = open_beside_a_writer(memory_path / "x", kind, openings, names)
    sys.stderr.write(f"\n{kind}: {seen}\n")
    assert seen.whole == openings
    assert seen.changes > openings // 10
    assert seen.replaced <= openings // 100
    assert seen.nothing == 0 or kind in ("folder", "chain")
