"""Snapshots: taken, loaded, replaced, missing, found again; state_dict; moves between stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from embeddings import DIM, STORES, make, rows_of, store_options, train, uniform_tables

from dynamicemb import one_embedding
from dynamicemb.errors import (
    CorruptStoreError,
    InsertionError,
    InvalidArgumentError,
    StoreError,
    UsageError,
)

IDS = torch.arange(500)


def content(embedding: one_embedding.Embedding) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids in order, rows, state)."""
    table = embedding.tables[0]
    empty = torch.empty(0, dtype=torch.int64)
    ids = torch.sort(torch.cat([empty, *(rows.ids for rows in table.export())])).values
    found = table.find(ids)
    return ids, found.embeddings, found.state


def assert_same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def adam(embedding: one_embedding.Embedding) -> torch.optim.Adam:
    return torch.optim.Adam(embedding.parameters(), lr=0.01)


@pytest.mark.parametrize("store", [*STORES, "host_and_ssd"])
def test_training_goes_on_from_a_snapshot_to_the_same_bits(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store, size_factor=3, tables=uniform_tables(0.1, 0.2))
    train(embedding, adam(embedding), steps=5, seed=1)
    embedding.save_snapshot("first")
    then = content(embedding)
    losses = train(embedding, adam(embedding), steps=5, seed=2)
    later = content(embedding)
    embedding.save_snapshot("second")
    embedding.load_snapshot("first")
    assert_same(content(embedding), then)
    assert train(embedding, adam(embedding), steps=5, seed=2) == losses
    assert_same(content(embedding), later)
    embedding.load_snapshot("second")
    assert_same(content(embedding), later)
    assert embedding.snapshots() == ["first", "second"]


@pytest.mark.parametrize("store", [*STORES, "host_and_ssd"])
def test_an_embedding_that_resumes_has_its_last_snapshot(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store, size_factor=3)
    train(embedding, adam(embedding), steps=3, seed=1)
    embedding.save_snapshot("a")
    train(embedding, adam(embedding), steps=3, seed=2)
    embedding.save_snapshot("b")
    then = content(embedding)
    losses = train(embedding, adam(embedding), steps=3, seed=3)  # of this nothing stays
    embedding.close()
    del embedding

    again = make(tmp_path, store, size_factor=3, resume=True)
    assert_same(content(again), then)
    assert train(again, adam(again), steps=3, seed=3) == losses
    again.close()
    del again

    empty = make(tmp_path, store, size_factor=3, resume=False)
    assert len(empty.tables[0]) == 0
    assert empty.snapshots() == ["a", "b"]
    empty.load_snapshot("b")
    assert_same(content(empty), then)


@pytest.mark.parametrize("store", STORES)
def test_a_missing_snapshot_is_an_error_and_changes_nothing(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store)
    embedding(IDS)
    embedding.save_snapshot("there")
    embedding(IDS + 1000)
    before = content(embedding)
    with pytest.raises(StoreError, match="no snapshot 'gone' in .*there is: there"):
        embedding.load_snapshot("gone")
    with pytest.raises(StoreError, match="no snapshot 'gone'"):
        embedding.drop_snapshot("gone")
    assert_same(content(embedding), before)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "x" * 151, "a b", "x\0", 7])
def test_names_that_are_no_files_are_refused(tmp_path: Path, name: str) -> None:
    embedding = make(tmp_path)
    for call in (embedding.save_snapshot, embedding.load_snapshot, embedding.drop_snapshot):
        with pytest.raises((InvalidArgumentError, TypeError), match="the name of a snapshot"):
            call(name)


