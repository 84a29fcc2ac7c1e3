"""A store below tables of the kernels: under the interpreter, and on a GPU if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("stores_below.py")


def run(folder: Path, environment: dict[str, str]) -> None:
    out = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **environment},
        check=False,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout.count("equal") == 3


def test_a_store_below_interpreted_kernels_changes_no_bit(tmp_path: Path) -> None:
    run(tmp_path, {"TRITON_INTERPRET": "1"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_store_below_a_table_on_a_gpu_changes_no_bit(tmp_path: Path) -> None:
    run(tmp_path, {})
