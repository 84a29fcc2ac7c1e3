"""``dynamicemb train`` from end to end, killed, interrupted and taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamicemb.cli.app import main

SMALL = (
    *("--days", "3", "--examples-per-day", "5000", "--batch-size", "500", "--new-ids", "1000"),
    *("--capacity", "1024", "--window", "3000", "--log-every", "5", "--dim", "8", "--plain"),
)


def train(out: Path, *arguments: str) -> int:
    return main(["train", *SMALL, "--out", str(out), *arguments])


def points(out: Path) -> list[dict[str, Any]]:
    """All that was measured, without times."""
    measured = json.loads((out / "metrics.json").read_text())
    return [
        {key: value for key, value in point.items() if key not in ("seconds", "speed")}
        for point in measured
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end."""
    out = tmp_path_factory.mktemp("whole")
    assert train(out) == 0
    return out


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own that waits for nothing."""
    return subprocess.Popen(
        [sys.executable, "-m", "dynamicemb.cli", "train", *SMALL, "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def until(process: subprocess.Popen[str], text: str) -> None:
    """Return when a line with ``text`` was written."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError("".join(seen))


def test_a_run_measures_both_models_and_every_table(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = points(whole)
    assert [one["step"] for one in measured] == [5, 10, 15, 20, 25, 30]
    last = measured[-1]
    assert last["examples"] == 15_000
    assert set(last["metrics"]) == {"dynamic", "hashed", "ceiling"}
    assert 0.55 < last["metrics"]["dynamic"]["auc"] < last["metrics"]["ceiling"]["auc"]
    assert last["metrics"]["dynamic"]["ne"] < 1
    for table in last["tables"].values():
        assert table["inserts"] - table["evictions"] == table["rows"]
        assert table["rows"] <= table["capacity"] == 1024
        assert table["evictions"] > 0
        assert 0 < table["hit_rate"] < 1


def test_a_run_repeats_itself_and_a_finished_one_starts_over(whole: Path) -> None:
    expected = points(whole)
    assert train(whole) == 0
    assert points(whole) == expected


def test_a_killed_run_goes_on_and_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "--checkpoint-steps", "4")
    try:
        until(process, "step 15,")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    left = sorted(one.name for one in (tmp_path / "checkpoints").iterdir())
    assert left  # a checkpoint of step 12 or later
    assert train(tmp_path, "--checkpoint-steps", "4") == 0
    assert points(tmp_path) == points(whole)


def test_ctrl_c_ends_with_a_checkpoint_and_the_same_command_goes_on(
    whole: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "--days", "300")
    until(process, "step 5,")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130, out
    assert "stopped with a checkpoint" in out
    assert (tmp_path / "report.html").exists()
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step-")) < 3000


def test_a_damaged_checkpoint_is_left_out_for_the_one_before(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--checkpoint-steps", "5", "--keep", "9", "--max-examples")
    assert train(tmp_path, *options, "7500") == 0
    newest = sorted((tmp_path / "checkpoints").iterdir())
    state = newest[-1] / "run.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    rows = next((newest[-2] / "tables").rglob("*_emb_values*"))
    rows.write_bytes(rows.read_bytes()[:-1])
    assert train(tmp_path, *options, "15000") == 0
    assert "is not what was written" in caplog.text
    assert caplog.text.count("is left out") == 2
    assert points(tmp_path) == points(whole)


def test_other_options_do_not_go_on_with_an_unfinished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dynamicemb.cli.training.options import TrainOptions
    from dynamicemb.cli.training.run import Run
    from dynamicemb.cli.training.stream import ClickStream

    options = TrainOptions(out=str(tmp_path), batch_size=500, window=1000, dim=8)
    stream = ClickStream(days=1, examples_per_day=2000, new_ids=100, seed=0)
    import torch

    run = Run(options, stream, torch.device("cpu"))
    run.train(on_step=lambda _: None, stop=lambda: run.steps == 2)
    assert train(tmp_path, "--optimizer", "sgd") == 2
    said = capsys.readouterr().err
    assert "optimizer adagrad -> sgd" in said
    assert "--fresh" in said
    assert train(tmp_path, "--fresh", "--days", "1", "--no-report") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "deepfm", "--optimizer", "sgd", "--score", "lfu"),
        ("--model", "dcn", "--optimizer", "adam", "--score", "timestamp", "--lr", "0.01"),
        ("--optimizer", "rowwise_adagrad", "--admission", "frequency:2"),
        ("--score", "timestamp_lfu", "--admission", "probability:0.5", "--no-baseline"),
        ("--score", "no_eviction", "--capacity", "20000", "--dense-lr", "0.02"),
    ],
    ids=lambda one: one[1],
)
def test_every_choice_trains(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert train(tmp_path, "--days", "2", *arguments) == 0
    last = points(tmp_path)[-1]
    assert last["metrics"]["dynamic"]["auc"] > 0.5
    assert ("hashed" in last["metrics"]) == ("--no-baseline" not in arguments)
    rejected = sum(table["rejections"] for table in last["tables"].values())
    assert (rejected > 0) == ("--admission" in arguments)


def test_admission_counts_go_on_after_a_restart(tmp_path: Path) -> None:
    options = ("--admission", "frequency:2", "--no-baseline", "--no-report", "--max-examples")
    assert train(tmp_path / "a", *options, "6000") == 0
    assert train(tmp_path / "b", *options, "3000") == 0
    assert train(tmp_path / "b", *options, "6000") == 0
    assert points(tmp_path / "a")[-1] == points(tmp_path / "b")[-1]
