"""A real redis-server is stopped and stalled in the middle of training: nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from static_models import build, data, train, with_spread_ids

import torchrec_dynamic_embedding as tde
from dynamicemb.errors import StoreError
from redis_servers import RedisServer

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
    url = server.url("?timeout=60s&&retry_limit=0")
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
