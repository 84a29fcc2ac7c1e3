"""``--tables dynamic|zch|hashed``: the three kinds on the same examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import points

from dynamicemb.cli.app import main

SMALL = (
    *("--days", "2", "--examples-per-day", "4000", "--batch-size", "500", "--new-ids", "500"),
    *("--capacity", "1024", "--window", "3000", "--log-every", "4", "--dim", "8", "--plain"),
    *("--device", "cpu"),
)


def train(out: Path, *arguments: str) -> int:
    return main(["train", *SMALL, "--out", str(out), *arguments])


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn"])
def test_every_model_trains_on_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    assert train(tmp_path, "--model", model, "--tables", "dynamic", "zch", "hashed") == 0
    last = points(tmp_path)[-1]
    assert list(last["metrics"]) == ["dynamic", "zch", "hashed", "ceiling"]
    for one in last["metrics"].values():
        assert one["auc"] > 0.52
    for name in ("user", "item"):
        zch, hashed = last["tables"][f"zch {name}"], last["tables"][f"hashed {name}"]
        assert zch["inserts"] - zch["evictions"] == zch["rows"] == zch["capacity"] - 1
        assert zch["misses"] == zch["inserts"] + zch["failures"]
        assert zch["hits"] + zch["misses"] > zch["inserts"]
        assert 0 < zch["hit_rate"] < last["tables"][name]["hit_rate"] < hashed["hit_rate"] == 1
        assert hashed["rows"] == hashed["capacity"] > last["tables"][name]["capacity"]
        memory = [last["tables"][f"{kind}{name}"]["bytes"] for kind in ("", "zch ", "hashed ")]
        assert max(memory) < min(memory) * 1.02
    said = capsys.readouterr().out
    assert "the dynamic tables are 0." in said
    report = (tmp_path / "report.html").read_text()
    assert "table zch item" in report
    assert "zch 0." in report


@pytest.mark.parametrize("kind", ["zch", "hashed"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    options = ("--tables", kind, "--optimizer", "rowwise_adagrad", "--no-report")
    assert train(tmp_path / "whole", *options) == 0
    assert train(tmp_path / "stopped", *options, "--max-examples", "3500") == 0
    assert train(tmp_path / "stopped", *options) == 0
    assert points(tmp_path / "stopped")[-1] == points(tmp_path / "whole")[-1]
    names = list(points(tmp_path / "whole")[-1]["metrics"])
    assert names == list(dict.fromkeys([kind, "hashed", "ceiling"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zch", "--admission", "frequency:2"), "--admission is for dynamic tables"),
        (("hashed", "--ttl", "5steps"), "--ttl is for dynamic tables"),
        (("zch", "--store", "redis://:s3cret@localhost"), "--store is for dynamic tables"),
        (("hashed", "--delta-steps", "5"), "--delta-steps is for dynamic tables"),
        (("zch", "--score", "no_eviction"), "always makes room"),
        (("zch", "--optimizer", "adam", "--nproc", "2"), "allowed: sgd, adagrad"),
        (("zch", "zch"), "has a kind twice"),
        (("static",), "allowed: dynamic, zch, hashed"),
    ],
)
def test_what_a_kind_cannot_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert train(tmp_path, "--tables", *arguments) == 2
    text = capsys.readouterr().err
    assert said in text
    assert "s3cret" not in text
    assert list(tmp_path.iterdir()) == []
