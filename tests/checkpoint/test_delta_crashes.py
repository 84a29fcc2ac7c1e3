"""A chain whose writer is killed has a whole end, and a new writer goes on with it."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from faults import KillingSystem
from victims import KILLED, outcomes_of_ranks

from dynamicemb import BatchedDynamicEmbeddingTables
from dynamicemb.checkpoint.files import replaced_system
from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.serving import ServingTable
from models import make_model

IDS = torch.arange(40)


def model_of() -> BatchedDynamicEmbeddingTables:
    return make_model("STEP", names=("t",))


def set_all(model: BatchedDynamicEmbeddingTables, value: float) -> None:
    """All rows have the value; the odd ids are there if it is odd."""
    table = model.tables[0]
    table.erase(IDS[1::2])
    ids = IDS if value % 2 else IDS[::2]
    table.insert(ids, torch.full((len(ids), 4), value))


def value_of(chain: Path) -> float:
    """What the chain holds, to a model and to a serving table; never a mixture."""
    model = model_of()
    apply_delta(chain, model)
    found = model.tables[0].find(IDS)
    value = float(found.embeddings[0, 0])
    there = torch.ones(len(IDS), dtype=torch.bool)
    there[1::2] = value % 2 == 1
    assert torch.equal(found.found, there)
    assert bool((found.embeddings[there] == value).all())
    served, rows = ServingTable(chain).find(IDS)
    assert torch.equal(served, there)
    assert bool((rows[there] == value).all())
    return value


def write_and_die(_: int, chain: str, value: float, nth: int) -> None:
    model = model_of()
    apply_delta(chain, model)
    set_all(model, value)
    with replaced_system(KillingSystem(nth)):
        dump_delta(chain, model)


def killed_at(folder: Path, step: int) -> None:
    seen = set()
    for nth in itertools.count(1, step):
        chain = folder / str(nth)
        model = model_of()
        set_all(model, 0.0)
        dump_delta(chain, model)
        ((kind, text),) = outcomes_of_ranks(1, write_and_die, str(chain), 1.0, nth, group=False)
        assert kind != "error", text
        value = value_of(chain)
        seen.add(value)
        successor = model_of()
        apply_delta(chain, successor)
        set_all(successor, value + 1)
        dump_delta(chain, successor)
        assert value_of(chain) == value + 1
        shutil.rmtree(chain)
        if kind != KILLED:
            break
    assert seen == {0.0, 1.0}


def test_killed_at_the_nth_operation(memory_path: Path) -> None:
    killed_at(memory_path, 16)


@pytest.mark.stress
def test_killed_at_every_operation(memory_path: Path) -> None:
    killed_at(memory_path, 1)
