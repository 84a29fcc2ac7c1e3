"""Dumping and loading hold a few batches in memory, however large the table is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from victims import outcomes_of_ranks

from dynamicemb import DynamicEmbDump, DynamicEmbLoad
from models import make_model

DIM, ROWS = 64, 400_000
ROW_BYTES = 8 + 8 + 4 * DIM + 8 * DIM  # Adam
LIMIT = 100 * 2**20  # a third of the table


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def peak_of_dump_and_load(_: int, path: str) -> tuple[int, int]:
    """Bytes beyond what was there before; of two loads, the first needs the table's memory too."""

    def start() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        return status("VmRSS")

    def model() -> object:
        return make_model(names=("t",), dim=DIM, max_capacity=2 * ROWS, init_capacity=ROWS)

    one = model()
    for ids in torch.arange(ROWS).split(65536):
        one.tables[0].insert(ids, torch.randn(len(ids), DIM))  # type: ignore[attr-defined]
    before = start()
    DynamicEmbDump(path, one, optim=True)  # type: ignore[arg-type]
    dump = status("VmHWM") - before
    two = model()
    start()
    DynamicEmbLoad(path, two, optim=True)  # type: ignore[arg-type]
    first = status("VmHWM") - status("VmRSS")
    before = start()
    DynamicEmbLoad(path, two, optim=True)  # type: ignore[arg-type]
    assert len(two.tables[0]) == ROWS  # type: ignore[attr-defined]
    return dump, max(first, status("VmHWM") - before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded_by_batches(tmp_path: Path) -> None:
    ((kind, peaks),) = outcomes_of_ranks(1, peak_of_dump_and_load, str(tmp_path), group=False)
    assert kind == "result", peaks
    assert ROWS * ROW_BYTES > 2.9 * LIMIT
    dump, load = peaks
    assert dump < LIMIT, dump
    assert load < LIMIT, load
