"""A program that runs again starts without rows, as with OneFlow, and says what it passed by."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import embedding_victims as victims
import pytest
import torch
from embeddings import STORES, make, train
from rank_work import call, content, open_embedding
from rank_work import train as train_rank
from test_persistent_tables import puts_of, write_oneflow_table

from dynamicemb import one_embedding
from dynamicemb.errors import UsageError
from ranks import Ranks

IDS = torch.arange(500)


def program(path: Path, store: str, **more: Any) -> list[float]:
    """One run: its losses. It saves under the same name every time."""
    embedding = make(path, store, name="program", size_factor=3, **more)
    adam = torch.optim.Adam(embedding.parameters(), lr=0.01)
    losses = train(embedding, adam, steps=4)
    embedding.save_snapshot("saved")
    losses += train(embedding, adam, steps=4, seed=1)
    embedding.close()
    return losses


def of_rows(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if one.category is UserWarning]


@pytest.mark.parametrize("store", [*STORES, "host_and_ssd"])
def test_a_second_run_is_not_contaminated_by_the_first(tmp_path: Path, store: str) -> None:
    first = program(tmp_path, store)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = program(tmp_path, store)
    (message,) = of_rows(caught)
    assert str(tmp_path) in message
    assert "starts without rows" in message
    assert "newest is 'saved'" in message
    assert second == first


@pytest.mark.parametrize("store", STORES)
def test_snapshots_of_the_run_before_stay(tmp_path: Path, store: str) -> None:
    before = make(tmp_path, store)
    before(IDS)
    before.save_snapshot("before")
    then = before.tables[0].find(IDS)
    before.close()
    after = make(tmp_path, store)
    assert len(after.tables[0]) == 0
    with pytest.warns(UserWarning, match="newest is 'before'"):
        after(IDS + 1000)
    after.save_snapshot("after")
    assert after.snapshots() == ["before", "after"]
    after.load_snapshot("before")
    assert torch.equal(after.tables[0].find(IDS).embeddings, then.embeddings)
    assert len(after.tables[0]) == len(IDS)


@pytest.mark.parametrize("store", STORES)
def test_who_says_how_to_start_is_not_warned(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store)
    embedding(IDS)
    embedding.save_snapshot("s")
    state = embedding.state_dict()
    embedding.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for resume, load in ((True, None), (False, None), (None, "s"), (None, state)):
            again = make(tmp_path, store, resume=resume)
            if isinstance(load, str):
                again.load_snapshot(load)
            elif load is not None:
                again.load_state_dict(load)
            assert len(again.tables[0]) == (0 if resume is False else len(IDS))
            again(IDS)
            again.eval()
            again(IDS)
            again.close()
    assert of_rows(caught) == []


def test_evaluation_says_it_too_and_once(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    embedding(IDS)
    embedding.save_snapshot("s")
    embedding.close()
    again = make(tmp_path)
    again.eval()
    with pytest.warns(UserWarning, match="starts without rows"):
        again(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again(IDS)
        again.train()
        again(IDS)


def test_rows_of_no_snapshot_are_dropped_with_a_warning(tmp_path: Path) -> None:
    embedding = make(tmp_path, "cached_ssd")
    embedding(IDS)
    embedding.flush()
    embedding.close()
    with pytest.warns(UserWarning, match=f"500 rows .* {tmp_path} are in no snapshot"):
        again = make(tmp_path, "cached_ssd")
    assert len(again.tables[0]) == 0


@pytest.mark.parametrize("resume", [None, True])
def test_tables_of_oneflow_in_the_folder_are_named(tmp_path: Path, resume: bool | None) -> None:
    puts = puts_of("int64", 8, [20], 30)
    write_oneflow_table(tmp_path / "0-1", puts, {"theirs": 1})
    embedding = make(tmp_path, resume=resume)
    with pytest.warns(UserWarning, match=r"newest is 'theirs'.*load_snapshot\('theirs'\), or say"):
        embedding(IDS)


@pytest.mark.parametrize("store", STORES)
def test_a_killed_run_that_starts_again_starts_empty_unless_it_resumes(
    tmp_path: Path, store: str
) -> None:
    saved = victims.kill_while_it_saves(tmp_path, store)
    embedding = make(tmp_path, store, dim=32, size_factor=3)
    assert len(embedding.tables[0]) == 0
    with pytest.warns(UserWarning, match="newest is 'last'"):
        embedding(IDS)
    embedding.close()
    again = victims.open_embedding(str(tmp_path), store)
    assert again.tables[0].iteration in (saved, saved + 4)
    assert len(again.tables[0]) > 1000
    again.close()


def test_rows_at_a_server_are_neither_taken_nor_deleted_unasked(tmp_path: Path) -> None:
    options = one_embedding.make_cached_remote_store_options(
        1, f"memory://fresh-{tmp_path.name}", str(tmp_path)
    )
    first = make("", options=options, name="served")
    first(IDS)
    first.flush()
    first.close()
    with pytest.raises(UsageError, match=r"500 rows of embedding 'served'.*resume=True"):
        make("", options=options, name="served")
    second = make("", options=options, name="served", resume=True)
    assert len(second.tables[0]) == 500
    second.save_snapshot("s")
    second.close()
    third = make("", options=options, name="served", resume=False)
    assert len(third.tables[0]) == 0
    third.close()
    with pytest.warns(UserWarning, match="newest is 's'"):
        make("", options=options, name="served")(IDS)


# ---- ranks ----


def run_twice(rank: int, path: str, store: str) -> tuple[Any, list[str]]:
    results: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            embedding = open_embedding(path, store)
            train_rank(embedding, range(3), rank=rank, ranks=embedding.world_size)
            embedding.save_snapshot("a")
            results.append(content(embedding))
            embedding.close()
    assert results[0] == results[1]
    return results[1], of_rows(caught)


def resume_with(rank: int, path: str, store: str) -> Any:
    embedding = open_embedding(path, store, resume=True)
    rows = content(embedding)
    embedding.close()
    return rows


@pytest.mark.parametrize("store", STORES)
def test_ranks_start_again_together(ranks: Ranks, tmp_path: Path, store: str) -> None:
    ran = ranks.run(2, call, work=run_twice, given=(str(tmp_path), store))
    rows: dict[int, Any] = {}
    for rank, (mine, messages) in enumerate(ran):
        rows |= mine
        assert len(messages) == (1 if rank == 0 else 0)
    (resumed,) = ranks.run(1, call, work=resume_with, given=(str(tmp_path), store))
    assert resumed == rows
