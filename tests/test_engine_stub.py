"""The committed type stub of the extension is the one its bindings give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dynamicemb


def test_stub_is_up_to_date(tmp_path: Path) -> None:
    fresh = tmp_path / "_engine.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "dynamicemb._engine"]
    subprocess.run([*command, "-o", str(fresh)], check=True)
    committed = Path(dynamicemb.__file__).parent / "_engine.pyi"
    assert committed.read_text() == fresh.read_text(), f"run: {' '.join(command)} -o {committed}"
