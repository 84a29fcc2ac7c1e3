"""Every kernel compiles for three GPUs, without spilling loops to memory, to what was recorded."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamicemb import kernels

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent
RECORDED_WITH = "3.6.0"


def resources(*arguments: str) -> dict[str, dict[str, list[int]]]:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    environment.pop("TRITON_INTERPRET", None)
    out = subprocess.run(
        [sys.executable, str(HERE / "compile_all.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        env=environment,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    table: dict[str, dict[str, list[int]]] = json.loads(out.stdout)
    return table


#: Bytes: a few words are saved around the calls of exact divisions and roots.
STACK = 24


def large_stacks(table: dict[str, dict[str, list[int]]]) -> list[str]:
    return [name for name, used in table.items() if any(s > STACK for _, s, _ in used.values())]


def all_kernels() -> set[str]:
    """The names of the kernels in the package."""
    return {
        node.name
        for file in Path(kernels.__file__).parent.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(one, ast.Name) and one.id == "kernel" for one in node.decorator_list)
    }


def test_kernels_use_the_recorded_registers_and_hardly_any_stack() -> None:
    table = resources()
    assert {name.split("/")[0] for name in table} == all_kernels()
    assert large_stacks(table) == []
    if triton.__version__ == RECORDED_WITH:
        recorded = json.loads((HERE / "resources.json").read_text())
        assert table == recorded, "after a change: python tests/gpu/compile_all.py --write"


@pytest.mark.stress
def test_every_variant_compiles_with_hardly_any_stack() -> None:
    assert large_stacks(resources("--every")) == []
