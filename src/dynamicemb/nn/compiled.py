"""The lookup as a custom operator, so that ``torch.compile`` keeps it in one graph.

A compiled graph holds the number of a module and, between forward and backward, the number of a
lookup. Eager code does not come here.
"""

from __future__ import annotations

from typing import Any

import torch

from dynamicemb.nn.module import module_of


@torch.library.custom_op("dynamicemb::lookup", mutates_args=())
def lookup(
    handle: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    module: int,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, number of the lookup)."""
    target = module_of(module)
    out, found = target.compute(target.plan(ids, offsets, weights))
    number = -1 if found is None else target.park(found)
    return out, torch.tensor([number], device="cpu")  # read by the host


@lookup.register_fake
def _(
    handle: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    module: int,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    target = module_of(module)
    if target.pooled and offsets is not None:
        bags = (offsets.shape[0] - 1) // sum(target.features)
        shape = (bags, target.output_columns)
    else:
        shape = (ids.shape[0], target.tables[0].dim)
    out = ids.new_empty(shape, dtype=target.output_dtype)
    return out, torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.custom_op("dynamicemb::lookup_backward", mutates_args=())
def lookup_backward(
    gradient: torch.Tensor,
    number: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    module: int,
    row_gradient: bool,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the handle, gradient of the weights or an empty tensor)."""
    target = module_of(module)
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
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    module: int,
    row_gradient: bool,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    count = ids.shape[0] if weight_gradient else 0
    return (
        gradient.new_empty((1,), dtype=torch.float32),
        gradient.new_empty((count,), dtype=torch.float32),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, ids, offsets, weights, module, _ = inputs
    ctx.save_for_backward(output[1], ids, offsets, weights)
    ctx.module = module


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    number, ids, offsets, weights = ctx.saved_tensors
    rows = ctx.needs_input_grad[0]
    wanted = weights is not None and ctx.needs_input_grad[3]
    of_handle, of_weights = torch.ops.dynamicemb.lookup_backward(
        gradient.contiguous(), number, ids, offsets, weights, ctx.module, rows, wanted
    )
    return of_handle if rows else None, None, None, of_weights if wanted else None, None, None


lookup.register_autograd(_backward, setup_context=_setup)
