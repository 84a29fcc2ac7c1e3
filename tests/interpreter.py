"""The GPU's kernels without a GPU: Triton's interpreter on CPU tensors.

TRITON_INTERPRET=1 must be set before this is imported.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

assert os.environ.get("TRITON_INTERPRET") == "1"

from triton.runtime import interpreter  # noqa: E402

from dynamicemb.options import DynamicEmbTableOptions  # noqa: E402
from dynamicemb.table import Table, create  # noqa: E402
from dynamicemb.table.cuda import CudaTable  # noqa: E402


def fused(x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32 with one rounding, as a GPU does it: the product is exact in float64,
    and the sum is rounded to odd there, so that rounding it to float32 rounds once."""
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = z.astype(np.float64)
    with np.errstate(all="ignore"):
        total = product + addend
        shadow = total - product
        error = (product - (total - shadow)) + (addend - shadow)
        bits = total.view(np.int64)
        even = (bits & 1) == 0
        away = (error > 0) == (total > 0)
        odd = np.where(away, bits + 1, bits - 1)
        inexact = np.isfinite(total) & (error != 0) & even & (total != 0)
        return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    return interpreter.TensorHandle(fused(x.data, y.data, z.data), x.dtype.scalar)


interpreter.InterpreterBuilder.create_fma = _create_fma  # the original rounds twice


def new_table(options: DynamicEmbTableOptions, **settings: Any) -> CudaTable:
    """A table of the GPU's kernels on CPU tensors."""
    return CudaTable(options, **settings, device="cpu")


def use_for_all_tables() -> None:
    """From now on `create_table` makes such tables."""

    def make(
        device: torch.device, options: DynamicEmbTableOptions, settings: dict[str, Any]
    ) -> Table:
        return new_table(options, **settings)

    create._new_table = make
