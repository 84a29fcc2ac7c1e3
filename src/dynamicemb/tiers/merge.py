"""What two levels hold together, where the upper one's rows count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from dynamicemb.hashing import signed
from dynamicemb.table.rows import Found, Rows
from dynamicemb.tiers.base import Store


def fill_from(store: Store, ids: torch.Tensor, found: Found) -> None:
    """Fill what the upper level did not find of ``ids`` (also equal ones) with the store's rows."""
    missing = (~found.found).nonzero().squeeze(1)
    if not len(missing):
        return
    distinct, places = torch.unique(ids[missing], return_inverse=True)
    below = store.find(distinct.cpu())
    there = below.found.to(places.device)[places]
    to, source = missing[there], places[there].to(below.found.device)
    found.found[to] = True
    for name in ("embeddings", "state", "scores"):
        out = getattr(found, name)
        out[to] = getattr(below, name)[source].to(out.device)


def contains_below(store: Store, ids: torch.Tensor, found: torch.Tensor) -> None:
    """Set ``found`` where it is False and the store has the id."""
    missing = (~found).nonzero().squeeze(1)
    if len(missing):
        distinct, places = torch.unique(ids[missing], return_inverse=True)
        found[missing] = store.contains(distinct.cpu()).to(places.device)[places]


def export_below(
    store: Store,
    contained: Callable[[torch.Tensor], torch.Tensor],
    batch_size: int,
    threshold: int | None = None,
) -> Iterator[Rows]:
    """The store's rows whose ids the upper level does not contain, with a score (the timestamp of a
    pair) of at least ``threshold``."""
    for rows in store.export(batch_size=batch_size):
        wanted = ~contained(rows.ids)
        if threshold is not None:
            wanted &= reaches(rows.scores, threshold)
        if bool(wanted.any()):
            yield select(rows, wanted)


def reaches(scores: torch.Tensor, threshold: int) -> torch.Tensor:
    """bool [n]: which scores (the timestamps of pairs) are at least ``threshold``, as unsigned
    numbers."""
    words = scores if scores.dim() == 1 else scores[:, 0]
    return (words ^ -(2**63)) >= (signed(threshold) ^ -(2**63))


def select(rows: Rows, which: torch.Tensor | slice) -> Rows:
    """Some of the rows, by a mask, places, or a range."""
    return Rows(rows.ids[which], rows.embeddings[which], rows.state[which], rows.scores[which])


def first_of_each(ids: torch.Tensor) -> torch.Tensor:
    """bool [n]: the first occurrence of every distinct id."""
    order = torch.argsort(ids, stable=True)
    first = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    first[order[1:]] = ids[order[1:]] != ids[order[:-1]]
    return first


def last_of_each(ids: torch.Tensor) -> torch.Tensor:
    """bool [n]: the last occurrence of every distinct id."""
    return first_of_each(ids.flip(0)).flip(0)


def places(rows: Rows, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(where each id is among rows in ascending order of their ids, whether it is there)."""
    at = torch.searchsorted(rows.ids, ids).clamp_(max=len(rows) - 1)
    return at, rows.ids[at] == ids


def join(parts: Sequence[Rows]) -> Rows:
    """Several rows as one; empty ones may have any shape."""
    full = [rows for rows in parts if len(rows)] or [parts[-1]]
    if len(full) == 1:
        return full[0]
    return Rows(
        torch.cat([rows.ids for rows in full]),
        torch.cat([rows.embeddings for rows in full]),
        torch.cat([rows.state for rows in full]),
        torch.cat([rows.scores for rows in full]),
    )


def changed_below(
    store: Store,
    changed: torch.Tensor,
    above: Callable[[torch.Tensor], torch.Tensor],
    batch_size: int,
    threshold: int | None,
) -> Iterator[Rows]:
    """The store's rows of the ids ``changed``, and those that are not ``above`` with a score of at
    least ``threshold``."""
    for ids in changed.split(batch_size) if len(changed) else ():
        found = store.find(ids)
        rows = Rows(ids, found.embeddings, found.state, found.scores)
        if bool(found.found.any()):
            yield select(rows, found.found)
    if threshold is not None:
        for rows in export_below(store, above, batch_size, threshold):
            others = ~torch.isin(rows.ids, changed)
            if bool(others.any()):
                yield select(rows, others)
