"""What the live screen and the plain lines show."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.run import Run
from dynamicemb.cli.training.screen import LiveScreen, PlainScreen, duration, picture, size_of
from dynamicemb.cli.training.stream import ClickStream


@pytest.fixture
def run(tmp_path: Path) -> Run:
    options = TrainOptions(out=str(tmp_path), batch_size=100, window=500, dim=4, log_every=2)
    stream = ClickStream(days=1, examples_per_day=500, new_ids=100, seed=0)
    return Run(options, stream, torch.device("cpu"))


def shown(run: Run) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(picture(run))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_picture_before_and_during_a_run(run: Run) -> None:
    assert "0 examples of 500" in shown(run)
    run.train(on_step=lambda _: None, stop=lambda: run.steps == 4)
    text = shown(run)
    assert "400 examples of 500" in text
    assert "day 0.8" in text
    for word in ("examples/s", "loss", "AUC", "NE", "dynamic", "hashed", "ceiling"):
        assert word in text
    for word in ("rows", "load", "hit rate", "inserts", "evictions", "rejections", "memory"):
        assert word in text
    assert "80 %" in text
    assert "predicted before trained on, last 400 examples" in text  # on one line
    assert "checkpoint of step 4; Ctrl-C ends with a checkpoint" in text


def test_the_live_screen_draws_on_a_terminal_and_leaves_it_clean(run: Run) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=110, height=40)
    with LiveScreen(console) as screen:
        run.train(on_step=screen.update)
        screen._drawn = 0.0
        screen.update(run)
    text = terminal.getvalue()
    assert "500 examples of 500" in text
    assert "\x1b[?25l" in text  # the cursor was hidden
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h")) or "\x1b[?25h" in text


def test_plain_lines_come_once_per_point(run: Run) -> None:
    console = Console(file=io.StringIO(), width=80)
    with PlainScreen(console) as screen:
        run.train(on_step=screen.update)
        screen.update(run)
    output = console.file
    assert isinstance(output, io.StringIO)
    lines = output.getvalue().splitlines()
    assert [line.split("step ")[1].split(",")[0] for line in lines if "step " in line] == [
        *("2", "4", "5"),
    ]
    assert sum("hit rate" in line for line in lines) == 6


def test_times_and_sizes_in_words() -> None:
    assert [duration(one) for one in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
    assert [size_of(one) for one in (0, 1023, 1024, 10 * 2**20, 3 * 2**40)] == [
        *("0 B", "1023 B", "1.0 KiB", "10.0 MiB", "3.0 TiB"),
    ]
