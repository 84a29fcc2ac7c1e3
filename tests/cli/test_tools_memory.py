"""Tools that read checkpoints hold a few batches in memory, however large the tables are."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import source_of

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.writer import write_checkpoint
from dynamicemb.cli.app import main
from dynamicemb.table import Rows

DIM, ROWS, BATCH = 64, 500_000, 16_384
LIMIT = 90 * 2**20  # the table is larger by a third
MEMORY = ("--memory-mb", "32")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def _batches() -> Iterator[Rows]:
    for ids in torch.arange(ROWS).split(BATCH):
        n = len(ids)
        yield Rows(ids * 7919, torch.ones(n, DIM), torch.empty(n, 0), ids % 100)


def peaks(folder: str, answers: Any) -> None:
    """Bytes that each command needs beyond what was there before."""
    torch.set_num_threads(1)
    source = source_of(next(_batches()), rows=ROWS, batches=_batches)
    write_checkpoint(f"{folder}/a", [source], Ranks(), progress=False)
    found = {}
    for name, arguments in (
        ("inspect", ["inspect", f"{folder}/a"]),
        ("row", ["inspect", f"{folder}/a", "--id", "7919"]),
        ("convert", ["convert", f"{folder}/a", f"{folder}/b", "--to=safetensors"]),
        ("spread", ["convert", f"{folder}/a", f"{folder}/c", "--to=checkpoint", "--world-size=2"]),
        ("verify", ["verify", f"{folder}/a", *MEMORY]),
        ("diff", ["diff", f"{folder}/a", f"{folder}/c", "--memory-mb", "64"]),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = main(arguments)
        found[name] = (status, _status("VmHWM") - before, said.getvalue())
    answers.send(found)


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "dynamicemb"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=peaks, args=(str(tmp_path), there))
    process.start()
    there.close()  # so that the end of the process is noticed
    assert here.poll(600)
    found = here.recv()
    process.join(60)
    assert ROWS * (DIM * 4 + 16) > 1.3 * LIMIT
    for name, (status, peak, said) in found.items():
        assert status == 0, (name, said)
        assert peak < LIMIT, (name, peak)
