"""A table that is too small keeps the rows with the highest scores and says how many went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbCheckMode, DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint import load
from dynamicemb.checkpoint.fill import Filler
from dynamicemb.table import Rows, Table
from models import content, make_model
from tables import EXTREME_IDS, tensor


def filled(strategy: str, count: int, **changes: Any) -> Any:
    """Rows with random scores over the whole range; the pair is judged by its second word."""
    model = make_model(strategy, names=("t",), **({"max_capacity": 8192} | changes))
    draw = torch.Generator().manual_seed(4)
    ids = torch.cat([tensor(EXTREME_IDS), torch.randint(2, 10**6, (count,), generator=draw)])
    ids = ids.unique()
    words = (2,) if model.tables[0].score_words == 2 else ()
    scores = torch.randint(-(2**63), 2**63 - 1, (len(ids), *words), generator=draw)
    rows = torch.randn(len(ids), 4, generator=draw)
    model.tables[0].insert(ids, rows, scores=scores)
    return model


def best_of_each_bucket(table: Table, source: Table) -> set[int]:
    """The ids that a table of this layout should keep."""
    rows = next(iter(source.export(batch_size=10**6)))
    buckets = table.bucket_of(rows.ids).tolist()
    words = rows.scores if rows.scores.dim() == 1 else rows.scores[:, 1]
    unsigned = [word % 2**64 for word in words.tolist()]
    kept: set[int] = set()
    for bucket in set(buckets):
        inside = [i for i, b in enumerate(buckets) if b == bucket]
        inside.sort(key=lambda i: unsigned[i], reverse=True)
        kept |= {int(rows.ids[i]) for i in inside[: table.bucket_capacity]}
    return kept


def read_in_batches(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    rows = load.CheckpointReader.rows

    def small_batches(self: Any, *args: Any, **more: Any) -> Any:
        return rows(self, *args, **more, batch_bytes=batch * 80)

    monkeypatch.setattr(load.CheckpointReader, "rows", small_batches)


@pytest.mark.parametrize("strategy", ["STEP", "LFU", "CUSTOMIZED", "TIMESTAMP_LFU"])
@pytest.mark.parametrize("batch", [64, 10**6])
def test_the_highest_scores_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, batch: int
) -> None:
    one = filled(strategy, 2000)
    DynamicEmbDump(tmp_path, one, optim=True)
    read_in_batches(monkeypatch, batch)
    two = make_model(strategy, names=("t",), max_capacity=512, init_capacity=128)
    with pytest.warns(UserWarning, match="rows did not fit table 't'"):
        report = DynamicEmbLoad(tmp_path, two, optim=True)
    table = two.tables[0]
    expected = best_of_each_bucket(table, one.tables[0])
    assert set(content(table)) == expected
    assert report.did_not_fit == len(one.tables[0]) - len(expected) > 1000
    everything = content(one.tables[0])
    if strategy != "TIMESTAMP_LFU":  # its timestamps are ages in another process
        assert all(everything[id_] == row for id_, row in content(table).items())


def test_timestamps_too(tmp_path: Path) -> None:
    model = make_model("TIMESTAMP", names=("t",), max_capacity=8192)
    for part in torch.arange(1000).split(50):
        model.tables[0].find_or_insert(part)
    DynamicEmbDump(tmp_path, model)
    two = make_model("TIMESTAMP", names=("t",), max_capacity=128, init_capacity=128)
    with pytest.warns(UserWarning, match="872 rows did not fit"):
        DynamicEmbLoad(tmp_path, two)
    assert min(content(two.tables[0])) >= 850  # the youngest


def test_rows_that_were_there_count_by_their_score(tmp_path: Path) -> None:
    model = make_model("STEP", names=("t",), max_capacity=128)
    model.tables[0].insert(torch.arange(100), torch.zeros(100, 4), scores=torch.full((100,), 50))
    DynamicEmbDump(tmp_path, model)
    for score, kept in ((90, 100), (10, 28)):
        two = make_model("STEP", names=("t",), max_capacity=128, init_capacity=128)
        there = torch.arange(1000, 1100)
        two.tables[0].insert(there, torch.ones(100, 4), scores=torch.full((100,), score))
        with pytest.warns(UserWarning, match="72 rows did not fit"):
            DynamicEmbLoad(tmp_path, two)
        assert int(two.tables[0].contains(there).sum()) == kept


@pytest.mark.parametrize("mode", list(DynamicEmbCheckMode))
@pytest.mark.filterwarnings("ignore:table 't' could not insert")
def test_safe_check_mode_does_not_stop_a_load(tmp_path: Path, mode: Any) -> None:
    one = filled("LFU", 1000)
    DynamicEmbDump(tmp_path, one)
    two = make_model("LFU", names=("t",), max_capacity=128, safe_check_mode=mode)
    with pytest.warns(UserWarning, match="did not fit"):
        DynamicEmbLoad(tmp_path, two)
    assert set(content(two.tables[0])) == best_of_each_bucket(two.tables[0], one.tables[0])


def test_no_eviction_keeps_what_came_first(tmp_path: Path) -> None:
    model = make_model("NO_EVICTION", names=("t",), max_capacity=8192)
    model.tables[0].find_or_insert(torch.arange(1000))
    DynamicEmbDump(tmp_path, model)
    two = make_model("NO_EVICTION", names=("t",), max_capacity=128, init_capacity=128)
    with pytest.warns(UserWarning, match="872 rows did not fit"):
        report = DynamicEmbLoad(tmp_path, two)
    assert report.did_not_fit == 872
    assert len(two.tables[0]) == 128


def test_without_scores_the_loss_is_counted_too(tmp_path: Path) -> None:
    DynamicEmbDump(tmp_path, filled("LFU", 1000))
    two = make_model("STEP", names=("t",), max_capacity=128, init_capacity=128)
    with pytest.warns(UserWarning, match="did not fit"):
        report = DynamicEmbLoad(tmp_path, two, scores=False)
    assert report.did_not_fit == report.tables["model"]["t"].rows - 128


def test_a_full_table_that_fits_loses_nothing(tmp_path: Path) -> None:
    one = filled("LFU", 3500, max_capacity=4096)
    DynamicEmbDump(tmp_path, one)
    two = make_model("LFU", names=("t",), max_capacity=4096, init_capacity=128)
    report = DynamicEmbLoad(tmp_path, two)
    assert report.did_not_fit == 0
    assert set(content(two.tables[0])) == set(content(one.tables[0]))


@pytest.mark.parametrize("scores", [True, False])
def test_an_id_that_gets_its_place_back_did_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: bool
) -> None:
    """Rows of before are evicted by early batches, and come again with later ones."""
    one = filled("LFU", 2000)
    DynamicEmbDump(tmp_path, one)
    read_in_batches(monkeypatch, 64)
    two = make_model("LFU", names=("t",), max_capacity=512, init_capacity=512)
    table = two.tables[0]
    ids = torch.tensor(sorted(content(one.tables[0])))[::4]
    table.insert(ids, torch.ones(len(ids), 4), scores=torch.arange(len(ids)))
    before = set(content(table))
    with pytest.warns(UserWarning, match="rows did not fit table 't'"):
        report = DynamicEmbLoad(tmp_path, two, scores=scores)
    assert report.did_not_fit == len(before | set(content(one.tables[0]))) - len(table)


def test_ids_that_come_twice_in_a_batch() -> None:
    model = make_model("STEP", names=("t",), max_capacity=16, init_capacity=16, bucket_capacity=16)
    table = model.tables[0]
    filler = Filler(table)
    ids = torch.cat([torch.arange(20), torch.arange(20)])
    rows = torch.arange(40.0).reshape(-1, 1).expand(-1, 4).contiguous()
    filler.put(Rows(ids, rows, torch.zeros(40, 8), ids * 10), scored=True)
    assert sorted(content(table)) == list(range(4, 20))
    assert filler.lost() == 4
    assert {row[0][0] for row in content(table).values()} == {float(i + 20) for i in range(4, 20)}
