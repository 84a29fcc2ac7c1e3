"""DistributedDataParallel keeps parameters equal on all ranks, and knows nothing of rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamicemb import DynamicEmbedding, UsageError
from processes import run_ranks

IDS = torch.arange(4)


def steps(rank: int) -> list[str]:
    """What training says: rows in the wrapper, fused or not, and rows beside it."""
    said = []
    for fused in (None, "sgd"):
        rows = DynamicEmbedding(4, seed=1, optimizer=fused)
        wrapped = DistributedDataParallel(nn.Sequential(rows, nn.Linear(4, 1)))
        try:
            wrapped(IDS)
        except UsageError as error:
            said.append(str(error))
        assert len(rows.table) == 0
        wrapped.eval()
        assert wrapped(IDS).shape == (4, 1)  # evaluation changes no rows

    rows, top = DynamicEmbedding(4, seed=1), DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD([*rows.parameters(), *top.parameters()], lr=0.1)
    top(rows(IDS + rank)).sum().backward()
    optimizer.step()
    assert len(rows.table) == 4

    # Rows that are meant to be this rank's own: the wrapper is told to leave the handle alone.
    model = nn.Sequential(DynamicEmbedding(4, seed=1, optimizer="sgd"), nn.Linear(4, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.handle"])
    DistributedDataParallel(model)(IDS + rank).sum().backward()
    assert len(model[0].table) == 4
    return said


def test_rows_inside_are_refused_and_beside_are_trained() -> None:
    for said in run_ranks(2, steps):
        assert len(said) == 2
        assert all("inside DistributedDataParallel" in one for one in said)
