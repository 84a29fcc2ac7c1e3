"""The tests of tables and modules on a GPU, unchanged: tensors and tables are made there."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class _SeededOnTheCpu(TorchFunctionMode):
    """Random tensors from a generator of the test, which is on the CPU, are moved to the GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = func in _device_constructors() and kwargs.get("generator") is not None
        if drawn and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": "cpu"}).to("cuda")
        return func(*args, **kwargs)


def use_for_everything() -> None:
    """From now on new tensors, tables and modules are on the GPU, unless a device is given."""
    torch.set_default_device("cuda")
    _SeededOnTheCpu().__enter__()