@pytest.mark.parametrize("store", STORES)
def test_a_name_can_be_used_again(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    for _ in range(3):
        embedding(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        embedding.save_snapshot("best")
    then = content(embedding)
    assert embedding.snapshots() == ["best"]
    folder = tmp_path / "0-1" / "rows" / "snapshots"
    assert len(list(folder.iterdir())) == 1
    embedding(IDS + 1000)
    embedding.load_snapshot("best")
    assert_same(content(embedding), then)
    embedding.drop_snapshot("best")
    assert embedding.snapshots() == []
    assert_same(content(embedding), then)


@pytest.mark.parametrize("store", STORES)
def test_the_second_snapshot_writes_what_changed(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store, dim=64)
    for begin in range(0, 2000, 500):
        embedding(IDS + begin)
    embedding.save_snapshot("a")

    def written() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "0-1/rows/segments").iterdir())

    before = written()
    embedding(IDS[:10] + 5000)
    embedding.save_snapshot("b")
    assert written() - before < 0.2 * before


@pytest.mark.parametrize("source", STORES)
@pytest.mark.parametrize("target", STORES)
def test_another_kind_of_store_takes_over(tmp_path: Path, source: str, target: str) -> None:
    embedding = make(tmp_path, source, size_factor=3)
    train(embedding, adam(embedding), steps=3)
    embedding.save_snapshot("a")
    then = content(embedding)
    losses = train(embedding, adam(embedding), steps=3)
    embedding.close()
    other = make(tmp_path, target, size_factor=3, resume=True)
    assert_same(content(other), then)
    assert train(other, adam(other), steps=3) == losses


