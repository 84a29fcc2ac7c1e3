"""kill -9 while an embedding is trained and saved; it is opened again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import embedding_victims as victims
import pytest
import torch
from embeddings import STORES


def _assert_at_step(path: Path, store: str, steps: int, reference: Any) -> None:
    """The folder opened again has the rows, and goes on as, an embedding after ``steps`` steps."""
    again = victims.open_embedding(str(path), store)
    victims.train_steps(reference, range(steps))
    for more in (0, 3):
        if more:
            victims.train_steps(reference, range(steps, steps + more))
            victims.train_steps(again, range(steps, steps + more))
        ids = torch.sort(torch.cat([r.ids for r in reference.tables[0].export()])).values
        assert len(again.tables[0]) == len(ids)
        one, other = reference.tables[0].find(ids), again.tables[0].find(ids)
        assert other.found.all()
        assert torch.equal(one.embeddings, other.embeddings)
        assert torch.equal(one.state, other.state)
    again.close()


@pytest.mark.parametrize(
    ("method", "steps"),
    [("insert", 8), ("flush", 8), ("snapshot", 8), ("drop_snapshot", 16)],
)
@pytest.mark.parametrize("store", STORES)
def test_killed_at_every_step_of_a_save(
    tmp_path: Path, store: str, method: str, steps: int
) -> None:
    """The old snapshot stays whole until the new one is."""
    if store != "cached_ssd" and method == "flush":
        pytest.skip("the snapshot itself flushes")
    process, reports = victims.start(victims.die_in_save, str(tmp_path / "killed"), store, method)
    assert reports.poll(victims.TIMEOUT_S)
    assert reports.recv() == "saved"
    process.join(victims.TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    reference = victims.open_embedding(str(tmp_path / "reference"), "device_mem")
    _assert_at_step(tmp_path / "killed", store, steps, reference)


@pytest.mark.parametrize("store", STORES)
def test_killed_in_the_middle(tmp_path: Path, store: str) -> None:
    """Killed while it saves, or trains after it: one of the two snapshots, whole."""
    saved = victims.kill_while_it_saves(tmp_path / "killed", store)
    reference = victims.open_embedding(str(tmp_path / "reference"), "device_mem")
    again = victims.open_embedding(str(tmp_path / "killed"), store)
    steps = again.tables[0].iteration
    again.close()
    assert steps in (saved, saved + 4)
    _assert_at_step(tmp_path / "killed", store, steps, reference)
