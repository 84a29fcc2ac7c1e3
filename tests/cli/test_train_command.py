"""``dynamicemb train`` from end to end, killed, interrupted and taken up again."""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from training_runs import points

from dynamicemb.cli.app import main

SMALL = (
    *("--days", "3", "--examples-per-day", "5000", "--batch-size", "500", "--new-ids", "1000"),
    *("--capacity", "1024", "--window", "3000", "--log-every", "5", "--dim", "8", "--plain"),
)


def train(out: Path, *arguments: str) -> int:
    return main(["train", *SMALL, "--out", str(out), *arguments])


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


def start_in_a_terminal(*arguments: str) -> tuple[int, int]:
    """(process, terminal) of a command that has a terminal of 120 columns to itself."""
    process, terminal = pty.fork()
    if process == 0:  # in the command's process, until it is replaced
        size = ("COLUMNS", "LINES")  # the terminal's own counts
        environment = {name: text for name, text in os.environ.items() if name not in size}
        environment["TERM"] = "xterm-256color"
        os.execve(sys.executable, [sys.executable, "-m", "dynamicemb.cli", *arguments], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    return process, terminal


def read_until(terminal: int, *texts: bytes) -> bytes:
    """What a terminal shows until all of ``texts`` were there, or to its end."""
    shown = b""
    while not texts or not all(text in shown for text in texts):
        assert select.select([terminal], [], [], 300)[0], shown.decode()
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the end, on Linux
            break
        if not part:
            break
        shown += part
    return shown


def test_ctrl_c_in_a_terminal_ends_with_a_checkpoint_and_leaves_the_screen_clean(
    tmp_path: Path,
) -> None:
    options = [one for one in SMALL if one != "--plain"]
    process, terminal = start_in_a_terminal(
        "train", *options, "--out", str(tmp_path), "--days", "300", "--delta-steps", "5"
    )
    try:
        wanted = (b"ceiling", b"evictions", b"examples/s", b"delta ")
        shown = read_until(terminal, *wanted)
        assert all(text in shown for text in wanted), shown.decode()
        os.write(terminal, b"\x03")
        rest = read_until(terminal)
    finally:
        os.close(terminal)
        _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 130, (shown + rest).decode()
    assert b"Ctrl-C ends with a checkpoint" in shown
    assert b"stopped with a checkpoint; the same command goes on" in rest
    assert b"\x1b[?25h" in rest  # the cursor is back
    assert (tmp_path / "report.html").exists()
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step-")) < 3000
    assert (tmp_path / "deltas" / "chain-000001" / "base").is_dir()


def test_the_printed_configuration_gives_the_same_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train(tmp_path / "elsewhere", "--print-config") == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    out = tmp_path / "run"
    assert main(["train", "--config", str(tmp_path / "run.yaml"), "--out", str(out)]) == 0
    assert points(out) == points(whole)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.stress
def test_the_default_run_beats_hashing_in_minutes_also_killed_half_way(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamicemb.cli", "train", "--plain", "--device", "cpu"]
    subprocess.run([*command, "--out", str(tmp_path / "a")], check=True, timeout=3600)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime < 200  # two minutes, with room for a slower machine
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "b")], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            until(process, "(50 %)")
        finally:
            process.kill()
    assert list((tmp_path / "b" / "checkpoints").iterdir())
    subprocess.run([*command, "--out", str(tmp_path / "b")], check=True, timeout=3600)
    a, b = points(tmp_path / "a"), points(tmp_path / "b")
    assert len(a) == len(b) == 63
    for name in ("dynamic", "hashed"):
        whole, killed = (one[-1]["metrics"][name]["auc"] for one in (a, b))
        assert killed == pytest.approx(whole, abs=0.002)
    half = len(a) // 2
    won = [one["metrics"]["dynamic"]["auc"] - one["metrics"]["hashed"]["auc"] for one in a[half:]]
    assert sum(won) / len(won) > 0.01
    for out in ("a", "b"):
        assert "<h2>Why</h2>" in (tmp_path / out / "report.html").read_text()


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
