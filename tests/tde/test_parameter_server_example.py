"""The example runs, and what it learnt is at the server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_example() -> None:
    done = subprocess.run(
        [sys.executable, "examples/parameter_server.py", "--steps", "200"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"loss (\d\.\d+) in the first tenth, (\d\.\d+) in the last", done.stdout)
    (begin, end), (resumed, _) = ((float(a), float(b)) for a, b in lines)
    assert end < 0.6 * begin
    assert resumed < 0.7 * begin  # a model that starts anew would be at the begin again
