"""``dynamicemb diff``: what differs is counted and measured, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sources import source_of
from stored import (
    Capture,
    checkpoint,
    file_of,
    flip,
    json_of,
    make_model,
    refused,
    said,
    train,
)

from dynamicemb import DynamicEmbDump
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.writer import write_checkpoint
from dynamicemb.exchange import export_table
from dynamicemb.incremental_dump import dump_delta
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import Rows


def rows(ids: list[int], values: Any = 1.0, *, scores: Any = 1, dim: int = 4) -> Rows:
    n = len(ids)
    return Rows(
        torch.tensor(ids),
        torch.as_tensor(values).float().expand(n, dim).contiguous(),
        torch.empty(n, 0),
        torch.zeros(n, dtype=torch.int64) + torch.as_tensor(scores),
    )


def write(path: Path, content: Rows, **changes: Any) -> Path:
    write_checkpoint(path, [source_of(content, **changes)], Ranks(), progress=False)
    return path


def test_the_same_rows_in_another_order(capsys: Capture, tmp_path: Path) -> None:
    a = write(tmp_path / "a", rows([1, 2, 3], torch.tensor([[1.0], [2.0], [3.0]])))
    b = write(tmp_path / "b", rows([3, 1, 2], torch.tensor([[3.0], [1.0], [2.0]])))
    found = json_of(capsys, "diff", a, b)
    assert found["equal"] is True
    (table,) = found["tables"]
    assert (table["rows_equal"], table["rows_changed"], table["only_a"]) == (3, 0, 0)
    assert said(capsys, "diff", a, b).endswith("\nequal\n")


def test_rows_that_have_no_id_in_common(capsys: Capture, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", rows([1, 2])), write(tmp_path / "b", rows([3, 4, 5]))
    (table,) = json_of(capsys, "diff", a, b, status=1)["tables"]
    assert (table["rows_equal"], table["rows_changed"]) == (0, 0)
    assert (table["only_a"], table["only_b"]) == (2, 3)


def test_what_differs_is_counted_and_measured(capsys: Capture, tmp_path: Path) -> None:
    a = write(tmp_path / "a", rows([1, 2, 3, -4, 5, 6]))
    values = torch.tensor([[1.0], [1.5], [1.0], [0.0], [1.0]])
    b = write(tmp_path / "b", rows([1, 2, 3, -4, 7], values, scores=torch.tensor([1, 1, 9, 1, 1])))
    found = json_of(capsys, "diff", a, b, "--ids", "2", status=1)
    (table,) = found["tables"]
    assert (table["rows_a"], table["rows_b"]) == (6, 5)
    assert (table["only_a"], table["only_b"]) == (2, 1)
    assert (table["rows_equal"], table["rows_changed"], table["scores_changed"]) == (1, 3, 1)
    assert table["embeddings"] == {"max": 1.0, "mean": (0.5 + 1.0) / 4}
    assert table["state"] is None
    assert (table["ids_only_a"], table["ids_only_b"]) == ([5, 6], [7])
    assert table["ids_changed"] == [
        {"id": -4, "difference": 1.0},
        {"id": 2, "difference": 0.5},
    ]
    text = said(capsys, "diff", a, b, "--ids", "1", status=1)
    assert "model/t only in A: 5\n" in text
    assert "model/t changed most: -4 (1)\n" in text
    assert text.endswith("\ndifferent\n")


def test_tolerance_and_what_is_left_out(capsys: Capture, tmp_path: Path) -> None:
    a = write(tmp_path / "a", rows([1, 2]))
    b = write(tmp_path / "b", rows([1, 2], torch.tensor([[1.0], [1.25]]), scores=3))
    for arguments, status in (
        ([], 1),
        (["--tolerance", "0.25"], 1),
        (["--no-scores"], 1),
        (["--tolerance", "0.25", "--no-scores"], 0),
        (["--tolerance", "0.24", "--no-scores"], 1),
    ):
        assert json_of(capsys, "diff", a, b, *arguments, status=status)["equal"] is (status == 0)


def test_numbers_that_are_none(capsys: Capture, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([[nan], [inf], [nan], [inf], [0.0]])
    other = torch.tensor([[nan], [inf], [1.0], [-inf], [-0.0]])
    a = write(tmp_path / "a", rows([1, 2, 3, 4, 5], values))
    b = write(tmp_path / "b", rows([1, 2, 3, 4, 5], other))
    (table,) = json_of(capsys, "diff", a, b, status=1)["tables"]
    assert (table["rows_equal"], table["rows_changed"]) == (3, 2)
    assert table["embeddings"]["max"] == inf


def test_tables_that_are_not_alike(capsys: Capture, tmp_path: Path) -> None:
    a = write(tmp_path / "a", rows([1, 2]))
    wide = write(tmp_path / "wide", rows([2, 3], dim=8))
    (table,) = json_of(capsys, "diff", a, wide, status=1)["tables"]
    assert table["differs"] == ["dim: 4 in A, 8 in B"]
    assert (table["only_a"], table["only_b"], table["embeddings"]) == (1, 1, None)
    adam = Optimizer(OptimizerKind.ADAM, OptimizerArgs())
    other = write(tmp_path / "other", rows([1, 2]), optimizer=adam, scores=False)
    text = said(capsys, "diff", a, other, status=1)
    assert "model/t: optimizer: SGD in A, ADAM in B" in text
    assert "model/t: scores: STEP in A, not there in B" in text
    assert said(capsys, "diff", a, other, "--no-state", "--no-scores").endswith("equal\n")


def test_tables_that_only_one_has(capsys: Capture, tmp_path: Path) -> None:
    checkpoint(tmp_path / "two")
    write(tmp_path / "one", rows([1]), name="user")
    found = json_of(capsys, "diff", tmp_path / "two", tmp_path / "one", status=1)
    assert found["tables_only_a"] == ["model/item"]
    assert [one["table"] for one in found["tables"]] == ["model/user"]
    assert "model/item is only in B" in said(
        capsys, "diff", tmp_path / "one", tmp_path / "two", status=1
    )


def test_many_passes_find_what_one_does(capsys: Capture, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(-(2**62), 2**62, (20_000,), generator=draw).unique()
    values = torch.randn(len(ids), 64, generator=draw)
    content = Rows(ids, values, torch.empty(len(ids), 0), torch.ones(len(ids)).long())
    a = write(tmp_path / "a", content)
    order = torch.randperm(len(ids), generator=draw)[:-100]
    changed = values[order]
    changed[::7] += 0.5
    other = Rows(ids[order], changed, torch.empty(len(order), 0), torch.ones(len(order)).long())
    b = write(tmp_path / "b", other)
    once = json_of(capsys, "diff", a, b, "--ids", "5", status=1)
    often = json_of(capsys, "diff", a, b, "--ids", "5", "--memory-mb", "1", status=1)
    (one,), (many,) = once["tables"], often["tables"]
    assert one["only_a"] == 100
    assert one["rows_changed"] == len(range(0, len(order), 7))
    for name in ("embeddings", "ids_changed"):  # sums, and ties, in another order
        one.pop(name)
        many.pop(name)
    assert one == many


def test_state_scores_and_counters(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("TIMESTAMP_LFU", counter=True)
    train(model)
    DynamicEmbDump(tmp_path / "a", model, optim=True, counter=True)
    DynamicEmbDump(tmp_path / "again", model, optim=True, counter=True)
    assert json_of(capsys, "diff", tmp_path / "a", tmp_path / "again")["equal"] is True
    table = model.tables[0]
    kept = table.find(torch.tensor([-1]))
    state = kept.state + 0.125
    table.insert(torch.tensor([-1]), kept.embeddings, state=state, scores=kept.scores)
    DynamicEmbDump(tmp_path / "state", model, optim=True, counter=True)
    found = json_of(capsys, "diff", tmp_path / "a", tmp_path / "state", "--ids=1", status=1)
    user, item = found["tables"]
    assert (user["rows_changed"], user["ids_changed"][0]["id"]) == (1, -1)
    assert user["state"]["max"] == pytest.approx(0.125, abs=1e-6)
    assert (user["embeddings"]["max"], item["equal"]) == (0.0, True)
    model(torch.tensor([10**9] + [0] * 119), torch.arange(0, 121, 6))  # once: counted, no row
    DynamicEmbDump(tmp_path / "counted", model, optim=True, counter=True)
    found = json_of(capsys, "diff", tmp_path / "state", tmp_path / "counted", status=1)
    assert found["counters_differ"] == ["model/user", "model/item"]


def test_a_chain_and_a_checkpoint_of_the_same_model(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("TIMESTAMP")
    for seed in range(3):
        train(model, 1, seed=seed)
        model.tables[0].erase(torch.tensor([-1, seed]))
        dump_delta(tmp_path / "chain", model)
    DynamicEmbDump(tmp_path / "all", model, optim=True)
    assert json_of(capsys, "diff", tmp_path / "chain", tmp_path / "all")["equal"] is True


def test_a_file_and_a_checkpoint(capsys: Capture, tmp_path: Path) -> None:
    model = make_model("LFU")
    train(model)
    DynamicEmbDump(tmp_path / "c", model, optim=True)
    export_table(model.tables[0], tmp_path / "exported.npz")
    found = json_of(capsys, "diff", tmp_path / "exported.npz", tmp_path / "c", "--table=user")
    assert [one["table"] for one in found["tables"]] == ["model/exported = model/user"]
    assert found["tables"][0]["state"] == {"max": 0.0, "mean": 0.0}


def test_errors(capsys: Capture, tmp_path: Path) -> None:
    a = write(tmp_path / "a", rows([1, 2]))
    assert "does not exist" in refused(capsys, "diff", a, tmp_path / "nowhere")
    assert "are required: B" in refused(capsys, "diff", a)
    twice = write(tmp_path / "twice", rows([1, 2, 1]))
    assert "an id has two rows" in refused(capsys, "diff", a, twice)
    assert "an id has two rows" in refused(capsys, "diff", twice, a)
    flip(file_of(a, "values", "t"), 3)
    assert "is corrupt in" in refused(capsys, "diff", a, twice)
    assert "--tolerance is -1.0" in refused(capsys, "diff", a, a, "--tolerance=-1")
