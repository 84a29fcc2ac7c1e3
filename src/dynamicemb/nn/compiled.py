"""The lookup as a custom operator, so that ``torch.compile`` keeps it in one graph.

A graph takes the key of its module as an input, which torch reads from the module when the graph
runs: a graph is never bound to a module, and is the same in every process. Between forward and
backward it holds the number of a lookup. Eager code does not come here.
"""

from __future__ import annotations

from typing import Any

import torch

from dynamicemb.nn.module import module_of


@torch.library.custom_op("dynamicemb::lookup", mutates_args=())
def lookup(
    handle: torch.Tensor,
    key: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    features: int,
    columns: int,
    dtype: torch.dtype,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, number of the lookup). ``features``: of the bags; 0 if rows are not pooled."""
    target = module_of(key)
    out, found = target.compute(target.plan(ids, offsets, weights), learns)
    return out, torch.tensor([target.park(found)], device="cpu")  # read by the host


@lookup.register_fake
def _(
    handle: torch.Tensor,
    key: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    features: int,
    columns: int,
    dtype: torch.dtype,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = ids.shape[0]
    if features and offsets is not None:
        rows = (offsets.shape[0] - 1) // features
    out = ids.new_empty((rows, columns), dtype=dtype)
    return out, torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.custom_op("dynamicemb::lookup_backward", mutates_args=())
def lookup_backward(
    gradient: torch.Tensor,
    number: torch.Tensor,
    key: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    row_gradient: bool,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the handle, gradient of the weights or an empty tensor)."""
    target = module_of(key)
    plan = target.plan(ids, offsets, weights)
    found = target.unpark(int(number.item()))
    of_weights = target.propagate(plan, found, gradient, rows=row_gradient, weights=weight_gradient)
    if of_weights is None:
        of_weights = torch.empty(0, device=gradient.device)
    value = 0.0 if target.fused else 1.0
    return torch.full((1,), value, device=gradient.device), of_weights


@lookup_backward.register_fake
def _(
    gradient: torch.Tensor,
    number: torch.Tensor,
    key: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    row_gradient: bool,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    count = ids.shape[0] if weight_gradient else 0
    return (
        gradient.new_empty((1,), dtype=torch.float32),
        gradient.new_empty((count,), dtype=torch.float32),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, key, ids, offsets, weights, *_ = inputs
    ctx.save_for_backward(output[1], key, ids, offsets, weights)


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    number, key, ids, offsets, weights = ctx.saved_tensors
    rows = ctx.needs_input_grad[0]
    wanted = weights is not None and ctx.needs_input_grad[4]
    of_handle, of_weights = torch.ops.dynamicemb.lookup_backward(
        gradient.contiguous(), number, key, ids, offsets, weights, rows, wanted
    )
    return (
        of_handle if rows else None,
        *(None, None, None),
        of_weights if wanted else None,
        *(None, None, None, None),
    )


lookup.register_autograd(_backward, setup_context=_setup)
