"""Tables that stay full, in the hands of everything that writes scores: what leaves is what leaves
on the CPU, and the queues of buckets hold what ``kernels/queues.py`` promises."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from dynamicemb.kernels.queues import LONGEST, QUEUE
from dynamicemb.options import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.table import Table
from dynamicemb.table.cuda import CudaTable
from tables import Clock, contents

MakeTable = Callable[..., Table]
WIDTHS = (16, 32, 48, 64, 128)
_STRATEGIES = (
    DynamicEmbScoreStrategy.TIMESTAMP,
    DynamicEmbScoreStrategy.STEP,
    DynamicEmbScoreStrategy.CUSTOMIZED,
)


def live(makes: tuple[MakeTable, MakeTable], seed: int, steps: int) -> int:
    """Two tables through the same calls; returns how many rows left by a queue."""
    random_ = random.Random(seed)
    width = WIDTHS[seed % len(WIDTHS)]
    strategy = _STRATEGIES[seed // len(WIDTHS) % len(_STRATEGIES)]
    options = DynamicEmbTableOptions(
        dim=2, max_capacity=2 * width, bucket_capacity=width, score_strategy=strategy
    )
    clocks = [Clock(100), Clock(100)]
    tables = [make(options, seed=3, clock=clock) for make, clock in zip(makes, clocks, strict=True)]
    pool = range(-5, 4 * width)
    score, served = 1000, 0
    for step in range(steps):
        far = 2**57 if score < 2**62 else 1  # scores stay in a tensor of int64
        score += random_.choice((1, 1, 1, 1, 7, 7, far, -5, 0))
        for table, clock in zip(tables, clocks, strict=True):
            clock.time = score
            if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
                table.set_score(score)
        # A few ids at a time, so that queues last for several batches.
        ids = random_.sample(pool, 2 * width if step < 3 else random_.randrange(1, 9))
        if random_.random() < 0.3:
            ids += random_.choices(ids, k=3)
        given = [random_.randrange(1, score + 5) for _ in ids]
        action = "train" if step < 3 else random_.choices(ACTIONS, WEIGHTS)[0]
        before = _ready(tables[1])
        results = [_do(table, action, ids, given, score) for table in tables]
        assert results[0] == results[1], f"seed {seed}, step {step}, {action} {ids}: {results}"
        if action == "train":
            served += len(before & set(results[1]))
        rows = [contents(table) for table in tables]
        for name in ("ids", "scores", "embeddings"):
            a, b = (getattr(one, name).cpu() for one in rows)
            assert torch.equal(a, b), f"seed {seed}, step {step}, {action} {ids}: {name}"
        _ready(tables[1])
    return served


def lowered(make: MakeTable, how: str) -> list[int]:
    """The ids that leave a full bucket, one newcomer at a time. Before the third, the score of id
    31, which came last and is in no queue, becomes the lowest."""
    options = DynamicEmbTableOptions(
        dim=2,
        max_capacity=32,
        bucket_capacity=32,
        score_strategy=DynamicEmbScoreStrategy.CUSTOMIZED,
    )
    table = make(options, seed=3)

    def train(score: int, *ids: int) -> list[int]:
        table.set_score(score)
        left: list[int] = _do(table, "train", list(ids), list(ids), score)
        return left

    for first in range(0, 32, 8):
        train(10 + first, *range(first, first + 8))
    left = train(100, 100) + train(101, 101)
    if how == "train":
        train(5, 31)
    else:
        _do(table, how, [31], [5], 0)
    return left + train(102, 102) + train(103, 103)


ACTIONS = ("train", "insert", "assign", "erase", "expire", "clear")
WEIGHTS = (60, 2, 2, 2, 1, 0.2)


def _do(table: Table, action: str, ids: list[int], given: list[int], score: int) -> Any:
    """Ids that left, or what the call returns."""
    here = torch.tensor(ids, device=table.device)
    scores = torch.tensor(given, device=table.device)
    rows = torch.zeros(len(ids), 2, device=table.device)
    if action == "train":
        evicted = table.find_or_insert(here, return_evicted=True).evicted
        assert evicted is not None
        return evicted.ids.tolist()
    if action == "insert":
        evicted = table.insert(here, rows, scores=scores, return_evicted=True).evicted
        assert evicted is not None
        return evicted.ids.tolist()
    if action == "assign":
        return table.assign(here, rows, scores=scores).tolist()
    if action == "erase":
        return table.erase(here).tolist()
    if action == "expire":
        return table.expire(score - 40, slots=table.capacity // 2)
    table.clear()
    return None


def _ready(table: Table) -> set[int]:
    """The ids that the queues of full buckets would let go next. They are those with the lowest
    (score, slot) of their buckets, in that order."""
    assert isinstance(table, CudaTable)
    assert table.queues is not None
    width, ready = table.bucket_capacity, set()
    keys, digests = table.keys.tolist(), table.digests.tolist()
    scores = [one % 2**64 for one in table.scores.tolist()]
    queues = table.queues.cpu().view(-1, QUEUE.value)
    for bucket, queue in enumerate(queues):
        limit = int(queue[:8].view(torch.int64)) % 2**64
        slots = range(bucket * width, bucket * width + width)
        if limit == 0 or not all(digests[slot] for slot in slots):
            continue
        positions = queue[8:].tolist()
        places = positions[positions[LONGEST.value] : min(LONGEST.value, width - 1)]
        unused = [slots[p] for p in places if scores[slots[p]] <= limit]
        lowest = sorted(slots, key=lambda slot: (scores[slot], slot))
        assert unused == lowest[: len(unused)], f"bucket {bucket}: {queue.tolist()}"
        ready |= {keys[slot] for slot in unused}
    return ready
