"""What a run leaves beside checkpoints: deltas for serving, and events for TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from training_runs import every_item, points

from dynamicemb.cli.app import main
from dynamicemb.cli.training.deltas import Deltas
from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.serving import ServingTable

SMALL = (
    *("--days", "2", "--examples-per-day", "4000", "--batch-size", "500", "--new-ids", "500"),
    *("--capacity", "1024", "--window", "3000", "--log-every", "4", "--dim", "8", "--plain"),
    *("--device", "cpu", "--no-baseline", "--no-report"),
)

STREAM = {"days": 2, "examples_per_day": 4000, "new_ids": 500}


def train(out: Path, *arguments: str) -> int:
    return main(["train", *SMALL, "--out", str(out), *arguments])


@pytest.mark.parametrize("store", ["memory", "ssd"])
def test_a_serving_table_follows_the_deltas_to_the_rows_of_the_run(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = store if store == "memory" else f"ssd:{tmp_path / 'rows'}"
    options = ("--delta-steps", "4", "--store", kind, "--max-examples")
    assert train(tmp_path, *options, "4000") == 0
    chain = tmp_path / "deltas" / "chain-000001"
    assert sorted(one.name for one in chain.iterdir()) == ["base", *_deltas(1)]
    assert f"newest: {chain / 'delta_00000001'}" in capsys.readouterr().out
    with ServingTable(chain, "item") as serving:
        serving.apply_delta(chain)
        newest = max((tmp_path / "checkpoints").iterdir())
        with ServingTable(newest / "tables", "item") as saved:
            found, rows = saved.find(every_item(**STREAM))
        assert 500 < found.sum() < len(found)  # rows were evicted, or did not come yet
        again, served = serving.find(every_item(**STREAM))
        assert torch.equal(found, again)
        assert torch.equal(rows, served)
    # The process that goes on does not know what changed: it begins anew.
    assert train(tmp_path, *options, "8000") == 0
    second = tmp_path / "deltas" / "chain-000002"
    assert sorted(one.name for one in second.iterdir()) == ["base", *_deltas(1)]


def _deltas(count: int) -> list[str]:
    return [f"delta_{n:08d}" for n in range(1, count + 1)]


def test_deltas_by_time_and_none_where_none_are_asked_for(tmp_path: Path) -> None:
    assert train(tmp_path / "none", "--max-examples", "2000") == 0
    assert not (tmp_path / "none" / "deltas").exists()
    assert train(tmp_path / "all", "--delta-minutes", "1e-9", "--max-examples", "2000") == 0
    chain = tmp_path / "all" / "deltas" / "chain-000001"
    assert sorted(one.name for one in chain.iterdir()) == ["base", *_deltas(3)]


def test_a_long_chain_and_one_that_forgot_removed_ids_give_way_to_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dynamicemb import DynamicEmbedding
    from dynamicemb.cli.training import deltas as module

    monkeypatch.setattr(module, "LONGEST", 2)
    model = torch.nn.ModuleDict({"words": DynamicEmbedding(4, optimizer="sgd")})
    deltas = Deltas(tmp_path, 2, Ranks())
    written = []
    for step in range(8):
        model["words"](torch.arange(step, step + 3)).sum().backward()
        written.append(deltas.write(model, counter=False).path)
    parts = [Path(one).relative_to(tmp_path).parts for one in written]
    assert [name for _, name in parts] == (["base", *_deltas(2)] * 3)[:8]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["chain-000002", "chain-000003"]
    model["words"].table.log_removals(1)
    model["words"].table.erase(torch.arange(4))
    assert deltas.write(model, counter=False).path.endswith("chain-000004/base")
    assert "a new chain of deltas begins" in caplog.text


def events(folder: Path) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} as TensorBoard reads it."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder)).Reload()
    return {
        tag: {one.step: one.value for one in reader.Scalars(tag)}
        for tag in reader.Tags()["scalars"]
    }


def test_tensorboard_reads_what_was_measured_also_of_a_run_that_went_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    options = ("--tensorboard", str(board), "--checkpoint-steps", "6", "--keep", "9")
    assert train(tmp_path, *options, "--max-examples", "5000") == 0
    # As if it had been killed after step 8: it goes on from step 6, and writes step 8 again.
    (tmp_path / "checkpoints" / "step-0000000010").rename(tmp_path / "gone")
    assert train(tmp_path, *options) == 0
    found = events(board)
    measured = points(tmp_path)
    assert [one["step"] for one in measured] == [4, 8, 12, 16]
    for tag, value in (
        ("auc/dynamic", lambda point: point["metrics"]["dynamic"]["auc"]),
        ("ne/ceiling", lambda point: point["metrics"]["ceiling"]["ne"]),
        ("table item/rows", lambda point: point["tables"]["item"]["rows"]),
        ("table user/hit_rate", lambda point: point["tables"]["user"]["hit_rate"]),
        ("run/examples", lambda point: point["examples"]),
    ):
        expected = {point["step"]: pytest.approx(value(point), rel=1e-6) for point in measured}
        assert found[tag] == expected, tag
    assert found["run/examples_per_second"][16] > 0


def test_without_tensorboard_the_command_to_install_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it was not there
    monkeypatch.delitem(sys.modules, "dynamicemb.cli.training.board", raising=False)
    assert train(tmp_path / "run", "--tensorboard", str(tmp_path / "board")) == 2
    assert "pip install 'dynamicemb[tensorboard]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
