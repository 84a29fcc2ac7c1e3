"""A remote store as the last tier of a dynamic table: the bits of a table in memory, also when the
server fails in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.errors import InvalidArgumentError, StoreError, UsageError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.tiers import HostStore, RemoteStore, Stack
from dynamicemb.tiers.remote.memory import forget_memory
from processes import run_ranks
from redis_servers import RedisServer

OFFSETS = torch.arange(0, 101, 4)


def make(
    url: str | None, optimizer: EmbOptimType = EmbOptimType.ADAM, **changes: Any
) -> BatchedDynamicEmbeddingTables:
    fields: dict[str, Any] = {
        "dim": 8,
        "max_capacity": 16384,
        "bucket_capacity": 64,
        "score_strategy": DynamicEmbScoreStrategy.STEP,
    }
    if url is not None:
        storage = RemoteStore.at(url, table="users")
        fields |= {"external_storage": storage, "local_hbm_for_values": 512 * 160}
    return BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(**(fields | changes))],
        pooling_mode=DynamicEmbPoolingMode.SUM,
        optimizer=optimizer,
        learning_rate=0.1,
        seed=3,
    )


def batches(count: int = 20) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 4000, (100,), generator=generator) - 7 for _ in range(count)]


def train(module: Any, data: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = []
    for ids in data:
        out = module(ids, OFFSETS)
        (out * out).sum().backward()
        outputs.append(out.detach())
    return outputs


def content(table: Any) -> dict[int, Any]:
    return {
        int(id_): (rows.embeddings[i].tolist(), rows.state[i].tolist(), rows.scores[i].tolist())
        for rows in table.export(batch_size=1000)
        for i, id_ in enumerate(rows.ids)
    }


@pytest.fixture(params=["redis", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        forget_memory("tier")
        return "memory://tier"
    server: RedisServer = request.getfixturevalue("server")
    return server.url("?chunk_size=50")


def test_a_table_ten_times_its_cache(url: str) -> None:
    plain, cached = make(None), make(url)
    data = batches()
    for expected, out in zip(train(plain, data), train(cached, data), strict=True):
        assert torch.equal(expected, out)
    table = cached.tables[0]
    assert table.cache_stats().brought_up > 50
    assert content(table) == content(plain.tables[0])
    assert len(table) == len(plain.tables[0])
    assert table.stats().size == len(plain.tables[0])


def test_the_last_of_several_stores(url: str) -> None:
    below = RemoteStore.at(url, table="users")
    storage = Stack.of(HostStore.within(64 * 1024), below)
    plain, cached = make(None), make(url, external_storage=storage)
    data = batches()
    for expected, out in zip(train(plain, data), train(cached, data), strict=True):
        assert torch.equal(expected, out)
    assert content(cached.tables[0]) == content(plain.tables[0])
    cached.tables[0].flush()
    assert content(make(url).tables[0]) == content(plain.tables[0])


def test_another_process_finds_the_rows(url: str) -> None:
    cached = make(url)
    train(cached, batches())
    before = content(cached.tables[0])
    cached.tables[0].flush()
    again = make(url)  # as a new process would
    assert content(again.tables[0]) == before
    again.tables[0].erase(torch.tensor([-7, -6]))
    again.tables[0].clear()
    assert len(again.tables[0]) == 0


def test_rows_of_another_optimizer_or_dim_are_refused_by_what_is_there(url: str) -> None:
    first = make(url)
    train(first, batches(2))
    first.flush()
    others: list[dict[str, Any]] = [{"optimizer": EmbOptimType.SGD}, {"dim": 12}]
    for other in others:
        with pytest.raises(InvalidArgumentError, match="or the options and optimizer that wrote"):
            train(make(url, **other), batches(2))
    again = make(url)  # what was refused has changed nothing
    assert content(again.tables[0]) == content(first.tables[0])


def test_snapshots_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no snapshots"):
        make(url).tables[0].snapshot("a")


def test_another_optimizer_needs_an_empty_store(url: str) -> None:
    cached = make(url)
    train(cached, batches(3))
    cached.tables[0].flush()
    with pytest.raises(UsageError, match="empty store"):
        cached.tables[0].set_optimizer(Optimizer(OptimizerKind.SGD, OptimizerArgs()))


def test_no_row_is_lost_when_the_server_goes_away_and_comes_back(
    start: Callable[..., RedisServer],
) -> None:
    server = start("--appendonly", "yes", "--appendfsync", "always")
    plain, cached = make(None), make(server.url("?retry_limit=0"))
    data = batches(30)
    train(plain, data)
    failures: list[str] = []
    for step, ids in enumerate(data):
        if step in (8, 16):
            server.stop()
        while True:
            try:
                train(cached, [ids])
                break
            except StoreError as error:
                failures.append(str(error))
                if server.process is None:
                    server.start()
    assert ["refused" in one for one in failures] == [True, True]
    assert {i: row[:2] for i, row in content(cached.tables[0]).items()} == {
        i: row[:2] for i, row in content(plain.tables[0]).items()
    }


def _on_a_rank(rank: int, url: str) -> tuple[int, int]:
    cached = make(url)
    train(cached, [ids * 2 + rank for ids in batches(5)])
    table = cached.tables[0]
    table.flush()
    return len(table), sum(len(rows) for rows in table.export())


def test_ranks_keep_their_rows_apart(server: RedisServer) -> None:
    counts = run_ranks(2, _on_a_rank, server.url())
    assert counts[0] == counts[1]
    assert counts[0][0] == counts[0][1] == len(torch.unique(torch.cat(batches(5))))
