"""Putting saved rows into a table that may be too small for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from dynamicemb.errors import InsertionError
from dynamicemb.options import DynamicEmbScoreStrategy
from dynamicemb.table import Rows, Table

ItemT = TypeVar("ItemT")

_SIGN = -(2**63)


class Filler:
    """Inserts rows in batches and counts those that lose their place.

    When a bucket is full, the rows with the highest scores stay, whatever order they come in: a
    table by itself would always let the last one in.

    each_once: no id comes that lost its place before, since the table is empty and every id is put
    once. Without, the ids without a place are kept until the end, 8 bytes each.
    """

    def __init__(self, table: Table, *, each_once: bool = False) -> None:
        self._table = table
        self._each_once = each_once
        self._lost = 0
        self._without_place: list[torch.Tensor] = []

    def lost(self) -> int:
        """The ids, of the rows put or of the table before, that have no place now."""
        if self._without_place:
            ids = torch.unique(torch.cat(self._without_place))
            self._without_place = [ids[~self._table.contains(ids)]]
            self._lost = len(self._without_place[0])
        return self._lost

    def put(self, rows: Rows, *, scored: bool) -> None:
        """Insert whole rows, on the table's device. ``scored``: they have scores of their own;
        else they get those of a training batch."""
        written, evicted = self._insert(rows, scored)
        if bool(written.all()) and (evicted is None or len(evicted) == 0):
            return
        gone = _last_of_each(_some(rows, ~written))
        if evicted is not None:
            gone = _joined(evicted, gone)
        keeps_all = self._table.options.score_strategy is DynamicEmbScoreStrategy.NO_EVICTION
        if scored and not keeps_all:
            gone = self._prefer_high_scores(_some(rows, written), gone)
        if self._each_once:
            self._lost += len(gone)
        else:
            self._without_place.append(gone.ids)

    def _insert(self, rows: Rows, scored: bool) -> tuple[torch.Tensor, Rows | None]:
        try:
            result = self._table.insert(
                rows.ids,
                rows.embeddings,
                state=rows.state,
                scores=rows.scores if scored else None,
                return_evicted=True,
            )
        except InsertionError as error:  # safe_check_mode; what could be inserted was
            return self._table.contains(rows.ids), error.evicted
        return result.written, result.evicted

    def _prefer_high_scores(self, rows: Rows, gone: Rows) -> Rows:
        """Of the rows that a batch wrote and those that are gone because of it, evicted or failed,
        let the highest scores have the places; the others.

        It is enough to look at these: what the batch did not touch and did not evict is not below
        what it evicted, and where a row failed, nothing untouched is left in the bucket.
        """
        table = self._table
        touched = torch.isin(table.bucket_of(rows.ids), table.bucket_of(gone.ids))
        here = _last_of_each(_some(rows, touched))
        both = _joined(here, gone)
        inside = torch.arange(len(both), device=both.ids.device) < len(here)
        bucket = table.bucket_of(both.ids)
        order = torch.argsort(_rank_key(both.scores), descending=True, stable=True)
        order = order[torch.argsort(bucket[order], stable=True)]
        _, which, size = torch.unique_consecutive(
            bucket[order], return_inverse=True, return_counts=True
        )
        place = torch.arange(len(order), device=order.device) - (size.cumsum(0) - size)[which]
        places = torch.zeros_like(size).index_add_(0, which, inside[order].long())
        stays = torch.empty_like(inside)
        stays[order] = place < places[which]
        leave, come = inside & ~stays, ~inside & stays
        if bool(leave.any()):
            table.erase(both.ids[leave])
            self._insert(_some(both, come), True)
        return _some(both, ~stays)


def _rank_key(scores: torch.Tensor) -> torch.Tensor:
    """Signed numbers in the order of the (unsigned) word that decides evictions."""
    return (scores if scores.dim() == 1 else scores[:, -1]) ^ _SIGN


def _some(rows: Rows, mask: torch.Tensor) -> Rows:
    return Rows(rows.ids[mask], rows.embeddings[mask], rows.state[mask], rows.scores[mask])


def _joined(one: Rows, two: Rows) -> Rows:
    return Rows(
        torch.cat([one.ids, two.ids]),
        torch.cat([one.embeddings, two.embeddings]),
        torch.cat([one.state, two.state]),
        torch.cat([one.scores, two.scores]),
    )


def _last_of_each(rows: Rows) -> Rows:
    """Of equal ids the last, as ``insert`` takes them."""
    ids, inverse = torch.unique(rows.ids, return_inverse=True)
    if len(ids) == len(rows):
        return rows
    last = torch.zeros_like(ids).scatter_reduce_(
        0, inverse, torch.arange(len(rows), device=ids.device), "amax", include_self=False
    )
    mask = torch.zeros(len(rows), dtype=torch.bool, device=ids.device)
    mask[last] = True
    return _some(rows, mask)


def read_ahead(items: Callable[[], Iterator[ItemT]]) -> Iterator[ItemT]:
    """The items, each made in another thread while the one before is in use."""
    done = object()
    with ThreadPoolExecutor(1, thread_name_prefix="dynamicemb-load") as reader:
        source = items()
        coming = reader.submit(next, source, done)
        try:
            while (item := coming.result()) is not done:
                coming = reader.submit(next, source, done)
                yield item  # type: ignore[misc]
        finally:
            coming.cancel()
            reader.submit(getattr(source, "close", lambda: None)).result()
