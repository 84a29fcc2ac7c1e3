"""A checkpoint holds all of a table; a model that loads it goes on like the one that wrote it."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynamicemb import (
    CheckpointError,
    DynamicEmbDump,
    DynamicEmbedding,
    DynamicEmbLoad,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    InvalidArgumentError,
    KVCounter,
)
from dynamicemb.errors import ArgumentTypeError
from models import content, contents, make_model, train
from tables import STRATEGY, Clock


@pytest.mark.parametrize("strategy", list(STRATEGY))
@pytest.mark.parametrize("optimizer", ["adam", "row_wise_adagrad", "sgd"])
def test_everything_comes_back(tmp_path: Path, strategy: str, optimizer: str) -> None:
    clock = Clock(time=10**18)
    one = make_model(strategy, optimizer=optimizer, clock=clock)
    train(one)
    DynamicEmbDump(tmp_path / "c", one, optim=True)
    two = make_model(strategy, optimizer=optimizer, clock=clock, learning_rate=0.5, seed=2)
    report = DynamicEmbLoad(tmp_path / "c", two, optim=True)
    assert contents(two) == contents(one)
    assert [t.progress() for t in two.tables] == [t.progress() for t in one.tables]
    assert two.optimizer == one.optimizer  # the learning rate too
    assert report.did_not_fit == 0
    assert report.tables["model"]["user"].rows == len(one.tables[0])
    train(one, seed=1)
    train(two, seed=1)
    assert contents(two) == contents(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_every_width_are_exact(tmp_path: Path, dtype: torch.dtype, compact: bool) -> None:
    one = make_model(embedding_dtype=dtype)
    train(one)
    DynamicEmbDump(tmp_path, one, compact=compact)
    two = make_model(embedding_dtype=dtype)
    DynamicEmbLoad(tmp_path, two)
    for mine, other in zip(one.tables, two.tables, strict=True):
        ids = next(mine.export()).ids
        assert torch.equal(mine.find(ids).embeddings, other.find(ids).embeddings)
    size = (tmp_path / "model" / "user_emb_values.rank_0.world_size_1").stat().st_size
    width = dtype.itemsize if compact else 4
    assert size == len(one.tables[0]) * 4 * width


def test_files_are_as_existing_tools_read_them(tmp_path: Path) -> None:
    clock = Clock(time=5000)
    model = make_model("TIMESTAMP", names=("t",), clock=clock)
    train(model, 1)
    clock.time = 6000
    DynamicEmbDump(tmp_path, model, optim=True)
    assert glob.glob(str(tmp_path / "*/*_emb_keys.rank_*.world_size_*")) == [
        str(tmp_path / "model" / "t_emb_keys.rank_0.world_size_1")
    ]

    def read(item: str, dtype: str) -> Any:
        return np.fromfile(tmp_path / "model" / f"t_emb_{item}.rank_0.world_size_1", dtype=dtype)

    rows = next(model.tables[0].export())
    assert np.array_equal(read("keys", "<i8"), rows.ids.cpu().numpy())
    assert np.array_equal(read("values", "<f4").reshape(-1, 4), rows.embeddings.cpu().numpy())
    assert np.array_equal(read("opt_values", "<f4").reshape(-1, 8), rows.state.cpu().numpy())
    assert set(read("scores", "<i8").tolist()) == {1000}  # ages
    args = json.loads((tmp_path / "model" / "t_opt_args.json").read_text())
    assert args == {
        "opt_type": "adam",
        "lr": 0.1,
        "iters": 1,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "evict_strategy": "EvictStrategy.KLru",
        "dist_type": "roundrobin",
        "step_score": 2,
    }


def test_timestamps_keep_their_age(tmp_path: Path) -> None:
    clock = Clock(time=1000)
    for strategy in ("TIMESTAMP", "TIMESTAMP_LFU"):
        one = make_model(strategy, names=("t",), clock=clock)
        table = one.tables[0]
        table.find_or_insert(torch.tensor([1]))
        clock.time += 50
        table.find_or_insert(torch.tensor([2]))
        clock.time += 7
        DynamicEmbDump(tmp_path / strategy, one)
        other = Clock(time=10**12)  # another machine
        two = make_model(strategy, names=("t",), clock=other)
        DynamicEmbLoad(tmp_path / strategy, two)
        found = two.tables[0].find(torch.tensor([1, 2])).scores
        words = found if found.dim() == 1 else found[:, 0]
        assert words.tolist() == [10**12 - 57, 10**12 - 7]


def test_without_state_rows_start_afresh(tmp_path: Path) -> None:
    one = make_model()
    train(one)
    DynamicEmbDump(tmp_path / "with", one, optim=True)
    DynamicEmbDump(tmp_path / "without", one)
    for name in ("with", "without"):
        two = make_model()
        train(two, 1)  # rows of the same ids, whose state must not survive
        DynamicEmbLoad(tmp_path / name, two, clear=True)
        for id_, (row, state, score) in content(two.tables[0]).items():
            expected = content(one.tables[0])[id_]
            assert (row, score) == (expected[0], expected[2])
            assert set(state) == {0.0}
        assert two.tables[0].iteration == 1  # its own
    with pytest.warns(UserWarning, match="without optimizer state"):
        report = DynamicEmbLoad(tmp_path / "without", make_model(), optim=True)
    assert not report.tables["model"]["user"].optimizer_state
    with pytest.warns(UserWarning, match="state of ADAM, and the table uses SGD"):
        DynamicEmbLoad(tmp_path / "with", make_model(optimizer="sgd"), optim=True)


def test_without_scores(tmp_path: Path) -> None:
    one = make_model("LFU")
    train(one)
    DynamicEmbDump(tmp_path / "with", one)
    DynamicEmbDump(tmp_path / "without", one, scores=False)
    two = make_model("STEP")
    with pytest.raises(InvalidArgumentError, match="score_strategy of table 'user'.*scores=False"):
        DynamicEmbLoad(tmp_path / "with", two)
    assert len(two.tables[0]) == 0
    DynamicEmbLoad(tmp_path / "with", two, scores=False)
    DynamicEmbLoad(tmp_path / "without", make_model("LFU"))
    assert {score for _, _, score in content(two.tables[0]).values()} == {(1,)}
    assert content(two.tables[0]).keys() == content(one.tables[0]).keys()


def test_rows_that_are_there_stay_unless_cleared(tmp_path: Path) -> None:
    one = make_model()
    train(one)
    DynamicEmbDump(tmp_path, one)
    for clear in (False, True):
        two = make_model()
        two.tables[0].insert(torch.tensor([10**6, -1]), torch.ones(2, 4))
        DynamicEmbLoad(tmp_path, two, clear=clear)
        assert bool(two.tables[0].contains(torch.tensor([10**6]))) is not clear
        assert content(two.tables[0])[-1][0] == content(one.tables[0])[-1][0]


def test_admission_counters(tmp_path: Path) -> None:
    def model(**changes: Any) -> Any:
        return make_model(
            names=("t",),
            admit_strategy=FrequencyAdmissionStrategy(threshold=3),
            admission_counter=KVCounter(1024, 128),
            **changes,
        )

    one = model()
    ids, offsets = torch.tensor([7, 8, 8]), torch.tensor([0, 3])
    one(ids, offsets)
    DynamicEmbDump(tmp_path / "with", one, counter=True)
    DynamicEmbDump(tmp_path / "without", one)
    two, three = model(), model()
    assert DynamicEmbLoad(tmp_path / "with", two, counter=True).tables["model"]["t"].counter
    with pytest.warns(UserWarning, match="counter of table 't' is not loaded: the checkpoint"):
        DynamicEmbLoad(tmp_path / "without", three, counter=True)
    for again in (one, two, three):
        again(ids, offsets)
    assert content(two.tables[0]) == content(one.tables[0])
    assert list(content(one.tables[0])) == [8]
    assert content(three.tables[0]) == {}
    with pytest.warns(UserWarning, match="the table has none"):
        DynamicEmbLoad(tmp_path / "with", make_model(names=("t",)), counter=True)
    with pytest.warns(UserWarning, match="no admission counter"):
        DynamicEmbDump(tmp_path / "none", make_model(names=("t",)), counter=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = make_model()
        self.right = make_model(names=("user",))
        self.word = DynamicEmbedding(3, name="word")


def test_some_of_the_tables(tmp_path: Path) -> None:
    net = Net()
    train(net.left)
    train(net.right, seed=5)
    net.word(torch.tensor([1, 2, 3]))
    DynamicEmbDump(tmp_path / "all", net, optim=True)
    DynamicEmbDump(tmp_path / "some", net, {"left": ["item"], "model.word": ["word"]}, True)
    assert sorted(p.name for p in (tmp_path / "some").iterdir()) == [
        "dynamicemb_manifest.json",
        "model.left",
        "model.word",
    ]
    other = Net()
    report = DynamicEmbLoad(tmp_path / "all", other, {"model.left": ["user"]}, True)
    assert list(report.tables) == ["model.left"]
    assert contents(other.left) == {"user": contents(net.left)["user"], "item": {}}
    assert len(other.right.tables[0]) == 0
    with pytest.warns(UserWarning, match="no tables 'user' of 'model.left', 'user' of 'model.r"):
        report = DynamicEmbLoad(tmp_path / "some", other, optim=True)
    assert report.missing == (("model.left", "user"), ("model.right", "user"))
    assert contents(other.left) == contents(net.left)
    assert content(other.word.tables[0]).keys() == {1, 2, 3}
    with pytest.raises(CheckpointError, match="no tables 'user' of 'model.left'; it has 'item'"):
        DynamicEmbLoad(tmp_path / "some", other, {"left": ["user"]})
    with pytest.raises(InvalidArgumentError, match="nobody"):
        DynamicEmbDump(tmp_path / "x", net, {"left": ["nobody"]})
    assert not (tmp_path / "x").exists()


def test_a_model_without_dynamic_tables(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no dynamic embedding tables"):
        DynamicEmbDump(tmp_path / "x", nn.Linear(2, 2))
    assert not (tmp_path / "x").exists()
    with pytest.warns(UserWarning, match="no dynamic embedding tables"):
        DynamicEmbLoad(tmp_path / "x", nn.Linear(2, 2))


def test_empty_tables(tmp_path: Path) -> None:
    DynamicEmbDump(tmp_path, make_model(), optim=True, counter=False)
    two = make_model()
    DynamicEmbLoad(tmp_path, two, optim=True)
    assert contents(two) == {"user": {}, "item": {}}


def test_another_dim_is_refused(tmp_path: Path) -> None:
    DynamicEmbDump(tmp_path, make_model())
    with pytest.raises(InvalidArgumentError, match="dim of table 'user' is 5; allowed: 4"):
        DynamicEmbLoad(tmp_path, make_model(dim=5))


def test_paths_that_are_refused(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(CheckpointError, match="a folder that exists"):
        DynamicEmbLoad(tmp_path / "nothing", model)
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        DynamicEmbLoad(tmp_path, model)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is no folder"):
        DynamicEmbDump(tmp_path / "file", model)
    with pytest.raises(CheckpointError, match="is not empty"):
        DynamicEmbDump(tmp_path, model)
    for path in (3, None, "", "x\0y", b"bytes"):
        with pytest.raises(ArgumentTypeError, match="path"):
            DynamicEmbDump(path, model)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="optim is 'yes'"):
        DynamicEmbDump(tmp_path / "x", model, None, "yes")  # type: ignore[arg-type]


def test_an_unfused_module_takes_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    def step(module: DynamicEmbedding, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.tensor([1, 2, 1])).sum().backward()
        optimizer.step()

    def module() -> DynamicEmbedding:
        options = DynamicEmbTableOptions(score_strategy=STRATEGY["STEP"])
        return DynamicEmbedding(3, options=options, max_capacity=128, seed=3)

    one, two = module(), module()
    first = torch.optim.Adam(one.parameters(), lr=0.1)
    step(one, first)
    DynamicEmbDump(tmp_path, one, optim=True)
    DynamicEmbLoad(tmp_path, two, optim=True)
    step(one, first)
    step(two, torch.optim.Adam(two.parameters(), lr=0.1))
    assert content(two.tables[0]) == content(one.tables[0])
