"""Rows that other ranks have: keys go to their owners, rows come back, gradients go again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dynamicemb.routing import Routing

#: Rows of keys that belong to this rank, with the numbers of their tables.
LookUp = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def look_up_everywhere(
    keys: torch.Tensor,
    numbers: torch.Tensor | None,
    *,
    routing: Routing,
    group: Any,
    average: bool,
    look_up: LookUp,
) -> torch.Tensor:
    """[n, dim]: the rows of ``keys``, from the ranks that own them. All ranks must call it.

    ``look_up`` runs on the owner, with the keys of all ranks in rank order. Gradients are summed
    per key on the rank that asked, then go to the owner, divided by the ranks if ``average``.
    """
    distinct, places = torch.unique(keys, return_inverse=True)
    owner = routing.owner(distinct)
    order = torch.argsort(owner, stable=True)
    message = [distinct]
    if numbers is not None:
        message.append(numbers[_first_places(places, len(distinct))])
    sent = torch.bincount(owner, minlength=routing.world_size)
    received, asked = exchange(torch.stack(message, 1)[order], sent, group)
    theirs = received[:, 1].contiguous() if numbers is not None else None
    rows = look_up(received[:, 0].contiguous(), theirs)
    scale = 1.0 / routing.world_size if average else 1.0
    back: torch.Tensor = _SendBack.apply(rows, asked, sent.tolist(), group, scale)
    at = torch.empty_like(order)
    at[order] = torch.arange(len(order), device=order.device)
    return F.embedding(at[places], back)


def exchange(rows: torch.Tensor, sent: torch.Tensor, group: Any) -> tuple[torch.Tensor, list[int]]:
    """Give each rank its part of ``rows`` (``sent``: how many, in rank order); what this rank is
    given, and how many by each."""
    counts = torch.empty_like(sent)
    dist.all_to_all_single(counts, sent, group=group)
    given = counts.tolist()
    return _all_to_all(rows, sent.tolist(), given, group), given


def _all_to_all(rows: torch.Tensor, sent: list[int], given: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty((sum(given), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), given, sent, group=group)
    return out


def _first_places(places: torch.Tensor, count: int) -> torch.Tensor:
    """Where each of ``count`` values occurs first in ``places``."""
    positions = torch.arange(len(places), device=places.device)
    first = positions.new_full((count,), len(places))
    return first.scatter_reduce_(0, places, positions, "amin")


class _SendBack(torch.autograd.Function):
    """Rows to the ranks that asked for them, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], given: list[int], group: Any, scale: float
    ) -> torch.Tensor:
        ctx.sent, ctx.given, ctx.group, ctx.scale = sent, given, group, scale
        return _all_to_all(rows, sent, given, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = _all_to_all(gradient, ctx.given, ctx.sent, ctx.group)
        return back if ctx.scale == 1.0 else back * ctx.scale, None, None, None, None
