"""``dynamicemb bench``: it runs, and says what it measured on what."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dynamicemb.cli.app import main
from dynamicemb.cli.benching.cases import CASES
from dynamicemb.cli.benching.markdown import markdown

Capture = pytest.CaptureFixture[str]
TINY = ("--rows", "500", "--batch", "8192", "--dim", "8", "--seconds", "0.1")


def test_a_quick_run_prints_a_table_to_paste() -> None:
    command = [sys.executable, "-m", "dynamicemb.cli", "bench", "--quick", "--device", "cpu"]
    done = subprocess.run([*command, *TINY], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(CASES)
    assert len({len(line) for line in table}) == 1  # aligned
    assert [line.split("|")[1].strip() for line in table[2:]] == ["cpu"] * len(CASES)
    assert "One table of 500 rows of 8 float32" in done.stdout
    for word in ("Python 3.", "torch 2.", "dynamicemb 0.", "cores", "20"):
        assert word in done.stdout


def test_json_has_all_times_and_why_one_is_not_there(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu.split_table_batched_embeddings_ops_training", None)
    assert main(["bench", "--quick", "--json", "--device", "cpu", "--threads", "1", *TINY]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["machine"]["threads"] == 1
    assert answer["workload"] == {
        "rows": 500,
        "dim": 8,
        "batch": 8192,
        "bag": 10,
        "ids": "zipf",
        "quick": True,
    }
    assert [one["case"] for one in answer["results"]] == [case.name for case in CASES]
    for one in answer["results"]:
        assert one["times"]["dynamicemb"]["ms"] > 0
        assert "pip install fbgemm-gpu-cpu" in one["missing"]["FBGEMM TBE"]
        if "torch.nn" in one["times"]:
            ratio = one["times"]["dynamicemb"]["ms"] / one["times"]["torch.nn"]["ms"]
            assert one["ratio"]["torch.nn"] == pytest.approx(ratio)
        else:
            assert one["case"] == "train, row-wise Adagrad"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "1"), "--rows is 1"),
        (("--bag", "100", "--batch", "10"), "--bag is 100; allowed: at most --batch, 10"),
        (("--rows", "1e12"), "need about"),
        (("--ids", "normal"), "uniform, zipf"),
        (("--device", "tpu"), "auto, cpu, cuda"),
    ],
)
def test_mistakes_are_told(capsys: Capture, arguments: tuple[str, ...], said: str) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_markdown_table_has_a_dash_for_what_is_not_there() -> None:
    text = markdown([{"a": 1.234, "b": None}, {"a": 123456.0, "b": "x"}])
    assert text.splitlines()[2] == "| 1.23   | - |"
