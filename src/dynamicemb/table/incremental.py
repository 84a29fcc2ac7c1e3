"""Score thresholds of incremental dumps, and the moments at which they were handed out.

A score says when a row was looked up. Its update may come later: after a dump that lay between
forward and backward, the row's score is below the next threshold although it changed since. And the
clocks of two ranks differ. So a threshold that was handed out is remembered with a mark of the
table (:meth:`Table.mark_changes`), and stands for the moment as well as for the score.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import torch

from dynamicemb.errors import UsageError, check_integer
from dynamicemb.options import DynamicEmbScoreStrategy
from dynamicemb.table.base import Table
from dynamicemb.table.rows import Rows

#: Thresholds of a table that are remembered; the smallest are forgotten first.
MAX_THRESHOLDS = 1024

# Per table: (score, mark), in the order of the scores.
_handed_out: weakref.WeakKeyDictionary[Table, list[tuple[int, int]]] = weakref.WeakKeyDictionary()


def scores_are_time(table: Table) -> bool:
    """Whether later batches have larger scores, so that a score stands for a moment."""
    strategy = table.options.score_strategy
    return isinstance(strategy, tuple) or strategy in (
        DynamicEmbScoreStrategy.TIMESTAMP,
        DynamicEmbScoreStrategy.STEP,
    )


def hand_out(table: Table, score: int, mark: int) -> None:
    """Remember that ``score`` stands for the moment ``mark``."""
    known = _handed_out.setdefault(table, [])
    at = bisect_left(known, (score, 0))
    if at < len(known) and known[at][0] == score:
        # The same score twice. As a time: the earlier moment, so that nothing is lost. Else scores
        # repeat for ever, and the later moment is what the caller means.
        if not scores_are_time(table):
            known[at] = (score, mark)
        return
    known.insert(at, (score, mark))
    if len(known) > MAX_THRESHOLDS:
        del known[0]


def rows_since(table: Table, threshold: int, *, batch_size: int = 65536) -> Iterator[Rows]:
    """The rows whose score is at least ``threshold``; where scores are a time, also those that
    changed since it was handed out."""
    threshold = check_threshold(threshold)
    mark = None
    if scores_are_time(table):
        known = _handed_out.get(table, [])
        at = bisect_left(known, (threshold, 0))
        mark = known[at][1] if at < len(known) else None
    return table.export(batch_size=batch_size, score_threshold=threshold, changed_since=mark)


def removed_since(table: Table, threshold: int) -> torch.Tensor:
    """int64 [n]: the ids that left since ``threshold``, or the one before it, was handed out, and
    are not stored now. UsageError if they are not known."""
    threshold = check_threshold(threshold)
    known = _handed_out.get(table, [])
    at = bisect_right(known, (threshold, 2**64))
    if at == 0 or not table.logs_removals:
        raise UsageError(
            f"which ids left table {table.name!r} since score {threshold} is not known: call "
            "track_removals before, and give a threshold that it, get_score or incremental_dump "
            "returned"
        )
    return table.removed_since(known[at - 1][1])


def check_threshold(threshold: object) -> int:
    """``threshold`` if it is a score."""
    return check_integer("score_threshold", threshold, minimum=0, maximum=2**64 - 1)
