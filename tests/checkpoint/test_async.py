"""Dumps in the background hold the tables as they were, and say what went wrong."""

from __future__ import annotations

import errno
import io
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FailingSystem
from torch import nn

from dynamicemb import (
    CheckpointError,
    DynamicEmbDump,
    DynamicEmbLoad,
    FrequencyAdmissionStrategy,
    KVCounter,
    dump_async,
)
from dynamicemb.checkpoint.files import System, replaced_system
from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.serving import ServingTable
from models import contents, make_model, train


class Gate(System):
    """Nothing is written before the test opens the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if operation == "write":
            assert self.gate.wait(300)
        return super().run(operation, call, *args, **kwargs)


def test_training_goes_on_at_once(tmp_path: Path) -> None:
    model = make_model()
    train(model)
    before = contents(model)
    gate = Gate()
    with replaced_system(gate):
        handle = dump_async(tmp_path / "c", model, optim=True)
        assert not handle.done()
        train(model, seed=3)
        model.tables[1].clear()
        with pytest.raises(TimeoutError):
            handle.wait(0.01)
        gate.gate.set()
        handle.wait()
    assert handle.done()
    other = make_model()
    DynamicEmbLoad(tmp_path / "c", other, optim=True)
    assert contents(other) == before


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    def counting() -> nn.Module:
        return make_model(
            admit_strategy=FrequencyAdmissionStrategy(threshold=2),
            admission_counter=KVCounter(1024, 128),
        )

    model, other, third = counting(), counting(), counting()
    train(model)
    with torch.device("meta"):  # memory that nothing may be written to
        dump_async(tmp_path / "c", model, optim=True, counter=True).wait()
        DynamicEmbDump(tmp_path / "indexed", model, optim=True, serving_index=True)
        DynamicEmbLoad(tmp_path / "c", other, optim=True, counter=True)
        DynamicEmbLoad(tmp_path / "indexed", third, optim=True)
    assert contents(other) == contents(third) == contents(model)
    name, table = model.table_names[0], model.tables[0]
    rows = next(table.export(batch_size=10))
    for folder in ("c", "indexed"):
        with torch.device("meta"), ServingTable(tmp_path / folder, name) as served:
            found, embeddings = served.find(rows.ids.cpu())
        assert torch.equal(embeddings, rows.embeddings.cpu())
        assert bool(found.all())


def test_several_run_in_order(tmp_path: Path) -> None:
    model = make_model()
    handles = []
    states = []
    for step in range(3):
        train(model, 1, seed=step)
        states.append(contents(model))
        handles.append(dump_async(tmp_path / str(step), model, optim=True))
    handles.append(dump_async(tmp_path / "2", model, optim=True, allow_overwrite=True))
    for handle in handles:
        handle.wait()
    for step in range(3):
        other = make_model()
        DynamicEmbLoad(tmp_path / str(step), other, optim=True)
        assert contents(other) == states[step]


def test_errors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    train(model)
    with (
        caplog.at_level(logging.ERROR),
        replaced_system(FailingSystem(["write"], 3, errno.ENOSPC)),
    ):
        handle = dump_async(tmp_path / "c", model)
        with pytest.raises(CheckpointError, match="No space left"):
            handle.wait()
    assert "a dump in the background failed" in caplog.text
    assert handle.done()
    with pytest.raises(CheckpointError, match="No space left"):
        handle.wait()  # again
    dump_async(tmp_path / "c", model).wait()
    with pytest.raises(CheckpointError, match="not empty"):
        dump_async(tmp_path / "c", model).wait()
    with pytest.warns(UserWarning, match="no dynamic"):
        dump_async(tmp_path / "d", nn.Linear(1, 1)).wait()


def test_rows_are_from_one_instant(tmp_path: Path) -> None:
    """While another thread updates rows, each saved row has the parts of one update."""
    model = make_model(names=("t",), optimizer="exact_adagrad", max_capacity=65536)
    table = model.tables[0]
    ids = torch.arange(20000)

    def write(value: int) -> None:
        rows = torch.full((len(ids), 4), float(value))
        table.insert(ids, rows, state=rows, scores=torch.full((len(ids),), value))

    write(0)
    stop = threading.Event()

    def keep_writing() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            write(value)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for number in range(5):
            DynamicEmbDump(tmp_path / f"sync{number}", model, optim=True)
            dump_async(tmp_path / f"async{number}", model, optim=True).wait()
    finally:
        stop.set()
        writer.join()
    for path in tmp_path.iterdir():
        other = make_model(names=("t",), optimizer="exact_adagrad", max_capacity=65536)
        DynamicEmbLoad(path, other, optim=True)
        found = other.tables[0].find(ids)
        assert bool(found.found.all())
        assert torch.equal(found.embeddings, found.state)
        assert torch.equal(found.embeddings[:, 0].long(), found.scores)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    train(model)
    for stream, shown, drawn in (
        (Terminal(), None, True),
        (io.StringIO(), None, False),
        (io.StringIO(), True, True),
        (Terminal(), False, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        DynamicEmbDump(tmp_path, model, allow_overwrite=True, progress=shown)
        DynamicEmbLoad(tmp_path, make_model(), progress=shown)
        text = stream.getvalue()
        assert ("dump [" in text) is drawn
        assert ("load [" in text) is drawn
        assert ("100 %" in text) is drawn
        assert bool(text) is drawn


def test_a_stream_that_is_closed_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    with ProgressBar("x", 1, stream=stream) as bar:
        bar.add(1)