def test_another_size_of_row_is_named(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    embedding(IDS)
    embedding.save_snapshot("a")
    embedding.close()
    for store in STORES:
        with pytest.raises(InvalidArgumentError, match="size_factor or storage_dim are not those"):
            make(tmp_path, store, size_factor=2)
        # The same number of floats, of which others are the embedding.
        with pytest.raises(InvalidArgumentError, match="embedding_dim of snapshot .* is 8; .* 4"):
            make(tmp_path, store, dim=4, size_factor=2, resume=True)
    make(tmp_path, resume=True).close()
    tables = uniform_tables(0.1, 0.2)
    with pytest.raises(InvalidArgumentError, match="tables_in_keys of snapshot"):
        make(tmp_path, tables=tables, share_ids=False, resume=True)


def test_one_embedding_at_a_time_has_a_folder(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    with pytest.raises(StoreError, match="another process or store has it open"):
        make(tmp_path, "cached_ssd")
    embedding.close()
    make(tmp_path, "cached_ssd")


def test_more_rows_than_the_capacity_are_not_loaded(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    embedding(IDS)
    embedding.save_snapshot("a")
    embedding.close()
    options = store_options("device_mem", tmp_path, capacity=100)
    small = make(tmp_path, options=options, resume=False)
    small(IDS[:50])
    with pytest.raises(InsertionError, match="the snapshot has 500 rows for a capacity of 100"):
        small.load_snapshot("a")
    assert len(small.tables[0]) == 50


@pytest.mark.parametrize("store", ["device_mem", "cached_host_mem"])
def test_a_damaged_snapshot_is_noticed_before_a_row_goes(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store)
    embedding(IDS)
    embedding.save_snapshot("a")
    embedding(IDS + 1000)
    before = content(embedding)
    (segment,) = (tmp_path / "0-1/rows/segments").iterdir()
    with segment.open("r+b") as file:
        file.seek(4096 + 3000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptStoreError):
        embedding.load_snapshot("a")
    assert_same(content(embedding), before)
    embedding.save_snapshot("b")  # everything is written again
    embedding.load_snapshot("b")
    assert_same(content(embedding), before)


# ---- state_dict ----


@pytest.mark.parametrize("store", STORES)
def test_state_dict_names_a_snapshot(tmp_path: Path, store: str) -> None:
    model = torch.nn.ModuleDict({"rows": make(tmp_path, store), "top": torch.nn.Linear(DIM, 1)})
    embedding = model["rows"]
    assert isinstance(embedding, one_embedding.Embedding)
    embedding(IDS)
    then = content(embedding)
    state = model.state_dict()
    assert embedding.snapshots() == [state["rows.OneEmbeddingSnapshot"]]
    assert "kv_store" in state["rows.OneEmbeddingKeyValueOptions"]
    assert model.state_dict()["rows.OneEmbeddingSnapshot"] == embedding.snapshots()[0]
    torch.save(state, tmp_path / "model.pt")
    embedding(IDS + 1000)
    assert model.state_dict()["rows.OneEmbeddingSnapshot"] != state["rows.OneEmbeddingSnapshot"]
    assert len(embedding.snapshots()) == 2
    model.load_state_dict(torch.load(tmp_path / "model.pt"))  # weights_only
    assert_same(content(embedding), then)
    embedding.drop_snapshot(state["rows.OneEmbeddingSnapshot"])
    with pytest.raises(RuntimeError, match="there is no snapshot"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*rows\.OneEmbeddingSnapshot"):
        model.load_state_dict({k: v for k, v in state.items() if "One" not in k})


@pytest.mark.parametrize("store", STORES)
def test_rows_are_not_saved_after_a_write_to_the_parameter_alone(
    tmp_path: Path, store: str
) -> None:
    embedding = make(tmp_path, store, size_factor=3)
    embedding(IDS)
    embedding.save_snapshot("good")
    embedding.shadow.data.mul_(0.9)  # as a moving average over parameters
    for use in (
        lambda: embedding.save_snapshot("bad"),
        embedding.state_dict,
        lambda: embedding(IDS),
    ):
        with pytest.raises(UsageError, match="something changed the parameter 'handle'"):
            use()
    embedding.to("cpu")
    with pytest.raises(UsageError, match="something changed the parameter 'handle'"):
        embedding.save_snapshot("bad")
    assert embedding.snapshots() == ["good"]
    embedding.load_snapshot("good")
    embedding(IDS)
    embedding.save_snapshot("better")


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_without_the_name_of_a_snapshot(tmp_path: Path, strict: bool) -> None:
    embedding = make(tmp_path)
    embedding(IDS)
    with pytest.raises(RuntimeError, match="has 'handle' and no 'OneEmbeddingSnapshot'"):
        embedding.load_state_dict({"handle": torch.ones(1)}, strict=strict)
    assert embedding.load_state_dict({}, strict=False).missing_keys == [
        "handle",
        "OneEmbeddingSnapshot",
    ]
    embedding(IDS)
    assert len(embedding.tables[0]) == len(IDS)


def test_an_update_without_new_ids_is_a_change(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(IDS).sum().backward()
    embedding.save_snapshot("a")
    optimizer.step()  # after the snapshot of the forward's rows
    then = content(embedding)
    embedding.save_snapshot("b")
    embedding.load_snapshot("a")
    assert not torch.equal(rows_of(embedding, IDS), then[1])
    embedding.load_snapshot("b")
    assert_same(content(embedding), then)


@pytest.mark.parametrize("store", STORES)
def test_an_embedding_that_is_gone_gives_its_folder_and_name_back(
    tmp_path: Path, store: str
) -> None:
    embedding = make(tmp_path, store, name="users")
    embedding(IDS).sum().backward()
    del embedding
    make(tmp_path, store, name="users")


@pytest.mark.parametrize("store", STORES)
def test_state_that_starts_again_is_in_the_next_snapshot(tmp_path: Path, store: str) -> None:
    """Another optimizer of the same size begins with its own state, in every row."""
    embedding = make(tmp_path, store, size_factor=2)
    embedding(IDS)
    embedding.save_snapshot("a")
    adagrad = torch.optim.Adagrad(embedding.parameters(), initial_accumulator_value=0.5)
    embedding(IDS[:3]).sum().backward()
    adagrad.step()
    then = content(embedding)
    assert torch.equal(then[2][3:], torch.full((497, DIM), 0.5))
    embedding.save_snapshot("b")
    embedding.close()
    assert_same(content(make(tmp_path, store, size_factor=2, resume=True)), then)
