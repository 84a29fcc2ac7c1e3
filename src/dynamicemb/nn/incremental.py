"""Incremental dumps of several tables, over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dynamicemb.errors import UsageError
from dynamicemb.options import BATCH_SIZE_PER_DUMP
from dynamicemb.table import Table
from dynamicemb.table.incremental import (
    check_threshold,
    hand_out,
    removed_since,
    rows_since,
)


@dataclass
class Increment:
    """By table name: rows (ids int64 [n], embeddings [n, dim]) on the host, the ids that were
    removed if they were asked for, and the next threshold."""

    rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    removed: dict[str, torch.Tensor] = field(default_factory=dict)
    scores: dict[str, int] = field(default_factory=dict)


def current_scores(tables: Mapping[str, Table], group: Any = None) -> dict[str, int]:
    """The scores of the next training batches, remembered as thresholds."""
    local = {name: (table.get_score(), table.mark_changes()) for name, table in tables.items()}
    everyone = _gather(local, group)
    scores = {}
    for name, table in tables.items():
        # Clocks of ranks differ: the largest, since each rank's mark knows what came after.
        scores[name] = max(rank[name][0] for rank in everyone)
        hand_out(table, scores[name], local[name][1])
    return scores


def collect_rows(
    table: Table,
    threshold: int | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    batch_size: int = BATCH_SIZE_PER_DUMP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and rows since ``threshold`` (``None``: all), in ``dtype`` (the table's)."""
    dtype = table.dtype if dtype is None else dtype
    ids = [torch.empty(0, dtype=torch.int64, device="cpu")]
    rows = [torch.empty(0, table.dim, dtype=dtype, device="cpu")]
    if threshold is None:
        parts = table.export(batch_size=batch_size)
    else:
        parts = rows_since(table, threshold, batch_size=batch_size)
    for part in parts:
        ids.append(part.ids.cpu())
        rows.append(part.embeddings.to("cpu", dtype))
    return torch.cat(ids).to(device), torch.cat(rows).to(device)


def dump_increment(
    tables: Mapping[str, Table],
    thresholds: Mapping[str, int],
    *,
    group: Any = None,
    removed: bool = False,
) -> Increment:
    """What changed in ``tables`` since their thresholds, on all ranks of ``group`` in rank order
    (``None``: here)."""
    for name in tables:
        check_threshold(thresholds[name])
    gone = _removed(tables, thresholds, group) if removed else {}
    # Before the rows: what another thread changes meanwhile comes again, and is not lost.
    scores = current_scores(tables, group)
    rows = {name: collect_rows(table, thresholds[name]) for name, table in tables.items()}
    parts = _gather((rows, gone), group)
    return Increment(
        rows={
            name: (
                torch.cat([rank_rows[name][0] for rank_rows, _ in parts]),
                torch.cat([rank_rows[name][1] for rank_rows, _ in parts]),
            )
            for name in tables
        },
        removed={name: torch.cat([rank_gone[name] for _, rank_gone in parts]) for name in gone},
        scores=scores,
    )


def _removed(
    tables: Mapping[str, Table], thresholds: Mapping[str, int], group: Any
) -> dict[str, torch.Tensor]:
    gone: dict[str, torch.Tensor] = {}
    problem = None
    try:
        gone = {name: removed_since(table, thresholds[name]) for name, table in tables.items()}
    except UsageError as error:  # the other ranks wait for an answer
        problem = error
    problems = _gather(None if problem is None else str(problem), group)
    if problem is not None:
        raise problem
    for rank, message in enumerate(problems):
        if message is not None:
            raise UsageError(f"rank {rank}: {message}")
    return gone


def _gather(value: Any, group: Any) -> list[Any]:
    if group is None:
        return [value]
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
