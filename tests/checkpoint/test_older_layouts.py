"""Checkpoints of older layouts, written here byte by byte as those versions did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_models import NUM_EMBEDDINGS

from dynamicemb import (
    CheckpointError,
    CorruptCheckpointError,
    DynamicEmbLoad,
    FrequencyAdmissionStrategy,
    InvalidArgumentError,
    KVCounter,
)
from dynamicemb.routing import Routing
from models import content, make_model
from tables import Clock

ADAM = {"opt_type": "adam", "lr": 0.25, "iters": 7, "beta1": 0.5, "beta2": 0.75, "eps": 1e-6}
ADAM |= {"weight_decay": 0.0}
OLD = "older layout, without checksums"


def write(folder: Path, name: str, values: Any, dtype: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(values).astype(dtype).tofile(folder / name)


def rows_of(ids: list[int], width: int) -> np.ndarray:
    return (np.array(ids) % 1000)[:, None] + np.arange(width) / 8


def per_rank(
    folder: Path, table: str, shards: list[list[int]], *, meta: Any = None, opt: str = "emb_opt"
) -> None:
    """The layout with a file per rank; scores are id + 1."""
    size = len(shards)
    for rank, ids in enumerate(shards):
        end = f".rank_{rank}.world_size_{size}"
        write(folder, f"{table}_emb_keys{end}", ids, "<i8")
        write(folder, f"{table}_emb_values{end}", rows_of(ids, 4), "<f4")
        write(folder, f"{table}_emb_scores{end}", np.array(ids) + 1, "<i8")
        write(folder, f"{table}_{opt}_values{end}", rows_of(ids, 8) + 0.5, "<f4")
        write(folder, f"{table}_counter_keys{end}", np.array(ids) + 10**6, "<i8")
        write(folder, f"{table}_counter_frequencies{end}", [2] * len(ids), "<i8")
    found = {"evict_strategy": "EvictStrategy.KCustomized", "step_score": 42} | (meta or ADAM)
    (folder / f"{table}_opt_args.json").write_text(json.dumps(found))


def model_of(strategy: str = "STEP", **changes: Any) -> Any:
    return make_model(strategy, **({"names": ("t",)} | changes))


def check(model: Any, ids: list[int], *, state: bool) -> None:
    found = content(model.tables[0])
    assert set(found) == set(ids)
    rows, states = rows_of(ids, 4), rows_of(ids, 8) + 0.5
    for i, id_ in enumerate(ids):
        row, kept, score = found[id_]
        assert row == tuple(rows[i])
        assert kept == (tuple(states[i]) if state else (0.0,) * 8)
        assert score == (id_ + 1,)


@pytest.mark.parametrize("opt", ["emb_opt", "opt"])
@pytest.mark.parametrize("optim", [False, True])
def test_a_file_per_rank(tmp_path: Path, opt: str, optim: bool) -> None:
    shards = [[0, 3, 6], [1, 4], [2**40 + 2, 5, 8, -2]]
    per_rank(tmp_path / "model", "t", shards, opt=opt)
    model = model_of()
    with pytest.warns(UserWarning, match=OLD):
        report = DynamicEmbLoad(tmp_path, model, optim=optim)
    check(model, [id_ for shard in shards for id_ in shard], state=optim)
    assert report.tables["model"]["t"].rows == 9
    assert model.tables[0].step == 42
    if optim:
        assert model.tables[0].iteration == 7
        assert model.optimizer.args.learning_rate == 0.25
        assert model.optimizer.args.beta2 == 0.75


def test_ranks_take_the_rows_they_own(tmp_path: Path) -> None:
    shards = [[0, 3, 6], [1, 4], [2, 5, 8]]
    per_rank(tmp_path / "model", "t", shards)
    seen: list[int] = []
    for rank in range(2):
        model = model_of()
        model.routings = {"t": Routing("hash_roundrobin", 2, rank)}
        with pytest.warns(UserWarning, match=OLD):
            DynamicEmbLoad(tmp_path, model)
        seen += content(model.tables[0])
    assert sorted(seen) == sorted(id_ for shard in shards for id_ in shard)


def test_counters_come_along(tmp_path: Path) -> None:
    per_rank(tmp_path / "model", "t", [[0, 2], [1, 3]])
    model = model_of(
        admit_strategy=FrequencyAdmissionStrategy(threshold=3),
        admission_counter=KVCounter(1024, 128),
    )
    with pytest.warns(UserWarning, match=OLD):
        DynamicEmbLoad(tmp_path, model, counter=True)
    ids, counts = model.tables[0].export_counter()
    assert sorted(ids.tolist()) == [10**6, 10**6 + 1, 10**6 + 2, 10**6 + 3]
    assert set(counts.tolist()) == {2}


def test_timestamps_are_ages(tmp_path: Path) -> None:
    meta = ADAM | {"evict_strategy": "EvictStrategy.KLru"}
    per_rank(tmp_path / "model", "t", [[0, 1, 2]], meta=meta)  # ages 1, 2, 3
    model = model_of("TIMESTAMP", clock=Clock(time=1000))
    with pytest.warns(UserWarning, match=OLD):
        DynamicEmbLoad(tmp_path, model)
    scores = model.tables[0].find(torch.arange(3)).scores
    assert scores.tolist() == [999, 998, 997]


def test_ids_of_a_block_are_whole_again(tmp_path: Path) -> None:
    """ "continuous" tables were stored with ids relative to the rank's block."""
    size = 3
    now = Routing.of_table("continuous", NUM_EMBEDDINGS, size, 0)
    assert now.block == 1000
    ids = [0, 999, 1000, 1001, 2999, 3000, 3001, 10**12]
    shards: list[list[int]] = [[], [], []]
    for id_ in ids:
        inside = id_ < NUM_EMBEDDINGS
        rank = id_ // 1000 if inside else id_ % size
        shards[rank].append(id_ % 1000 if inside else id_ // size)
    per_rank(tmp_path / "model", "t", shards, meta=ADAM | {"dist_type": "continuous"})
    found: list[int] = []
    for rank in range(size):
        model = model_of()
        model.routings = {"t": Routing.of_table("continuous", NUM_EMBEDDINGS, size, rank)}
        with pytest.warns(UserWarning, match=OLD):
            DynamicEmbLoad(tmp_path, model)
        found += content(model.tables[0])
    assert sorted(found) == ids
    with pytest.raises(InvalidArgumentError, match="without its block of ids"):
        DynamicEmbLoad(tmp_path, model_of())


@pytest.mark.parametrize("optim", [False, True])
def test_single_files(tmp_path: Path, optim: bool) -> None:
    ids = [5, -3, 2**50]
    folder = tmp_path / "model"
    rows = rows_of(ids, 4)
    if optim:
        rows = np.concatenate([rows, rows_of(ids, 8) + 0.5], axis=1)
        (folder).mkdir()
        (folder / "t_opt_args.json").write_text(json.dumps(ADAM))
    write(folder, "t_keys", ids, "<i8")
    write(folder, "t_values", rows, "<f4")
    write(folder, "t_scores", np.array(ids) + 1, "<i8")
    model = model_of()
    with pytest.warns(UserWarning, match=OLD):
        DynamicEmbLoad(tmp_path, model, optim=optim)
    check(model, ids, state=optim)
    if optim:  # rows with state are read without it too
        other = model_of()
        with pytest.warns(UserWarning, match=OLD):
            DynamicEmbLoad(tmp_path, other)
        check(other, ids, state=False)


def test_single_files_without_scores(tmp_path: Path) -> None:
    write(tmp_path / "model", "t_keys", [1, 2], "<i8")
    write(tmp_path / "model", "t_values", rows_of([1, 2], 4), "<f4")
    model = model_of("TIMESTAMP", clock=Clock(time=77))
    with pytest.warns(UserWarning, match=OLD):
        DynamicEmbLoad(tmp_path, model)
    assert {score for _, _, score in content(model.tables[0]).values()} == {(77,)}


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    shards = [[0, 2], [1, 3]]
    folder = tmp_path / "model"
    per_rank(folder, "t", shards)

    def refused(match: str, kind: type[Exception] = CorruptCheckpointError) -> None:
        model = model_of()
        with pytest.raises(kind, match=match):
            DynamicEmbLoad(tmp_path, model)
        assert len(model.tables[0]) == 0

    keys = folder / "t_emb_keys.rank_1.world_size_2"
    good = keys.read_bytes()
    keys.write_bytes(good[:-1])
    refused("do not belong together")
    keys.write_bytes(good[:8])
    refused("do not belong together")
    keys.unlink()
    refused(r"of ranks \[0\]")
    keys.write_bytes(good)
    (folder / "t_emb_keys.rank_2.world_size_4").write_bytes(good)
    refused("world sizes")
    (folder / "t_emb_keys.rank_2.world_size_4").unlink()
    meta = folder / "t_opt_args.json"
    meta.write_text("{")
    refused("no JSON")
    meta.write_text("[]")
    refused("an object")
    meta.write_text(json.dumps({"opt_type": "magic"}))
    refused("opt_type")
    meta.write_text(json.dumps(ADAM | {"evict_strategy": "EvictStrategy.KLru"}))
    refused("written with EvictStrategy.KLru", InvalidArgumentError)


def test_nothing_of_these_tables(tmp_path: Path) -> None:
    per_rank(tmp_path / "model", "other", [[1]])
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        DynamicEmbLoad(tmp_path, model_of())
