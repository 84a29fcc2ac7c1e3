"""incremental_dump, get_score and set_score over a whole model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbTableOptions,
    InvalidArgumentError,
    UsageError,
)
from dynamicemb.incremental_dump import (
    get_score,
    incremental_dump,
    is_valid_score_threshold,
    set_score,
    track_removals,
)
from tables import STRATEGY, Clock

TIMES = ["TIMESTAMP", "STEP", "TIMESTAMP_LFU"]


class Model(nn.Module):
    """Two collections: `left` with tables a and b, `deep.right` with table c."""

    def __init__(self, strategy: str = "STEP", **changes: object) -> None:
        super().__init__()
        fields = {"max_capacity": 1024, "score_strategy": STRATEGY[strategy], **changes}
        options = DynamicEmbTableOptions(dim=4, **fields)
        self.left = BatchedDynamicEmbeddingTables(
            [options, options], table_names=["a", "b"], learning_rate=0.5, seed=1
        )
        self.deep = nn.Module()
        self.deep.right = BatchedDynamicEmbeddingTables([options], table_names=["c"], seed=2)
        self.dense = nn.Linear(4, 1)

    def forward(self, *ids: int) -> torch.Tensor:
        n = len(ids)
        both = self.left(torch.tensor([*ids, *ids]), torch.tensor([0, n, 2 * n]))
        return both[:, :4] + both[:, 4:] + self.deep.right(torch.tensor(ids), torch.tensor([0, n]))

    def step(self, *ids: int) -> None:
        self(*ids).sum().backward()


def ids_of(dumped: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, list[int]]:
    return {
        name: sorted(ids.tolist())
        for tables in dumped.values()
        for name, (ids, _) in tables.items()
    }


@pytest.mark.parametrize("strategy", TIMES)
def test_the_returned_scores_are_the_next_thresholds(strategy: str) -> None:
    model = Model(strategy)
    model.step(1, 2, 3)
    rows, scores = incremental_dump(model, 0)
    assert set(rows) == set(scores) == {"model.left", "model.deep.right"}
    assert ids_of(rows) == {key: [1, 2, 3] for key in "abc"}
    for touched in ([3, 4], [], [1], [4, 5, 6]):
        if touched:
            model.step(*touched)
        rows, scores = incremental_dump(model, scores)
        assert ids_of(rows) == dict.fromkeys("abc", touched)
    ids, values = rows["model.left"]["a"]
    assert ids.dtype == torch.int64
    assert values.shape == (3, 4)
    assert torch.equal(values, model.left.tables[0].find(ids).embeddings)


@pytest.mark.parametrize("strategy", TIMES)
def test_a_dump_between_forward_and_backward_does_not_lose_the_update(strategy: str) -> None:
    model = Model(strategy)
    model.step(1, 2, 3)
    _, scores = incremental_dump(model, 0)
    out = model(2, 9)
    rows, scores = incremental_dump(model, scores)
    assert ids_of(rows)["a"] == [2, 9]
    before = rows["model.left"]["a"][1].clone()
    out.sum().backward()
    rows, scores = incremental_dump(model, scores)
    assert ids_of(rows)["a"] == [2, 9]
    assert not torch.equal(rows["model.left"]["a"][1], before)
    rows, _ = incremental_dump(model, scores)
    if strategy != "STEP":  # the step did not move: its number stands for the earlier moment
        assert ids_of(rows)["a"] == []


@pytest.mark.parametrize("strategy", TIMES)
def test_prefetched_batches_are_not_lost(strategy: str) -> None:
    model = Model(strategy)
    model.step(1, 2, 3)
    ids, offsets = torch.tensor([3, 8]), torch.tensor([0, 2])
    model.deep.right.prefetch(ids, offsets)
    _, scores = incremental_dump(model, 0)
    model.deep.right(ids, offsets).sum().backward()  # looked up before the dump, updated after it
    rows, _ = incremental_dump(model, scores)
    assert ids_of(rows) == {"a": [], "b": [], "c": [3, 8]}


@pytest.mark.parametrize("strategy", TIMES)
def test_get_score_is_a_threshold_for_later(strategy: str) -> None:
    model = Model(strategy)
    model.step(1, 2)
    scores = get_score(model)
    assert set(scores) == {"model.left", "model.deep.right"}
    model.step(2, 3)
    model.step(5)
    rows, following = incremental_dump(model, scores)
    assert ids_of(rows)["c"] == [2, 3, 5]
    assert all(following[p][t] > scores[p][t] for p in scores for t in scores[p])


def test_clocks_that_stand_behind_lose_nothing() -> None:
    model = Model("TIMESTAMP")
    clock = Clock(time=100)
    for table in (*model.left.tables, *model.deep.right.tables):
        table._clock_function = clock
    model.step(1)
    clock.time = 200
    _, scores = incremental_dump(model, 0)
    assert scores["model.left"]["a"] == 200
    clock.time = 150  # the time of the machine was set back
    model.step(2)
    rows, _ = incremental_dump(model, scores)
    assert ids_of(rows) == {key: [2] for key in "abc"}


def test_named_tables_only() -> None:
    model = Model()
    model.step(1)
    model.step(2)
    for name in ("left", "model.left"):
        rows, scores = incremental_dump(model, {name: {"b": 2}})
        assert ids_of(rows) == {"b": [2]}
        assert scores == {"model.left": {"b": 3}}


def test_names_that_do_not_exist_warn_and_are_left_out() -> None:
    model = Model()
    model.step(1)
    with pytest.warns(UserWarning, match="'nowhere'.*left out"):
        rows, scores = incremental_dump(model, {"nowhere": {"a": 0}})
    assert rows == scores == {}
    with pytest.warns(UserWarning, match="'z'; allowed: a, b; left out"):
        rows, _ = incremental_dump(model, {"left": {"z": 0, "a": 0}})
    assert ids_of(rows) == {"a": [1]}


@pytest.mark.parametrize(
    "threshold", [None, "3", 1.5, True, {"left": 3}, {"left": {"a": "3"}}, {3: {"a": 3}}]
)
def test_thresholds_of_the_wrong_type(threshold: object) -> None:
    assert not is_valid_score_threshold(threshold)
    with pytest.raises((ValueError, TypeError), match="score_threshold is .*allowed: an integer"):
        incremental_dump(Model(), threshold)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [-1, 2**64])
def test_thresholds_out_of_range(threshold: int) -> None:
    assert is_valid_score_threshold(threshold)
    with pytest.raises(InvalidArgumentError, match="0 to 18446744073709551615"):
        incremental_dump(Model(), threshold)


def test_a_model_without_dynamic_tables() -> None:
    dense = nn.Linear(2, 2)
    for call in (lambda: incremental_dump(dense, 0), lambda: get_score(dense)):
        with pytest.warns(UserWarning, match="no dynamic embedding table"):
            assert call() is None
    with pytest.warns(UserWarning, match="no dynamic embedding table"):
        set_score(dense, 3)


def test_a_single_module_is_the_model() -> None:
    embedding = DynamicEmbedding(4, seed=3)
    embedding(torch.tensor([5, 6]))
    rows, scores = incremental_dump(embedding, 0)
    assert list(rows) == list(scores) == ["model"]
    assert ids_of(rows) == {"rows": [5, 6]}


def test_set_score_by_number_path_and_name() -> None:
    model = Model("CUSTOMIZED")
    set_score(model, 3)
    assert get_score(model) == {"model.left": {"a": 3, "b": 3}, "model.deep.right": {"c": 3}}
    set_score(model, {"left": {"a": 4}, "model.deep.right": {"c": 5}})
    assert get_score(model) == {"model.left": {"a": 4, "b": 3}, "model.deep.right": {"c": 5}}
    model.step(1)
    rows, scores = incremental_dump(model, 4)
    assert ids_of(rows) == {"a": [1], "b": [], "c": [1]}
    assert scores == get_score(model)


def test_a_larger_threshold_than_customised_scores_dumps_nothing() -> None:
    model = Model("CUSTOMIZED")
    set_score(model, 10)
    scores = get_score(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_score(model, 5)
    model.step(1)
    rows, _ = incremental_dump(model, scores)
    assert ids_of(rows) == {"a": [], "b": [], "c": []}


def test_set_score_is_all_or_nothing() -> None:
    model = Model("CUSTOMIZED")
    set_score(model, 3)
    for bad in ({"left": {"a": 4, "z": 4}}, {"left": {"a": 4}, "nowhere": {"a": 4}}):
        with pytest.raises(InvalidArgumentError):
            set_score(model, bad)
    for bad in (0, -1, 2**64, {"left": {"a": 4, "b": 0}}):
        with pytest.raises(InvalidArgumentError, match="score"):
            set_score(model, bad)
    for bad in (None, 2.0, {"left": 4}):
        with pytest.raises((TypeError, ValueError), match="table_score"):
            set_score(model, bad)
    assert get_score(model)["model.left"] == {"a": 3, "b": 3}
    with pytest.raises(UsageError, match="CUSTOMIZED"):
        set_score(Model("STEP"), 3)


def test_a_score_that_goes_down_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("CUSTOMIZED")
    set_score(model, 3)
    with pytest.warns(UserWarning, match="goes down from 3 to 2"):
        set_score(model, 2)
    monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_score(model, 1)


@pytest.mark.parametrize("strategy", [*TIMES, "LFU", "CUSTOMIZED"])
def test_ids_that_were_removed(strategy: str) -> None:
    model = Model(strategy, max_capacity=128, bucket_capacity=16)
    if strategy == "CUSTOMIZED":
        set_score(model, 1)
    scores = track_removals(model)
    a = model.left.tables[0]
    known: set[int] = set()
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        batch = torch.randint(0, 400, (60,), generator=generator)
        model.step(*batch.tolist())
        a.erase(batch[:3])
        rows, scores, removed = incremental_dump(model, scores, removed=True)
        known |= set(rows["model.left"]["a"][0].tolist())
        known -= set(removed["model.left"]["a"].tolist())
        assert not a.contains(removed["model.left"]["a"]).any()
        stored = {int(id_) for part in a.export() for id_ in part.ids}
        assert known == stored


def test_removals_that_are_not_known() -> None:
    model = Model("STEP")
    with pytest.raises(UsageError, match="'a' since score 0 is not known: call track_removals"):
        incremental_dump(model, 0, removed=True)
    model.step(1)
    first = track_removals(model, limit=4)
    assert first == get_score(model)
    with pytest.raises(UsageError, match="since score 1 is not known"):
        incremental_dump(model, 1, removed=True)
    model.left.tables[0].insert(torch.arange(50), torch.zeros(50, 4))
    for id_ in range(20):
        model.left.tables[0].erase(torch.tensor([id_]))
    with pytest.raises(UsageError, match="raise the limit"):
        incremental_dump(model, first, removed=True)


def test_removals_of_a_table_that_was_empty_are_known_from_0() -> None:
    model = Model("STEP")
    track_removals(model)
    model.step(1, 2)
    model.left.tables[0].erase(torch.tensor([1]))
    _, _, removed = incremental_dump(model, 0, removed=True)
    assert removed["model.left"]["a"].tolist() == [1]
    assert removed["model.deep.right"]["c"].shape == (0,)
