"""``--nproc``: several processes train the model of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb.cli.app import main
from dynamicemb.cli.training.stream import ClickStream

SMALL = (
    *("--days", "2", "--examples-per-day", "4000", "--batch-size", "500", "--new-ids", "500"),
    *("--window", "3000", "--log-every", "4", "--dim", "8", "--plain", "--device", "cpu"),
)


def train(out: Path, *arguments: str) -> int:
    return main(["train", *SMALL, "--out", str(out), *arguments])


def points(out: Path) -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = json.loads((out / "metrics.json").read_text())
    return measured


def test_shares_of_ranks_are_the_batch() -> None:
    stream = ClickStream(days=1, examples_per_day=101, new_ids=50, seed=0)
    (batch,) = stream.batches(0, 200)
    shares = [batch.share(rank, 3) for rank in range(3)]
    assert [one.size for one in shares] == [33, 34, 34]
    assert torch.equal(torch.cat([one.labels for one in shares]), batch.labels)
    assert torch.equal(torch.cat([one.dense for one in shares]), batch.dense)
    whole = batch.ids.split(batch.lengths.tolist())
    for feature in range(3):
        bags = [
            bag
            for one in shares
            for bag in one.ids.split(one.lengths.tolist())[feature * one.size :][: one.size]
        ]
        expected = whole[feature * batch.size :][: batch.size]
        assert all(torch.equal(a, b) for a, b in zip(bags, expected, strict=True))


def test_two_processes_give_the_auc_of_one_and_go_on_after_a_stop(tmp_path: Path) -> None:
    assert train(tmp_path / "one") == 0
    assert train(tmp_path / "two", "--nproc", "2", "--max-examples", "4000") == 0
    assert train(tmp_path / "two", "--nproc", "2") == 0
    one, two = points(tmp_path / "one"), points(tmp_path / "two")
    assert [point["step"] for point in two] == [4, 8, 12, 16]
    for a, b in zip(one, two, strict=True):
        assert a["metrics"]["dynamic"]["auc"] == pytest.approx(
            b["metrics"]["dynamic"]["auc"], abs=0.002
        )
        assert a["metrics"]["hashed"] == b["metrics"]["hashed"]
        for name, table in a["tables"].items():
            assert table["inserts"] == b["tables"][name]["inserts"]
            assert table["rows"] == b["tables"][name]["rows"]
    assert (tmp_path / "two" / "report.html").exists()


def test_mistakes_of_several_processes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--nproc", "2", "--ttl", "5s") == 2
    assert "timestamp" in capsys.readouterr().err.lower()
    assert train(tmp_path, "--nproc", "2", "--store", f"ssd:{tmp_path}") == 2
    assert "--store memory" in capsys.readouterr().err
