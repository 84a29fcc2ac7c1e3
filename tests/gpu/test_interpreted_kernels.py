"""The kernels under Triton's interpreter give the engine's bits, for every option at least once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
SCRIPT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = sys.argv[1:3]
import interpreter
from dynamicemb.table.cpu import CpuTable
from lives import SHAPES, live
for name in sys.argv[4:]:
    try:
        live(SHAPES[name], (CpuTable, interpreter.new_table), int(sys.argv[3]))
    except Exception as error:
        raise AssertionError(f"{name}: {error}") from error
"""


def run(steps: int, names: list[str]) -> None:
    """In a process of its own: the interpreter is chosen when kernels are imported."""
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(HERE), str(HERE.parent), str(steps), *names],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert out.returncode == 0, out.stderr[-3000:]


def names() -> list[str]:
    sys.path.insert(0, str(HERE))
    try:
        from lives import SHAPES
    finally:
        sys.path.remove(str(HERE))
    return list(SHAPES)


@pytest.mark.parametrize("part", range(2))
def test_the_interpreter_gives_the_bits_of_the_engine(part: int) -> None:
    run(3, names()[part::2])
