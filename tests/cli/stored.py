"""Small checkpoints for the tests of commands that read and write them, and their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import models
from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbDump,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.cli.app import main
from dynamicemb.cli.contents.find import ReadOptions, open_content
from models import train as train

Capture = pytest.CaptureFixture[str]
#: Embedding, state and scores of every id, bit by bit, by table.
Rows = dict[str, dict[int, tuple[Any, Any, Any]]]


def make_model(
    strategy: str = "STEP", *, counter: bool = False, **changes: Any
) -> BatchedDynamicEmbeddingTables:
    """Two tables of dim 4; with an admission counter if `counter`."""
    if counter:
        changes |= {
            "admit_strategy": FrequencyAdmissionStrategy(threshold=2),
            "admission_counter": KVCounter(1024, 128),
        }
    return models.make_model(strategy, **changes)


def checkpoint(path: Path, strategy: str = "STEP", **changes: Any) -> Path:
    """A trained model's checkpoint in ``path``."""
    model = make_model(strategy, **changes)
    train(model)
    DynamicEmbDump(path, model, optim=True, counter=bool(changes.get("counter")), progress=False)
    return path


def rows_of(path: Path | str, **options: Any) -> Rows:
    """Every row that is in a path, with all its bits."""
    found: Rows = {}
    with open_content(str(path), ReadOptions(**options)) as content:
        for table in content.tables:
            rows = found[table.label] = {}
            for batch in content.batches(table):
                assert batch.embeddings is not None
                for i, id_ in enumerate(batch.ids.tolist()):
                    assert id_ not in rows
                    rows[id_] = (
                        tuple(batch.embeddings[i].double().tolist()),
                        None if batch.state is None else tuple(batch.state[i].tolist()),
                        None if batch.scores is None else batch.scores[i].reshape(-1).tolist(),
                    )
    return found


def json_of(capsys: Capture, *arguments: str | Path, status: int = 0) -> Any:
    """What a command says with ``--json``."""
    assert main([*map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def said(capsys: Capture, *arguments: str | Path, status: int = 0) -> str:
    """What a command says to standard output."""
    assert main([*map(str, arguments)]) == status
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """The one line that a command says when it cannot be done."""
    assert main([*map(str, arguments)]) == 2
    words = capsys.readouterr()
    assert words.out == ""
    assert words.err.startswith("dynamicemb: ")
    assert words.err.count("\n") == 1
    return words.err


def flip(file: Path, offset: int) -> None:
    """Change one bit of a byte."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    file.write_bytes(data)


def file_of(path: Path, role: str, table: str = "user") -> Path:
    """A file of a checkpoint's first rank."""
    found, *_ = path.glob(f"*/{table}_emb_{role}.rank_0.world_size_*")
    return found
