"""Several ranks with a parameter server, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from static_models import IDS, build, data, fill_server, rows_of, train, with_spread_ids

import torchrec_dynamic_embedding as tde
from dynamicemb.errors import DynamicEmbError
from processes import run_ranks
from redis_servers import RedisServer


def _equal_to_full(rank: int, url: str, kind: str, num_prefetch: int) -> tuple[float, float, int]:
    torch.manual_seed(3)
    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    full = build(kind, IDS, optimizer)
    fill_server(url, full)
    torch.distributed.barrier()
    small = build(kind, IDS // 10, optimizer)
    batches = data(40, seed=rank, batch=4)
    expected = train(full, batches)
    loader = tde.wrap(
        url, with_spread_ids(batches), small, small.configs, num_prefetch=num_prefetch
    )
    losses = train(small, loader)
    loss_error = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected, strict=True))
    tde.save(small)
    torch.distributed.barrier()
    after = rows_of(small, url)
    row_error, ids = 0.0, 0
    for name, (begin, rows) in weights_of_rank(full).items():
        if len(rows):
            there = after[name][begin : begin + len(rows)]
            row_error = max(row_error, float((there - rows).abs().max()))
            ids += len(rows)
    return loss_error, row_error, ids


def weights_of_rank(full: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """By table: the first id of this rank's rows, and the rows with their states."""
    from dynamicemb.tde.ps import tensors_of
    from dynamicemb.tde.shards import local_shards

    out: dict[str, tuple[int, torch.Tensor]] = {}
    for path, configs in full.configs.items():
        for config in configs:
            out[config.name] = (0, torch.empty(0))
            for shard in local_shards(
                tensors_of(path, full.module.get_submodule(path), config.name)
            )[0]:
                parts = [one.detach().reshape(shard.rows, -1) for one in shard.tensors]
                out[config.name] = (shard.row_begin, torch.cat(parts, 1))
    return out


def _uneven(rank: int, url: str, num_prefetch: int) -> tuple[int, str]:
    model = build("sequence", 500)
    loader = tde.wrap(url, data(3 + rank), model, model.configs, num_prefetch=num_prefetch)
    done = 0
    try:
        for batch in loader:
            train(model, [batch])
            done += 1
    except DynamicEmbError as error:
        return done, str(error)
    return done, ""


def _failing(rank: int, url: str, num_prefetch: int) -> str:
    def batches() -> Iterator[Any]:
        yield from data(3)
        if rank == 1:
            raise OSError("the disk is gone")
        yield from data(3)

    model = build("sequence", 500)
    loader = tde.wrap(url, batches(), model, model.configs, num_prefetch=num_prefetch)
    try:
        train(model, loader)
    except (OSError, DynamicEmbError) as error:
        return str(error)
    return ""


def _given_up(rank: int, url: str) -> int:
    model = build("sequence", 500)
    loader = tde.wrap(url, data(20, seed=rank), model, model.configs, num_prefetch=4)
    for number, batch in enumerate(loader):
        train(model, [batch])
        if number == 2:
            break
    return len(train(model, loader))


EQUAL = [("sequence", 0), ("sequence", 3), ("bags", 2)]


def _everything(rank: int, url: str) -> dict[Any, Any]:
    out: dict[Any, Any] = {
        case: _equal_to_full(rank, f"{url}&&prefix={case[0]}{case[1]}", *case) for case in EQUAL
    }
    for depth in (0, 2):
        out["uneven", depth] = _uneven(rank, f"memory://uneven{depth}", depth)
        out["failing", depth] = _failing(rank, f"memory://failing{depth}", depth)
    out["given up"] = _given_up(rank, "memory://given-up")
    return out


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[Any, Any]]]:
    """What each of two ranks found; once for all tests, since starting processes takes long."""
    server = RedisServer()
    yield run_ranks(2, _everything, server.url())
    server.close()


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_with_a_tenth_of_the_rows_train_as_with_all_of_them(
    results: list[dict[Any, Any]], case: tuple[str, int]
) -> None:
    assert max(rank[case][0] for rank in results) < 1e-6  # losses
    assert max(rank[case][1] for rank in results) < 1e-6  # rows and states
    assert sum(rank[case][2] for rank in results) == 3 * IDS


@pytest.mark.parametrize("depth", [0, 2])
def test_ranks_with_different_numbers_of_batches_are_told(
    results: list[dict[Any, Any]], depth: int
) -> None:
    for done, message in (rank["uneven", depth] for rank in results):
        assert done == 3
        assert "rank 0 has no more batches" in message


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_on_one_rank_is_an_error_on_all(results: list[dict[Any, Any]], depth: int) -> None:
    first, second = (rank["failing", depth] for rank in results)
    assert "rank 1 failed" in first
    assert second == "the disk is gone"


def test_all_ranks_may_give_an_iteration_up(results: list[dict[Any, Any]]) -> None:
    assert [rank["given up"] for rank in results] == [20, 20]
