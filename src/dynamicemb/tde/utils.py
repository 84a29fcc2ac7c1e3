"""Sharded collections inside a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def _get_sharded_modules_recursive(
    module: nn.Module, path: str, plan: Any
) -> dict[str, tuple[nn.Module, Any]]:
    """{path: (module, its plan)} of the modules of ``plan`` (a ShardingPlan) in ``module``, which
    is at ``path``."""
    params_plan = plan.get_plan_for_module(path)
    if params_plan:
        return {path: (module, params_plan)}
    found: dict[str, tuple[nn.Module, Any]] = {}
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        found.update(_get_sharded_modules_recursive(child, below, plan))
    return found
