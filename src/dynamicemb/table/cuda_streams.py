"""Who works on the tables of a group, and on which stream."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.errors import OutOfMemoryError

if TYPE_CHECKING:
    from dynamicemb.table.cuda import CudaTable
    from dynamicemb.table.cuda_layout import Layout


def current_stream(device: torch.device) -> int | None:
    """The address of the device's current stream; ``None`` for the CPU."""
    if device.type != "cuda":
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def record(tensors: Iterable[torch.Tensor]) -> None:
    """The current stream uses tensors that another one may have made: their memory, once given
    back, must not be used again before its work is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Entrance:
    """While it is entered, the tables are locked and in order with the current stream, their device
    is the current one, and their layout is as they are now. The thread that is inside may enter
    again. Where torch has no more memory, the error that leaves it is the library's."""

    def __init__(self, tables: Sequence[CudaTable], layout: Layout) -> None:
        self._tables, self._layout = tables, layout
        locks = [table.lock for table in sorted(tables, key=id)]
        self._acquire = [lock.acquire for lock in locks]
        self._release = [lock.release for lock in locks]
        self._cuda = layout.device.type == "cuda"
        self._thread = self._depth = 0
        self._device_before = -1

    def __enter__(self) -> Layout:
        thread = threading.get_ident()
        if self._thread == thread:
            self._depth += 1
            return self._layout
        for acquire in self._acquire:
            acquire()
        self._thread, self._depth = thread, 1
        try:
            if self._cuda:
                self._order_streams()
            self._layout.refresh()
        except BaseException:
            self.__exit__()
            raise
        return self._layout

    def _order_streams(self) -> None:
        index = self._layout.device.index
        device = torch._C._cuda_getDevice()
        if device != index:
            self._device_before = device
            torch.cuda.set_device(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        for table in self._tables:
            if table.stream != stream:
                table.enter()
        if self._layout.stream != stream and not torch.cuda.is_current_stream_capturing():
            self._layout.used_on(stream)

    def __exit__(
        self, kind: Any = None, error: BaseException | None = None, trace: Any = None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._thread = 0
        if self._device_before >= 0:
            before, self._device_before = self._device_before, -1
            torch.cuda.set_device(before)
        for release in self._release:
            release()
        if isinstance(error, torch.cuda.OutOfMemoryError):
            names = ", ".join(repr(table.name) for table in self._tables)
            raise OutOfMemoryError(f"table {names}: {error}") from error
