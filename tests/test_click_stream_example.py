"""The example of a click model on a stream runs, with its options, and repeats itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    """The standard output of Python with ``arguments``; fails with its errors."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def click_stream(*arguments: str) -> str:
    return run("examples/click_stream.py", "--days", "2", "--examples-per-day", "5000", *arguments)


def without_speed(output: str) -> str:
    return re.sub(r"[\d,]+ examples/s", "", output)


def test_click_stream_prints_auc_and_repeats_itself() -> None:
    output = click_stream()
    assert re.search(r"^day +1: dynamic +loss 0\.\d{4}, AUC 0\.\d{4}", output, re.MULTILINE)
    assert re.search(r"^progressive AUC.* dynamic 0\.\d+, hashed 0\.\d+", output, re.MULTILINE)
    assert without_speed(click_stream()) == without_speed(output)


def test_click_stream_takes_its_options() -> None:
    output = click_stream(
        *("--batch-size", "1000", "--new-ids", "3000", "--rows", "2048", "--dim", "4"),
        *("--learning-rate", "0.05", "--admit-after", "2", "--threads", "2", "--seed", "3"),
    )
    assert "3,000 new items" in output
    assert "rows of 2,048" in output
    assert "dim 4" in output
    assert "not admitted" in output
    assert "seed 3, 2 threads" in output
