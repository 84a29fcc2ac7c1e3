"""Embeddings are published to a server, change by change, and read by another process."""

from __future__ import annotations

import pytest
import torch

from dynamicemb import DynamicEmbedding
from dynamicemb.errors import InvalidArgumentError, StoreError, UsageError
from dynamicemb.incremental_dump import publish
from dynamicemb.serving import PublishedTable
from redis_servers import RedisServer


def model_of(dim: int = 8) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"words": DynamicEmbedding(dim, optimizer="sgd")})


def step(model: torch.nn.ModuleDict, ids: list[int]) -> None:
    (model["words"](torch.tensor(ids)) ** 2).sum().backward()


def assert_equal(serving: PublishedTable, model: torch.nn.ModuleDict) -> None:
    for rows in model["words"].table.export():
        found, values = serving.find(rows.ids)
        assert bool(found.all())
        assert torch.equal(values, rows.embeddings)


def test_what_changed_is_published(server: RedisServer) -> None:
    url = server.url()
    model = model_of()
    serving = PublishedTable(url, "model.words.rows", 8)
    step(model, list(range(-50, 50)))
    assert publish(url, model).rows == 100
    assert_equal(serving, model)
    step(model, [3, 3, 1000])
    model["words"].table.erase(torch.tensor([7, 8]))
    published = publish(url, model)
    assert (published.rows, published.removed) == (2, 2)
    assert_equal(serving, model)
    assert serving.find(torch.tensor([7, 8, 9]))[0].tolist() == [False, False, True]
    assert publish(url, model).rows == 0
    looked_up = serving(torch.tensor([[1, 7], [1, 5]]))
    assert looked_up.shape == (2, 2, 8)
    assert looked_up[0, 1].abs().sum() == 0
    assert torch.equal(looked_up[0, 0], looked_up[1, 0])


def test_a_failing_server_gets_the_rows_later(start: object) -> None:
    server = start()  # type: ignore[operator]
    url = server.url("?retry_limit=0")
    model = model_of()
    step(model, [1, 2, 3])
    publish(url, model)
    step(model, [1])
    server.stop()
    with pytest.raises(StoreError, match="refused"):
        publish(url, model)
    server.start()
    assert publish(url, model).rows == 1


def test_refused(server: RedisServer) -> None:
    model = model_of()
    step(model, [1])
    publish(server.url(), model)
    with pytest.raises(InvalidArgumentError, match=r"asked for: embedding float32\[4\]"):
        PublishedTable(server.url(), "model.words.rows", 4)(torch.tensor([1]))
    with pytest.raises(TypeError, match="int64"):
        PublishedTable(server.url(), "model.words.rows", 8)(torch.tensor([1.0]))
    with pytest.raises(UsageError, match="no dynamic embedding"):
        publish(server.url(), torch.nn.Linear(1, 1))
