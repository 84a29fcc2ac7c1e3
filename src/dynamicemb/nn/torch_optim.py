"""``torch.optim`` optimizers update dynamic rows: hooks around every optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dynamicemb.errors import InvalidArgumentError, UsageError
from dynamicemb.nn.module import DynamicModule, owner_of
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind

_L2, _DECOUPLED = 1, 2


def _refuse(group: dict[str, Any], name: str) -> None:
    if group.get(name):
        raise InvalidArgumentError(
            f"{name} is {group[name]!r}; allowed for dynamic rows: {name} not set"
        )


def _shared(group: dict[str, Any]) -> dict[str, Any]:
    _refuse(group, "differentiable")
    return {
        "learning_rate": float(group["lr"]),
        "maximize": bool(group.get("maximize", False)),
        "weight_decay": float(group.get("weight_decay", 0.0)),
    }


def _sgd(group: dict[str, Any]) -> Optimizer:
    numbers = _shared(group)
    if group["momentum"] == 0:
        return Optimizer(OptimizerKind.SGD, OptimizerArgs(**numbers))
    numbers.update(
        momentum=group["momentum"], dampening=group["dampening"], nesterov=group["nesterov"]
    )
    return Optimizer(OptimizerKind.MOMENTUM, OptimizerArgs(**numbers))


def _adam(group: dict[str, Any]) -> Optimizer:
    _refuse(group, "amsgrad")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decoupled = group.get("decoupled_weight_decay", False)
    args = OptimizerArgs(
        **_shared(group),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay_mode=_DECOUPLED if decoupled else _L2,
    )
    return Optimizer(OptimizerKind.ADAM, args)


def _adamw(group: dict[str, Any]) -> Optimizer:
    return _adam({**group, "decoupled_weight_decay": True})


def _adagrad(group: dict[str, Any]) -> Optimizer:
    args = OptimizerArgs(
        **_shared(group),
        eps=group["eps"],
        lr_decay=group["lr_decay"],
        initial_accumulator_value=group["initial_accumulator_value"],
    )
    return Optimizer(OptimizerKind.ADAGRAD, args)


Translation = Callable[[dict[str, Any]], Optimizer]

_TRANSLATIONS: dict[type[torch.optim.Optimizer], Translation] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
}


def register(kind: type[torch.optim.Optimizer], translation: Translation) -> None:
    """Let optimizers of this class update dynamic rows: ``translation`` makes ours of a param group
    of it."""
    _TRANSLATIONS[kind] = translation


def translation_of(kind: type[torch.optim.Optimizer]) -> Translation:
    """The function that translates param groups of a class of optimizers to our optimizer. Raises
    a ``UsageError`` if there is none."""
    translation = _TRANSLATIONS.get(kind)
    if translation is None:
        known = ", ".join(dict.fromkeys(one.__name__ for one in _TRANSLATIONS))
        raise UsageError(
            f"torch.optim class {kind.__name__} cannot update the rows of a dynamic "
            f"embedding; allowed: {known}, or a fused optimizer (optimizer=EmbOptimType...)"
        )
    return translation


def translate(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Optimizer:
    """Our optimizer for a param group of ``optimizer``. Raises a ``UsageError`` if its class has no
    translation."""
    return translation_of(type(optimizer))(group)


def _rows_of(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Any, DynamicModule]]:
    """(param group, handle, module) of every dynamic module among the parameters."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            module = owner_of(parameter)
            if module is not None:
                found.append((group, parameter, module))
    return found


_hidden: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Any, torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """``args`` begins with the optimizer itself."""
    rows = _rows_of(optimizer)
    if not rows:
        return None
    steps = [(module, translate(optimizer, group)) for group, _, module in rows if not module.fused]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _update(optimizer, rows, steps)
        return None

    def closure_and_rows() -> Any:
        # Its backward comes inside the step, which may change gradients as soon as it has them. A
        # line search puts parameters back to what they were before it.
        _hold(rows, held=True)
        try:
            loss = closure()
        finally:
            _hold(rows, held=False)
        _update(optimizer, rows, steps)
        return loss

    if len(args) > 1:
        return (args[0], closure_and_rows, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_rows}


def _hold(rows: list[tuple[dict[str, Any], Any, DynamicModule]], *, held: bool) -> None:
    for _, _, module in rows:
        module.hold_handle(held)


def _update(
    optimizer: torch.optim.Optimizer,
    rows: list[tuple[dict[str, Any], Any, DynamicModule]],
    steps: list[tuple[DynamicModule, Optimizer]],
) -> None:
    for module, step in steps:  # all, before the first is updated
        module.prepare_torch_step(step)
    for module, _ in steps:
        module.apply_torch_step()
    # The handle is not a weight: the optimizer must not see that it has a gradient.
    hidden = [(handle, handle.grad) for _, handle, _ in rows if handle.grad is not None]
    for handle, _ in hidden:
        handle.grad = None
    if hidden:
        _hidden[optimizer] = hidden


def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for handle, gradient in _hidden.pop(optimizer, []):
        handle.grad = gradient


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
