"""Readers beside a process that replaces their checkpoint without end; tests/stress has more."""

from __future__ import annotations

from pathlib import Path

import pytest
from generations import CHAIN_READERS, READERS
from openings import open_beside_a_writer


@pytest.mark.parametrize(
    ("kind", "openings", "names"),
    [
        ("dump", 150, [name for name in READERS if name != "diff"]),
        ("dump with an index", 60, ["ServingTable", "ServingTable(verify)", "serve"]),
        ("chain", 30, list(CHAIN_READERS)),
    ],
)
def test_every_opening_has_one_state(
    memory_path: Path, kind: str, openings: int, names: list[str]
) -> None:
    seen = open_beside_a_writer(memory_path / "x", kind, openings, names)
    assert seen.whole == openings
    assert seen.changes > openings // 10
    assert seen.replaced <= openings // 10
    assert seen.nothing == 0 or kind == "chain"
