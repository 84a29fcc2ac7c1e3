"""The numbers of an optimizer step, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynamicemb.kernels.layout import STEP_NAMES, STEP_NUMBERS
from dynamicemb.optimizers import args_changes
from dynamicemb.table.cuda_workspace import Numbers

if TYPE_CHECKING:
    from dynamicemb.table.cuda import CudaTable


class StepNumbers(Numbers):
    """Of the present iteration of every table, by their bits. Written only where they change: the
    host is asked for them in every backward."""

    def __init__(self, owners: Sequence[CudaTable], device: torch.device) -> None:
        super().__init__(STEP_NUMBERS, len(owners), torch.int32, device)
        self._owners = owners
        self._known = (-1, 0)
        self._alike = self._steady = self._settled = False

    def current(self, version: int) -> torch.Tensor:
        """The tensor on the device. ``version``: of the tables' layout."""
        owners = self._owners
        if self._known != (version, args_changes()):
            self._known = version, args_changes()
            kinds = [(one.optimizer, one.dtype) for one in owners]
            self._alike = all(one == kinds[0] for one in kinds)
            self._steady = not any(map(_varies, owners))
            self._settled = False
        iterations = [table.iteration for table in owners]
        if self._settled and min(iterations) > 1:
            return self.device_tensor
        if self._alike and iterations.count(iterations[0]) == len(owners):
            owners = owners[:1]  # stands for all
        self.keep(np.stack([_column(table) for table in owners], axis=1))
        self._settled = self._steady and min(iterations) > 1
        return self.device_tensor


def _varies(table: CudaTable) -> bool:
    """Whether a table's numbers change from iteration to iteration, after the first."""
    return table.optimizer.varies or table.dtype is not torch.float32


def _column(table: CudaTable) -> np.ndarray[Any, Any]:
    numbers = table.optimizer.numbers(max(table.iteration, 1))
    column = np.array([*[numbers[name] for name in STEP_NAMES], 0], dtype=np.float32)
    column = column.view(np.int32)
    if table.dtype is not torch.float32:  # the step is for rounding at random
        column[-1] = numbers["step"]
    return column
