"""Rows of sharded tables that were not used for long leave, and the dump of changes says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded import KEYS, Net, configs, dynamic_model, dynamic_tables
from torchrec import KeyedJaggedTensor

from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.expiry import expire_rows
from dynamicemb.incremental_dump import incremental_dump, track_removals
from ranks import Ranks

STEPS = 2


def features(*ids: int) -> KeyedJaggedTensor:
    """One example with these ids in every feature."""
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.tensor([*ids] * len(KEYS)),
        lengths=torch.full((len(KEYS),), len(ids)),
    )


def expiring(rank: int, world_size: int, *, bags: bool) -> Any:
    options = DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.STEP)
    tables = configs(bags)
    model = dynamic_model(
        Net(tables),
        {"optimizer": "EXACT_SGD", "learning_rate": 0.1},
        world_size,
        options={one.name: options for one in tables},
    )
    expire_rows(model, steps=STEPS)
    track_removals(model)
    scores: Any = 0
    log = []
    # Ids 2 and 3 are not used again; rank 0 has one of them, rank 1 the other.
    for ids in ((0, 1, 2, 3), (0, 1), (0, 1), (0, 1), (0, 1)):
        model(features(*ids)).backward()
        _, scores, removed = incremental_dump(model, scores, removed=True)  # type: ignore[misc]
        gone = {name: sorted(one.tolist()) for name, one in next(iter(removed.values())).items()}
        log.append((gone, {name: len(one) for name, one in dynamic_tables(model).items()}))
    return log


@pytest.mark.parametrize("bags", [False, True])
def test_rows_unused_for_a_number_of_steps_leave_every_rank(ranks: Ranks, bags: bool) -> None:
    logs = ranks.run(2, expiring, bags=bags)
    for log in logs:
        removals = [gone for gone, _ in log]
        assert removals == [{"users": [], "goods": []}] * 3 + [
            {"users": [2, 3], "goods": [2, 3]},  # of both ranks
            {"users": [], "goods": []},
        ]
        assert [sizes["users"] for _, sizes in log] == [2, 2, 2, 1, 1]
