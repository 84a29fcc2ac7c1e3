"""What the documents and examples show runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(document: Path) -> list[str]:
    return _BLOCK.findall(document.read_text())


def run(*arguments: str) -> str:
    """The standard output of Python with ``arguments``; fails with its errors."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, code in enumerate(python_blocks(document), 1)
    ],
)
def test_code_block_runs(code: str) -> None:
    exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})


def test_first_example_is_the_file() -> None:
    first = python_blocks(ROOT / "README.md")[0]
    assert first == (ROOT / "examples" / "first_steps.py").read_text()


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
