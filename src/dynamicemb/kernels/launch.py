"""Starting kernels, with little host time."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from dynamicemb.errors import UsageError

try:
    import triton
except ImportError as error:  # pragma: no cover
    raise UsageError(
        "tables on a GPU need Triton, which is not installed; install it with: pip install triton"
    ) from error

#: Kernels run on CPU tensors, one program after the other: for tests without a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernel(function: Callable[..., None]) -> Any:
    """A Triton kernel. Its integers are plain 32-bit arguments: no recompilation for special
    values. Arguments that end in ``_ptr`` are addresses of 16-byte aligned tensors."""
    plain = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if "constexpr" not in str(parameter.annotation) and not name.endswith("_ptr")
    ]
    return triton.jit(function, do_not_specialize=plain)


class _Launcher:
    """Starts compiled kernels directly.

    Triton's own launch looks at every argument anew (about 20 us). Here the first launch of a
    kernel with given constants compiles it, and later ones go straight to the driver's launcher.
    That is an internal interface: where it is not as expected, Triton's own launch is used.

    So arguments must have the types of the first launch, and addresses be aligned; the interpreter
    sees to it.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}
        self._types: dict[Any, tuple[Any, ...]] = {}
        self._direct = not INTERPRETED

    def __call__(
        self,
        function: Any,
        programs: int,
        args: tuple[Any, ...],
        constants: tuple[Any, ...] = (),
        *,
        warps: int = 4,
        device: torch.device,
    ) -> None:
        """Start ``programs`` programs on the current stream. ``constants`` are the constexpr
        parameters, which come last; ``None`` stands for a pointer that is not used."""
        if programs == 0:
            return
        if self._direct:
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            key = (function.fn, constants, warps, device.index)
            known = self._compiled.get(key)
            if known is not None:
                start, before = known
                start(
                    programs,
                    1,
                    1,
                    stream,
                    *before,
                    # Addresses: the launcher would ask the driver about every tensor.
                    *[one if type(one) is int else one.data_ptr() for one in args],
                    *constants,
                )
                return
        if INTERPRETED:
            self._check(function, args, constants, warps)
        compiled = function[(programs,)](*args, *constants, num_warps=warps, enable_fp_fusion=False)
        if self._direct:
            try:
                self._compiled[key] = _direct_launch(compiled)
            except AttributeError:
                self._direct = False

    def _check(
        self, function: Any, args: tuple[Any, ...], constants: tuple[Any, ...], warps: int
    ) -> None:
        """That a kernel compiled for the first launch with these constants may start with these
        arguments."""
        name = function.fn.__name__
        types = tuple(one.dtype if isinstance(one, torch.Tensor) else type(one) for one in args)
        first = self._types.setdefault((function.fn, constants, warps), types)
        assert types == first, f"{name}: compiled for {first}, started with {types}"
        for parameter, one in zip(inspect.signature(function.fn).parameters, args, strict=False):
            if isinstance(one, torch.Tensor):
                assert one.data_ptr() % 16 == 0, f"{name}: {parameter} is not aligned"


def _direct_launch(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What starts a compiled kernel, and its arguments between the stream and the kernel's own."""
    compiled._init_handles()
    run = compiled.run
    hooks = (compiled.packed_metadata, None, None, None)
    if run.global_scratch_size or run.profile_scratch_size:
        return run, (compiled.function, *hooks)
    # No memory to be made for the kernel: past the wrapper that would do so.
    flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return run.launch, (compiled.function, *flags, *hooks)


launch = _Launcher()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy if it does not start at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def blocks(count: int, size: int) -> int:
    """Programs for ``count`` elements, ``size`` each."""
    return -(-count // size)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()
