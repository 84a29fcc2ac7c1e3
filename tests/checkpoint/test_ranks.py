"""Checkpoints of several ranks, in real processes: any number to any other, all or none."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import FailingSystem
from rank_models import DIST_TYPES, all_ids, make_rank_model, row_of, score_of
from victims import KILLED, outcomes_of_ranks

from dynamicemb import (
    CheckpointError,
    DynamicEmbDump,
    DynamicEmbLoad,
    FrequencyAdmissionStrategy,
    KVCounter,
    dump_async,
)
from dynamicemb.checkpoint.files import replaced_system
from models import contents, make_model, train
from processes import run_ranks

SIZES = (1, 2, 3, 4)


def check_rank(model: Any, value: float) -> int:
    """This rank has exactly the rows it owns, bit for bit; how many."""
    count = 0
    for number, table in enumerate(model.tables):
        ids = all_ids()[number:]
        ids = ids[model.routings[table.name].owned(ids)]
        assert len(table) == len(ids), (len(table), len(ids))
        found = table.find(ids)
        assert bool(found.found.all())
        assert torch.equal(found.embeddings, row_of(ids, table.dim, value))
        assert torch.equal(found.state, row_of(ids, table.state_dim, -value))
        assert torch.equal(found.scores, score_of(ids))
        assert table.iteration == 9
        count += len(ids)
    return count


def reshard(rank: int, folder: str, kinds: list[tuple[str, str]]) -> int:
    """Dump on W ranks, load on W', for all W and W' and the given pairs of routing."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    loaded = 0
    for before, after in kinds:
        for size in SIZES:
            path = f"{folder}/{before}-{after}-{size}"
            if rank < size:
                model = make_rank_model(before, size, rank, fill=True, value=float(size))
                DynamicEmbDump(path, model, None, True, groups[size])
            dist.barrier()
            for other in SIZES:
                if rank < other:
                    model = make_rank_model(after, other, rank, fill=False)
                    report = DynamicEmbLoad(path, model, None, True, groups[other])
                    assert report.did_not_fit == 0
                    total = report.tables["model"]["user"].rows
                    assert total == len(all_ids())
                    check_rank(model, float(size))
                    loaded += 1
    return loaded


def test_every_number_of_ranks_to_every_other(tmp_path: Path) -> None:
    kinds = [(one, one) for one in DIST_TYPES]
    counts = run_ranks(4, reshard, str(tmp_path), kinds)
    assert counts == [48, 36, 24, 12]


@pytest.mark.stress
def test_every_routing_to_every_other(tmp_path: Path) -> None:
    kinds = list(itertools.product(DIST_TYPES, DIST_TYPES))
    run_ranks(4, reshard, str(tmp_path), kinds)


def small_things(rank: int, folder: str) -> list[str]:
    """Several cases in one group, since starting processes takes the longest."""
    seen = []
    # Another routing, for one pair of sizes.
    model = make_rank_model("roundrobin", 2, rank, fill=True)
    DynamicEmbDump(f"{folder}/routing", model, optim=True)
    other = make_rank_model("hash_roundrobin", 2, rank, fill=False)
    DynamicEmbLoad(f"{folder}/routing", other, optim=True)
    check_rank(other, 0.0)

    # One rank has no rows.
    model = make_rank_model("roundrobin", 2, rank, fill=rank == 0)
    DynamicEmbDump(f"{folder}/empty", model)
    other = make_rank_model("roundrobin", 2, rank, fill=False)
    DynamicEmbLoad(f"{folder}/empty", other)
    assert (len(other.tables[0]) == 0) is (rank == 1)

    # Tables that are not spread over ranks come back to their rank; more or fewer ranks get all.
    own = make_model()
    train(own, seed=rank)
    DynamicEmbDump(f"{folder}/own", own, optim=True)
    again = make_model()
    DynamicEmbLoad(f"{folder}/own", again, optim=True)
    assert contents(again) == contents(own)

    # Admission counters go to the owners of their ids.
    def counted() -> Any:
        return make_rank_model(
            "roundrobin",
            2,
            rank,
            fill=False,
            names=("t",),
            admit_strategy=FrequencyAdmissionStrategy(threshold=10),
            admission_counter=KVCounter(1024, 128),
        )

    model = counted()
    ids = torch.arange(rank, 100, 2)
    model(ids, torch.tensor([0, len(ids)]))
    DynamicEmbDump(f"{folder}/counter", model, counter=True)
    other = counted()
    other.routings = {"t": type(other.routings["t"])("hash_roundrobin", 2, rank)}
    DynamicEmbLoad(f"{folder}/counter", other, counter=True)
    found, counts = other.tables[0].export_counter()
    everything = torch.arange(100)
    assert torch.equal(found.sort().values, everything[other.routings["t"].owned(everything)])
    assert set(counts.tolist()) == {1}

    # In the background, with training messages at the same time.
    model = make_rank_model("roundrobin", 2, rank, fill=True, value=5.0)
    handle = dump_async(f"{folder}/async", model, optim=True)
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    for table in model.tables:
        table.clear()
    handle.wait()
    other = make_rank_model("roundrobin", 2, rank, fill=False)
    DynamicEmbLoad(f"{folder}/async", other, optim=True)
    check_rank(other, 5.0)

    # Ranks that do not agree what to dump all say so.
    try:
        DynamicEmbDump(f"{folder}/disagree{rank}", model)
    except ValueError as error:
        seen.append(str(error))

    # A rank that fails: all raise, and what was there stays.
    model = make_rank_model("roundrobin", 2, rank, fill=True, value=7.0)
    for bad, kind in itertools.product((0, 1), ("write", "sync", "open")):
        system = FailingSystem([kind], 2 if rank == bad else None, errno.ENOSPC)
        with replaced_system(system):
            try:
                DynamicEmbDump(f"{folder}/async", model, optim=True, allow_overwrite=True)
            except CheckpointError as error:
                seen.append(f"{bad} {kind} {'rank' in str(error)}")
        dist.barrier()
        other = make_rank_model("roundrobin", 2, rank, fill=False)
        DynamicEmbLoad(f"{folder}/async", other, optim=True)
        check_rank(other, 5.0)
    return seen


