"""Gradients that wait for an optimizer step."""

from __future__ import annotations

import math
import threading
import weakref

import torch

from dynamicemb.errors import UsageError
from dynamicemb.table import Lookup, Pooling, SummedGradients, TableGroup


class PendingGradients:
    """The gradients of the backwards since the last ``zero_grad``, summed per row.

    ``handle.grad`` stands for them in the world of dense parameters: one element, their norm. So
    ``zero_grad`` forgets them, ``clip_grad_norm_`` counts and scales them, and a ``GradScaler``
    sees an overflow and unscales them: what the element is multiplied by, they are multiplied by.
    """

    def __init__(self, group: TableGroup, handle: torch.Tensor) -> None:
        self._group = group
        self._handle = weakref.ref(handle)
        self._fresh: list[SummedGradients] = []  # of the backward that is running
        self._kept: SummedGradients | None = None
        self._thread = 0  # that it runs in
        self._norm = 0.0  # what handle.grad was set to
        accumulated = weakref.WeakMethod(self._accumulated)

        def hook(handle: torch.Tensor) -> None:
            method = accumulated()
            if method is not None:
                method(handle)

        frozen = not handle.requires_grad  # a copy may be; torch then takes no hook
        handle.requires_grad_(True).register_post_accumulate_grad_hook(hook)
        if frozen:
            handle.requires_grad_(False)

    def add(self, lookup: Lookup, pooling: Pooling, gradient: torch.Tensor) -> None:
        """A backward ran; its gradient of the handle is accumulated after this, unless it is an
        ``autograd.grad``, which keeps nothing."""
        thread = threading.get_ident()
        if not self._fresh:
            self._thread = thread
            self._rescale()  # before the running backward changes handle.grad
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._fresh.clear)
        elif thread != self._thread:
            raise UsageError(
                "backward through one module in two threads at once; allowed: one after the other, "
                "or a fused optimizer (optimizer=EmbOptimType...), which keeps no gradients"
            )
        self._fresh.append(self._group.reduce(lookup, pooling, gradient))

    def clear(self) -> None:
        self._kept = None

    def prepare(self) -> None:
        """Do the part of :meth:`apply` that a store can fail. It can be done again."""
        self._rescale()
        if self._kept is not None:
            self._group.prepare_update(self._kept)

    def apply(self) -> None:
        """Update the rows once. What is pending stays so until ``zero_grad``, as dense gradients
        do."""
        self._rescale()
        if self._kept is not None:
            self._group.update_summed(self._kept)

    def _rescale(self) -> None:
        """Do to the gradients what was done to ``handle.grad``."""
        handle = self._handle()
        if self._kept is None or handle is None:
            return
        if handle.grad is None:
            self.clear()
            return
        now = float(handle.grad)
        if now == self._norm or (math.isnan(now) and math.isnan(self._norm)):
            return
        if now == 0.0:
            self.clear()
            return
        scale = now / self._norm if self._norm else math.nan
        self._kept = [(ids, sums * scale) for ids, sums in self._kept]
        self._norm = now

    def _accumulated(self, handle: torch.Tensor) -> None:
        if handle.grad is None:  # a fused module's backward gives the handle none
            return
        parts = self._fresh.copy()
        self._fresh.clear()
        if self._kept is not None:
            parts.insert(0, self._kept)
        if not parts:
            return
        self._kept = parts[0] if len(parts) == 1 else self._group.merge(parts)
        norms = torch.stack([torch.linalg.vector_norm(sums) for _, sums in self._kept])
        with torch.no_grad():
            handle.grad.fill_(float(torch.linalg.vector_norm(norms)))
        self._norm = float(handle.grad)

    def __bool__(self) -> bool:
        self._rescale()
        return self._kept is not None
