"""Gradients that wait for an optimizer step."""

from __future__ import annotations

import weakref

import torch

from dynamicemb.table import Lookup, Pooling, SummedGradients, TableGroup

#: Backwards kept as they are before they are summed to one.
_MAX_PARTS = 4


class PendingGradients:
    """The gradients of the backwards since the last ``zero_grad``.

    ``handle.grad`` is an empty tensor that lives as dense gradients do: a backward makes it, or
    adds to it in place, and ``zero_grad`` removes or zeroes it. Its identity and version tell
    whether what was kept here still counts.
    """

    def __init__(self, group: TableGroup, handle: torch.Tensor) -> None:
        self._group = group
        self._handle = weakref.ref(handle)
        self._fresh: list[tuple[Lookup, Pooling, torch.Tensor]] = []
        self._kept: list[tuple[Lookup, Pooling, torch.Tensor]] = []
        self._summed: SummedGradients | None = None
        self._marker: tuple[weakref.ref[torch.Tensor], int] | None = None
        accumulated = weakref.WeakMethod(self._accumulated)

        def hook(handle: torch.Tensor) -> None:
            method = accumulated()
            if method is not None:
                method(handle)

        handle.register_post_accumulate_grad_hook(hook)

    def add(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        """A backward ran; its gradient of the handle is accumulated after this."""
        self._fresh.append((lookup, pooling, gradient))

    def clear(self) -> None:
        self._kept, self._summed, self._marker = [], None, None

    def __bool__(self) -> bool:
        handle = self._handle()
        return (
            handle is not None
            and self._marker is not None
            and handle.grad is self._marker[0]()
            and handle.grad is not None
            and handle.grad._version == self._marker[1]
        )

    def apply(self) -> None:
        """Update the rows once. What is pending stays so until ``zero_grad``, as dense gradients
        do."""
        if not self:
            self.clear()
            return
        if self._summed is None and len(self._kept) == 1:
            self._group.update(*self._kept[0])
            return
        self._sum_up()
        assert self._summed is not None
        self._group.update_summed(self._summed)

    def _accumulated(self, handle: torch.Tensor) -> None:
        assert handle.grad is not None
        marker = self._marker
        added = (
            marker is not None
            and handle.grad is marker[0]()
            and handle.grad._version == marker[1] + 1
        )
        if not added:  # zero_grad came between
            self.clear()
        self._kept.extend(self._fresh)
        self._fresh = []
        if len(self._kept) > _MAX_PARTS:
            self._sum_up()
        self._marker = (weakref.ref(handle.grad), handle.grad._version)

    def _sum_up(self) -> None:
        parts = [] if self._summed is None else [self._summed]
        parts.extend(self._group.reduce(*one) for one in self._kept)
        self._kept = []
        self._summed = parts[0] if len(parts) == 1 else self._group.merge(parts)
