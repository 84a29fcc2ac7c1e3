"""``dynamicemb train --device cuda``: what the CPU gives. Skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import every_item, points

from dynamicemb.cli.app import main
from dynamicemb.serving import ServingTable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL = (
    *("--days", "2", "--examples-per-day", "20000", "--batch-size", "1000", "--new-ids", "1000"),
    *("--capacity", "4096", "--window", "20000", "--log-every", "10", "--dim", "8", "--plain"),
    *("--tables", "dynamic", "zch", "hashed", "--delta-steps", "20"),
)


def train(out: Path, *arguments: str) -> list[dict[str, Any]]:
    assert main(["train", *SMALL, "--out", str(out), *arguments]) == 0
    return points(out)


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn"])
def test_every_model_and_kind_of_table_has_the_auc_of_the_cpu(tmp_path: Path, model: str) -> None:
    cpu = train(tmp_path / "cpu", "--model", model, "--device", "cpu")[-1]
    gpu = train(tmp_path / "gpu", "--model", model, "--device", "cuda")[-1]
    for kind in ("dynamic", "zch", "hashed"):
        expected = cpu["metrics"][kind]["auc"]
        assert gpu["metrics"][kind]["auc"] == pytest.approx(expected, abs=0.02), kind
    for name, table in cpu["tables"].items():
        assert gpu["tables"][name]["rows"] == pytest.approx(table["rows"], rel=0.05), name
    assert (tmp_path / "gpu" / "report.html").exists()


def test_a_run_goes_on_and_its_deltas_are_its_rows(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "--device", "cuda")[-1]
    train(tmp_path / "stopped", "--device", "cuda", "--max-examples", "20000")
    gone_on = train(tmp_path / "stopped", "--device", "cuda")[-1]
    for kind in ("dynamic", "zch", "hashed"):
        expected = whole["metrics"][kind]["auc"]
        assert gone_on["metrics"][kind]["auc"] == pytest.approx(expected, abs=0.005), kind
    chain = tmp_path / "stopped" / "deltas" / "chain-000002"
    newest = max((tmp_path / "stopped" / "checkpoints").iterdir()) / "tables"
    ids = every_item(days=2, examples_per_day=20000, new_ids=1000)
    with ServingTable(chain, "item") as served, ServingTable(newest, "item") as saved:
        served.apply_delta(chain)
        for a, b in zip(served.find(ids), saved.find(ids), strict=True):
            assert torch.equal(a, b)
