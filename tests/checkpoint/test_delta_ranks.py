"""Deltas that several ranks write and another number of ranks applies, in real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.routing import Routing
from dynamicemb.serving import ServingTable
from models import Content, content, make_model
from processes import run_ranks
from tables import EXTREME_IDS, tensor

KINDS = {"roundrobin": None, "hash_roundrobin": None, "continuous": 60}


def model_of(rank: int, world_size: int, dist_type: str) -> Any:
    model = make_model("STEP", names=("t",))
    model.routings = {"t": Routing(dist_type, world_size, rank, KINDS[dist_type])}
    return model


def change(model: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(-400, 400, (150,), generator=draw), tensor(EXTREME_IDS)])
    mine = ids[model.routings["t"].owned(ids)]
    model(mine, torch.tensor([0, len(mine)])).sum().backward()
    model.tables[0].erase(mine[::5])


def write(rank: int, world_size: int, path: str, dist_type: str, first: int, last: int) -> Content:
    model = model_of(rank, world_size, dist_type)
    if first > 0:
        apply_delta(path, model)
    for seed in range(first, last):
        change(model, seed)
        assert dump_delta(path, model).sequence == seed
    return content(model.tables[0])


def read(rank: int, world_size: int, path: str, dist_type: str) -> Content:
    model = model_of(rank, world_size, dist_type)
    apply_delta(path, model)
    table = model.tables[0]
    assert model.routings["t"].owned(torch.tensor(list(content(table)))).all()
    return content(table)


def joined(parts: list[Content]) -> Content:
    return {id_: row for part in parts for id_, row in part.items()}


@pytest.mark.parametrize(
    ("writers", "readers"),
    [((2, "roundrobin"), (3, "continuous")), ((3, "hash_roundrobin"), (1, "roundrobin"))],
)
def test_any_number_of_ranks_applies_what_any_other_wrote(
    memory_path: Path, writers: tuple[int, str], readers: tuple[int, str]
) -> None:
    path = str(memory_path)
    (w, how), (w2, how2) = writers, readers
    written = joined(run_ranks(w, write, w, path, how, 0, 3))
    assert len(written) > 100
    assert joined(run_ranks(w2, read, w2, path, how2)) == written
    # The chain goes on with another number of ranks.
    written = joined(run_ranks(w2, write, w2, path, how2, 3, 5))
    assert joined(run_ranks(w, read, w, path, how)) == written
    serving = ServingTable(path)
    ids = torch.cat([torch.arange(-450, 450), tensor(EXTREME_IDS)])
    found, embeddings = serving.find(ids)
    assert [int(id_) in written for id_ in ids] == found.tolist()
    for id_, row in zip(ids[found].tolist(), embeddings[found].tolist(), strict=True):
        assert tuple(row) == written[id_][0]


def one_is_killed(rank: int, path: str) -> None:
    model = model_of(rank, 2, "roundrobin")
    change(model, 0)
    dump_delta(path, model)
    change(model, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dump_delta(path, model)


def test_a_rank_that_is_killed_leaves_the_chain_as_it_was(memory_path: Path) -> None:
    path = str(memory_path)
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(2, one_is_killed, path)
    assert sorted(os.listdir(path))[0] == "base"
    replica = make_model("STEP", names=("t",))
    assert apply_delta(path, replica) == 1


def _apply_while_it_grows(rank: int, path: str) -> int:
    """How many deltas this rank applies, of a chain that grows before rank 1 looks at it."""
    import torch.distributed as dist

    model = make_model("STEP", names=("t",))
    alone = dist.new_group([1])
    if rank == 1:
        writer = make_model("STEP", names=("t",))
        apply_delta(path, writer, pg=alone)
        writer.tables[0].insert(torch.tensor([77]), torch.ones(1, 4))
        dump_delta(path, writer, pg=alone)
    applied = apply_delta(path, model)
    dist.barrier()
    return applied


def test_all_ranks_apply_the_same_deltas_of_a_chain_that_grows(memory_path: Path) -> None:
    """Rank 0 looks first, and waits for rank 1, which finds a delta more."""
    model = make_model("STEP", names=("t",))
    model.tables[0].insert(torch.arange(10), torch.zeros(10, 4))
    dump_delta(memory_path, model)
    first, second = run_ranks(2, _apply_while_it_grows, str(memory_path))
    assert first == second
