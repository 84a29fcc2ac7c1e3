"""Rows at a server: the bits of rows in memory, and another process finds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embeddings import make, train

from dynamicemb import one_embedding
from dynamicemb.errors import DynamicEmbError
from processes import run_ranks
from redis_servers import RedisServer

pytest.importorskip("redis")
WIDE = 64


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    one = RedisServer("--requirepass", "hunter2")
    yield one
    one.close()


@pytest.fixture
def url(server: RedisServer) -> str:
    server.client(password="hunter2").flushall()
    return server.url(user=":hunter2@")


def at(url: str, path: Path, **options: Any) -> dict[str, Any]:
    options = {"size_factor": 3} | options
    return one_embedding.make_cached_remote_store_options(1, url, str(path), **options)


def adam(embedding: one_embedding.Embedding) -> torch.optim.Optimizer:
    return torch.optim.Adam(embedding.parameters(), lr=0.01)


@pytest.mark.parametrize("host_cache", [0, 2])
def test_a_table_several_times_its_cache_trains_to_the_same_bits(
    url: str, tmp_path: Path, host_cache: int
) -> None:
    plain = make(tmp_path / "plain", dim=WIDE, size_factor=3)
    expected = train(plain, adam(plain), steps=40, ids=6000)
    options = at(url, tmp_path / "there", host_cache_budget_mb=host_cache)
    embedding = make("", dim=WIDE, options=options)
    assert train(embedding, adam(embedding), steps=40, ids=6000) == expected
    assert embedding.tables[0].cache_stats().brought_up > 0
    ids = torch.arange(6000)
    there, here = embedding.tables[0].find(ids), plain.tables[0].find(ids)
    assert torch.equal(there.found, here.found)
    assert torch.equal(there.embeddings[here.found], here.embeddings[here.found])
    assert torch.equal(there.state[here.found], here.state[here.found])


def _rows(rank: int, url: str, path: str, steps: int) -> list[list[float]]:
    torch.set_num_threads(1)
    embedding = make("", dim=8, name="users", options=at(url, Path(path)), resume=True)
    if steps:
        train(embedding, adam(embedding), steps=steps)
        embedding.flush()
    found = embedding.tables[0].find(torch.arange(2000))
    return torch.cat([found.embeddings, found.state], 1)[found.found].tolist()


def test_another_process_finds_the_rows(url: str, tmp_path: Path) -> None:
    (first,) = run_ranks(1, _rows, url, str(tmp_path), 5)
    assert len(first) > 500
    assert _rows(0, url, str(tmp_path), 0) == first


def test_a_snapshot_has_the_rows_of_its_moment(url: str, tmp_path: Path) -> None:
    embedding = make("", dim=8, options=at(url, tmp_path), name="saved")
    optimizer = adam(embedding)
    train(embedding, optimizer, steps=3)
    before = embedding.tables[0].find(torch.arange(2000))
    embedding.save_snapshot("then")
    train(embedding, optimizer, steps=3, seed=1)
    embedding.load_snapshot("then")
    after = embedding.tables[0].find(torch.arange(2000))
    assert torch.equal(before.found, after.found)
    assert torch.equal(before.embeddings[before.found], after.embeddings[before.found])
    embedding.close()
    anew = make("", dim=8, options=at(url, tmp_path), name="saved", resume=False)
    assert len(anew.tables[0]) == 0


def test_no_credentials_are_shown(url: str, tmp_path: Path) -> None:
    options = at(url, tmp_path)
    embedding = make("", dim=8, options=options)
    train(embedding, adam(embedding), steps=1)
    shown = f"{embedding!r} {embedding.state_dict()} {embedding.tables[0]!r}"
    options["kv_store"].pop("caches")
    with pytest.raises(DynamicEmbError) as caught:
        make("", dim=8, options=options)
    shown += f"{caught.value!r} {caught.value.__cause__!r}"
    with pytest.raises(DynamicEmbError) as caught:
        at("redis://:hunter2@h?what=1", tmp_path)
    shown += f"{caught.value!r}"
    assert "hunter2" not in shown
    assert "redis://***@127.0.0.1" in shown


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(DynamicEmbError, match="packed"):
        at("redis://h?layout=upstream", tmp_path)
    with pytest.raises(DynamicEmbError, match="cache_budget_mb"):
        one_embedding.make_cached_remote_store_options(0, "memory://a", str(tmp_path))
