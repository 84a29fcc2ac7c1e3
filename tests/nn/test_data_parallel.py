"""DistributedDataParallel keeps parameters equal on all ranks, and knows nothing of rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from dynamicemb import DynamicEmbedding, UsageError
from dynamicemb.dcp import DynamicTables
from processes import run_ranks

IDS = torch.arange(4)
CPU = torch.device("cpu")


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


def alone(rank: int) -> None:
    """One process: the wrapper writes to parameters when it is made, and nothing is lost."""
    for fused in (None, "sgd"):
        for use in (
            lambda model, wrapped: wrapped.state_dict(),
            lambda model, wrapped: model.state_dict(),
            lambda model, wrapped: model.eval()(IDS),
            lambda model, wrapped: model(IDS),
            lambda model, wrapped: copy.deepcopy(model),
            lambda model, wrapped: AveragedModel(model).update_parameters(wrapped.module),
            lambda model, wrapped: list(DynamicTables(wrapped).state_dict()),
        ):
            model = nn.Sequential(DynamicEmbedding(4, seed=1, optimizer=fused), nn.Linear(4, 1))
            wrapped = DistributedDataParallel(model)
            use(model, wrapped)
            model.train()
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            for _ in range(5):
                optimizer.zero_grad()
                wrapped(IDS).sum().backward()
                optimizer.step()
            assert len(model[0].table) == 4
            use(model, wrapped)


def shards(rank: int) -> list[str]:
    """What FSDP of both kinds does with a handle: rows are trained by a fused optimizer, and each
    rank's own; without, they are refused in training."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    wrappers = {
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "flat": lambda model: FullyShardedDataParallel(model, device_id=CPU),
        "original": lambda model: FullyShardedDataParallel(
            model, device_id=CPU, use_orig_params=True
        ),
    }
    said = []
    for wrap in wrappers.values():
        for fused in ("sgd", None):
            rows = DynamicEmbedding(4, seed=1, optimizer=fused)
            model = nn.Sequential(rows, nn.Linear(4, 5), nn.Linear(5, 1))
            for _ in range(5):  # the handle has another value than a new one
                rows(IDS).sum().backward()
            model = wrap(model)
            if fused is None:
                with pytest.raises(UsageError) as caught:
                    model(IDS)
                said.append(str(caught.value))
                continue
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
            for _ in range(70):
                optimizer.zero_grad()
                model(IDS).sum().backward()
                optimizer.step()
            assert rows.table.iteration == 75
            rows.check_written()
            with torch.no_grad():
                model.eval()(IDS)
                model.state_dict()
                model(IDS)
            rows.check_written()
    return said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sharded_handle_keeps_its_value(ranks: int) -> None:
    for said in run_ranks(ranks, shards):
        assert len(said) == 3
        assert all("FSDP and functional_call" in one for one in said)


def test_a_wrapper_around_one_process_trains() -> None:
    run_ranks(1, alone)


def test_rows_inside_are_refused_and_beside_are_trained() -> None:
    for said in run_ranks(2, steps):
        assert len(said) == 2
        assert all("inside DistributedDataParallel" in one for one in said)
