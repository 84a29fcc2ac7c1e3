"""A process ends and another one goes on, over a real redis-server, with the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from static_models import build, data, rows_of, train, with_spread_ids

import torchrec_dynamic_embedding as tde
from processes import run_ranks
from redis_servers import RedisServer

CASES = {
    "sequence": EmbOptimType.EXACT_ADAGRAD,
    "bags": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def _train(rank: int, url: str, begin: int, end: int) -> dict[str, tuple[list[float], Any]]:
    """By kind of table: the losses of batches begin to end, and the rows at the server then. The
    tables hold a tenth of the ids."""
    out = {}
    for kind, optimizer in CASES.items():
        model = build(kind, 100, optimizer)
        torch.manual_seed(11)  # of the rows of new ids
        batches = with_spread_ids(data(40))[begin:end]
        at = f"{url}&&prefix={kind}"
        losses = train(model, tde.wrap(at, batches, model, model.configs, num_prefetch=2))
        rows = {name: one.numpy() for name, one in rows_of(model, at).items()}  # saves
        out[kind] = (losses, rows)
    return out


@pytest.mark.usefixtures("one_rank")
def test_a_new_process_goes_on_as_if_nothing_had_been() -> None:
    server = RedisServer()
    try:
        whole = _train(0, server.url("0"), 0, 40)
        (first,) = run_ranks(1, _train, server.url("1"), 0, 20)
        (second,) = run_ranks(1, _train, server.url("1"), 20, 40)
    finally:
        server.close()
    for kind in CASES:
        assert first[kind][0] + second[kind][0] == whole[kind][0]
        for table, rows in whole[kind][1].items():
            assert (second[kind][1][table] == rows).all()
            assert (first[kind][1][table] != rows).any()  # the second half changed them