def test_two_ranks(tmp_path: Path) -> None:
    one, two = run_ranks(2, small_things, str(tmp_path))
    for seen in (one, two):
        assert "the same path, tables and options on all ranks" in seen[0]
        assert len(seen) == 7
    # The rank that failed says what happened to it, the other one names it.
    for mine, theirs in zip(one[1:], two[1:], strict=True):
        assert mine.split()[:2] == theirs.split()[:2]
        named = {0: (mine, theirs), 1: (theirs, mine)}[int(mine[0])]
        assert named[1].endswith("True")
    # One rank's tables, read by one process: rows of all ranks.
    alone = make_model()
    DynamicEmbLoad(tmp_path / "own", alone)
    assert len(alone.tables[0]) > 0
    leftovers = [p.name for p in (tmp_path / "async").iterdir() if p.name.startswith(".")]
    assert len(leftovers) <= 1
    DynamicEmbDump(tmp_path / "async", alone, allow_overwrite=True)
    names = sorted(p.name for p in (tmp_path / "async").iterdir())
    assert names == ["dynamicemb_manifest.json", "model"]
    assert not list((tmp_path / "async" / "model").glob("*world_size_2"))


def die(rank: int, folder: str, victim: int, nth: int) -> str:
    """Dump; rank `victim` is killed at its `nth` operation."""
    from faults import KillingSystem

    model = make_rank_model("roundrobin", 2, rank, fill=True, value=1.0)
    system = KillingSystem(nth if rank == victim else None)
    with replaced_system(system):
        try:
            DynamicEmbDump(folder, model, optim=True, allow_overwrite=True)
        except Exception as error:
            return f"raised {type(error).__name__}"
    return "committed"


def load_value(folder: Path) -> float:
    """The value of the rows, which must all have the same and be complete."""
    model = make_rank_model("roundrobin", 1, 0, fill=False)
    DynamicEmbLoad(folder, model, optim=True)
    value = float(model.tables[0].find(torch.tensor([0])).embeddings[0, 0])
    check_rank(model, value)
    return value


@pytest.mark.parametrize(("victim", "nth"), [(0, 12), (1, 5), (0, 50)])
def test_a_rank_is_killed(tmp_path: Path, victim: int, nth: int) -> None:
    killed_while_dumping(tmp_path, victim, nth)


@pytest.mark.stress
def test_a_rank_is_killed_at_every_operation(tmp_path: Path) -> None:
    for victim in (0, 1):
        for nth in itertools.count(1):
            if not killed_while_dumping(tmp_path / f"{victim}-{nth}", victim, nth):
                break
        assert nth > 20


def killed_while_dumping(folder: Path, victim: int, nth: int) -> bool:
    """Whether the victim got as far as its `nth` operation; old or new must be whole after it."""
    DynamicEmbDump(folder, make_rank_model("roundrobin", 1, 0, fill=True, value=0.0), optim=True)
    outcomes = outcomes_of_ranks(2, die, str(folder), victim, nth)
    died = outcomes[victim][0] == KILLED
    value = load_value(folder)
    if died:
        survivor = outcomes[1 - victim]
        assert survivor[0] == "result"
        assert value in (0.0, 1.0)
        assert survivor[1] != "committed" or value == 1.0
    else:
        assert value == 1.0
    again = make_rank_model("roundrobin", 1, 0, fill=True, value=2.0)
    DynamicEmbDump(folder, again, optim=True, allow_overwrite=True)
    assert load_value(folder) == 2.0
    assert sorted(p.name for p in folder.iterdir()) == ["dynamicemb_manifest.json", "model"]
    return died
