"""A real redis-server is stopped, stalled or full in the middle of training: nothing is lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from static_models import build, data, train, with_spread_ids

import torchrec_dynamic_embedding as tde
from dynamicemb.errors import StoreError
from redis_servers import RedisServer
from torchrec_dynamic_embedding.ps import PS

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    one = RedisServer("--appendonly", "yes", "--appendfsync", "always")
    yield one
    one.close()


def start() -> Any:
    model = build("sequence", 100, EmbOptimType.EXACT_ADAGRAD)
    torch.manual_seed(4)  # of the rows of new ids
    return model


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_training_goes_on_where_it_was(server: RedisServer, memory: str, num_prefetch: int) -> None:
    batches = with_spread_ids(data(30))
    plain = start()
    expected = train(plain, tde.wrap(memory, batches, plain, plain.configs))
    model = start()
    url = server.url("?retry_limit=0")
    loader = iter(tde.wrap(url, batches, model, model.configs, num_prefetch=num_prefetch))
    losses: list[float] = []
    causes = []
    while len(losses) < 30:
        if len(losses) in (10, 20) and len(causes) < len(losses) // 10:
            server.stop()
        try:
            batch = next(loader)
        except StoreError as error:
            causes.append(str(error))
            if server.process is None:
                server.start()
            continue
        losses += train(model, [batch])
        if server.process is None:  # this batch needed no server
            server.start()
            causes.append("not noticed by Redis at redis://127.0.0.1")
    assert losses == expected
    assert all("Redis at redis://127.0.0.1" in cause for cause in causes)
    server.stop()
    with pytest.raises(StoreError):
        tde.save(model)
    server.start()
    tde.save(model)


def test_a_server_without_memory_gets_the_rows_later(server: RedisServer, memory: str) -> None:
    batches = with_spread_ids(data(30))
    plain = start()
    expected = train(plain, tde.wrap(memory, batches, plain, plain.configs))
    model = start()
    loader = iter(tde.wrap(server.url(), batches, model, model.configs, num_prefetch=1))
    losses: list[float] = []
    causes: list[str] = []
    while len(losses) < 30:
        if len(losses) == 10 and not causes:
            server.client().config_set("maxmemory", "1mb")
        try:
            losses += train(model, [next(loader)])
        except StoreError as error:
            causes.append(str(error))
            server.client().config_set("maxmemory", "0")
    assert losses == expected
    assert causes
    assert all("OOM" in cause or "OutOfMemory" in cause for cause in causes)
    tde.save(model)


@pytest.mark.stress
def test_a_stall_of_thirty_seconds_is_waited_for(server: RedisServer, memory: str) -> None:
    """With the timeouts and retries that a URL has by default."""
    batches = with_spread_ids(data(30))
    plain = start()
    expected = train(plain, tde.wrap(memory, batches, plain, plain.configs))
    model = start()
    url = f"redis://127.0.0.1:{server.port}"
    loader = iter(tde.wrap(url, batches, model, model.configs, num_prefetch=1))
    losses = train(model, itertools.islice(loader, 10))
    server.stall()
    waker = threading.Timer(30, server.resume)
    waker.start()
    losses += train(model, loader)
    waker.join()
    tde.save(model)
    assert losses == expected


def test_training_on_rows_that_are_here_does_not_wait_for_a_stalled_server(
    server: RedisServer,
) -> None:
    model = start()
    known = with_spread_ids(data(3))
    loader = iter(tde.wrap(server.url(), known * 4, model, model.configs, num_prefetch=1))
    train(model, itertools.islice(loader, 3))  # fetches
    server.stall()
    try:
        assert len(train(model, loader)) == 9
    finally:
        server.resume()
    tde.save(model)


def test_rows_that_leave_do_not_wait_for_a_stalled_server(server: RedisServer) -> None:
    weight = torch.arange(20.0).view(5, 4)
    ps = PS("t", [weight], server.url())
    server.stall()
    try:
        ps.put(torch.tensor([[7, 1]]))
        weight[1] = 0  # the slot is another id's now
        ps.fetch(torch.tensor([[7, 2]])).wait()  # comes from what is on its way
        assert weight[2].tolist() == [4.0, 5.0, 6.0, 7.0]
    finally:
        server.resume()
    ps.flush()
    ps.fetch(torch.tensor([[7, 3]])).wait()
    assert weight[3].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_stall_is_a_bounded_wait(server: RedisServer) -> None:
    model = start()
    url = server.url("?timeout=300ms&&retry_limit=1")
    loader = iter(tde.wrap(url, with_spread_ids(data(5)), model, model.configs))
    server.stall()
    with pytest.raises(StoreError, match="[Tt]imeout"):
        next(loader)
    server.resume()
    done = 0
    for _ in range(200):
        try:
            train(model, [next(loader)])
            done += 1
        except StoreError:  # a busy machine
            continue
        except StopIteration:
            break
    assert done == 5
