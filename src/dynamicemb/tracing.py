"""Refusing what only records torch's operations: the engine's are not among them."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch._C import (
    DispatchKey,
    _are_functorch_transforms_active,
    _dispatch_tls_is_dispatch_key_included,
    _get_dispatch_mode,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import peek_interpreter_stack

from dynamicemb.errors import UsageError, wrong_type

_MODES = {
    _TorchDispatchModeKey.PROXY: "make_fx",
    _TorchDispatchModeKey.FUNCTIONAL: "functionalization",
    _TorchDispatchModeKey.FAKE: "FakeTensorMode",
}
_PRE_DISPATCH = DispatchKey.PreDispatch


def refuse_tracers() -> None:
    """Raise a ``UsageError`` if torch is recording or transforming the operations that run now. A
    graph would lack the rows, and the tensors inside have no memory of their own."""
    if _is_tracing():
        refuse("torch.jit.trace")
    if _len_torch_dispatch_stack():
        for key, name in _MODES.items():
            if _get_dispatch_mode(key) is not None:
                refuse(name)
    # Tracing before dispatch has a function mode, and asking for it is fast.
    if _len_torch_function_stack() and _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH):
        refuse("make_fx(pre_dispatch=True)")
    if _are_functorch_transforms_active():
        refuse(f"torch.func ({peek_interpreter_stack().key().name})")


def refuse(tracer: str) -> NoReturn:
    """Raise a ``UsageError`` that names ``tracer`` and the alternatives."""
    raise UsageError(
        f"{tracer} cannot record the lookup of a dynamic embedding: its rows are not part of a "
        "graph; allowed: torch.compile, which runs in this process; or export the rest of the "
        "model with the looked-up rows as its input, and read the rows of a checkpoint with "
        "dynamicemb.serving.ServingTable"
    )


def check_tensor(name: str, value: object, allowed: str) -> torch.Tensor:
    """``value`` if it is a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, torch.fx.Proxy):
        refuse("torch.fx.symbolic_trace")
    raise wrong_type(name, value, allowed)


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` has memory that can be read. Distributed and fake tensors may have
    none."""
    if not torch.compiler.is_compiling() and torch._is_functional_tensor(tensor):
        refuse("functionalization")
    if type(tensor) is torch.Tensor or tensor.numel() == 0:
        return
    if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.data_ptr() == 0:
        raise wrong_type(name, type(tensor).__name__, "a tensor with memory of its own")
