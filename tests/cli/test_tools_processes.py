"""The commands that read and write checkpoints, as a shell runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from stored import checkpoint, file_of, flip, rows_of


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dynamicemb.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "a")
    b = checkpoint(tmp_path / "b", optimizer="sgd")
    damaged = checkpoint(tmp_path / "damaged")
    flip(file_of(damaged, "opt_values"), 3)
    target = tmp_path / "user.parquet"
    started = [
        start("inspect", a),
        start("verify", damaged, "--json"),
        start("diff", a, b),
        start("convert", a, target, "--table", "user"),
        start("inspect", tmp_path / "nowhere"),
    ]
    said = [(*process.communicate(timeout=600), process.returncode) for process in started]
    inspected, verified, compared, converted, mistaken = said
    assert inspected[1:] == ("", 0)
    assert "model/user" in inspected[0]
    assert verified[1:] == ("", 1)
    assert json.loads(verified[0])["ok"] is False
    assert compared[1:] == ("", 1)
    assert "model/user: optimizer: ADAM in A, SGD in B" in compared[0]
    assert converted[1:] == ("", 0)
    assert converted[0].startswith(f"{target}: parquet, 1 table, ")
    assert rows_of(target)["model/user"] == rows_of(a)["model/user"]
    assert mistaken == ("", f"dynamicemb: {tmp_path / 'nowhere'} does not exist\n", 2)
