"""Memory that batches work in, used again from batch to batch, and small numbers for the device."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from dynamicemb.kernels import dedup
from dynamicemb.kernels.gradients import HOT, SUM_BLOCK
from dynamicemb.kernels.launch import launch, power_of_two
from dynamicemb.table.cuda_streams import record

#: Words of ``work`` before those of the classes of tables; each count has 16 bytes to itself.
COUNT, NEW, HOT_PARTS, CLASSES = 0, 4, 8, 12
#: Programs at most that number the entries of a batch.
NUMBERING_PROGRAMS = 2048
#: Numbers that one program copies.
COPIED = 1024
#: Idle workspaces that a group keeps: one per lookup in flight, some for prefetching.
KEPT = 3


class Workspace:
    """Arrays of one batch of at most ``capacity`` ids over ``tables`` tables."""

    def __init__(self, capacity: int, tables: int, device: torch.device) -> None:
        self.capacity = capacity
        self.cells = power_of_two(2 * max(capacity, 1))

        def new(dtype: torch.dtype, count: int = capacity) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        int32, int64 = torch.int32, torch.int64
        self.words = CLASSES + 4 * tables
        self.work = new(int32, self.words)
        self.count = self.work[COUNT : COUNT + 1]
        self.new_count = self.work[NEW:]
        self.hot_count = self.work[HOT_PARTS:]
        self.class_work = [self.work[CLASSES + 4 * k :] for k in range(tables)]
        # Distinct ids.
        self.space = new(int32, self.cells)
        self.cell_of = new(int32)
        self.is_first = new(torch.uint8)
        self.totals = new(int32, NUMBERING_PROGRAMS)
        self.ids = new(int64)
        self.first = new(int32)
        self.entry_of = new(int32)
        self.tables = self.ids if tables == 1 else new(int32)
        # Find and insert.
        self.found = new(int32)
        self.following = new(int32)
        self.choice = new(int32)
        self.slots = new(int32)
        self.fresh = new(torch.uint8)
        self.new = new(int32)
        self.free = new(int64, 2 * capacity)
        self.victims = new(int32)
        self.low = new(int32)
        # Occurrences of every entry.
        self.sorted = new(int32)
        self.order = new(int64)
        self.spans = new(int32, 2 * capacity)
        self.hot_base = new(int32)
        self.hot_entry = new(int32, hot_blocks(capacity))
        self._streams: set[int] = set()  # that use it besides the one that made it
        self._cut: Cut | None = None
        self.graph: Any = None  # of launches in this workspace; see cuda_replay
        self.cells_are_free = False  # those of the graph

    def set_graph(self, graph: Any) -> None:
        self.graph = graph
        self.cells_are_free = False
        self._streams.clear()

    def free_cells(self, ids: int) -> None:
        """Make the cells free that a batch of ``ids`` claims."""
        self.cut(ids).space.fill_(-1)

    def used_on(self, stream: int) -> None:
        """The current stream, ``stream``, may use what another one made."""
        if stream not in self._streams:
            self._streams.add(stream)
            record(one for one in vars(self).values() if isinstance(one, torch.Tensor))
            if self.graph is not None:
                record((self.graph.addresses, self.graph.bounds))

    def cut(self, ids: int) -> Cut:
        """The arrays that are seen by the host as well, for a batch of ``ids``."""
        if self._cut is None or self._cut.length != ids:
            self._cut = Cut(self, ids)
        return self._cut


class Cut:
    """Arrays of a workspace, as long as a batch."""

    def __init__(self, space: Workspace, ids: int) -> None:
        self.length = ids
        self.cells = min(power_of_two(2 * max(ids, 1)), space.cells)
        self.space = space.space[: self.cells]
        self.ids, self.tables = space.ids[:ids], space.tables[:ids]
        self.first, self.entry_of = space.first[:ids], space.entry_of[:ids]
        self.slots, self.fresh = space.slots[:ids], space.fresh[:ids]
        self.sorted, self.order = space.sorted[:ids], space.order[:ids]
        self.cell_of, self.spans = space.cell_of[:ids], space.spans[: 2 * ids]


def hot_blocks(ids: int) -> int:
    """How many blocks of occurrences there can be of ids that occur more than HOT times."""
    return ids // (HOT + 1) + ids // SUM_BLOCK + 1


class Workspaces:
    """The workspaces of a group. One that a batch gave back is written by the next batch, whose
    work is queued after that of the batch before."""

    def __init__(self, tables: int, device: torch.device) -> None:
        self._tables, self._device = tables, device
        self._idle: list[Workspace] = []
        self._all: weakref.WeakSet[Workspace] = weakref.WeakSet()

    def used_on(self, stream: int) -> None:
        """The current stream, ``stream``, may use all of them."""
        for one in list(self._all):
            one.used_on(stream)

    def take(self, ids: int, key: Any = None, *, plain: bool = False) -> Workspace:
        """A workspace for a batch of ``ids``; one with a graph of that key if there is one, or
        without a graph. ``plain``: none with a graph."""
        fitting = [one for one in self._idle if ids <= one.capacity <= 2 * ids + 4096]
        if plain:
            fitting = [one for one in fitting if one.graph is None]
        fitting.sort(key=lambda one: 1 if one.graph is None else 2 * (one.graph.key != key))
        for one in fitting:
            try:
                self._idle.remove(one)
                return one
            except ValueError:  # another thread took it
                continue
        made = Workspace(_rounded(ids), self._tables, self._device)
        self._all.add(made)
        return made

    def give_back(self, one: Workspace) -> None:
        self._idle.append(one)
        if len(self._idle) > KEPT:
            del self._idle[0]


def _rounded(ids: int) -> int:
    """An eighth more at most, so that batches of about the same size share a workspace."""
    step = max(power_of_two(ids) // 16, 256)
    return -(-ids // step) * step


class Numbers:
    """A few numbers per table on the device, written by the host without waiting.

    They go through pinned memory, a place of its own for each of the last ``ROUNDS`` writes, from
    where a kernel takes them. The tensor on the device is one and the same: kernels that read it
    are queued between writes.
    """

    ROUNDS = 128

    def __init__(self, rows: int, tables: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device_tensor = torch.zeros(rows, tables, dtype=dtype, device=device)
        self._device = device
        cuda = device.type == "cuda"
        used, aligned = rows * tables, 16 // dtype.itemsize
        room = -(-used // aligned) * aligned
        staging = torch.zeros(self.ROUNDS, room, dtype=dtype, device="cpu", pin_memory=cuda)
        places = list(staging[:, :used])
        self._arrays = [one.numpy().reshape(rows, tables) for one in places]
        if dtype is torch.int64:  # the bits of unsigned numbers
            self._arrays = [one.view(np.uint64) for one in self._arrays]
        self._places = [_words(one) for one in places]
        self.words = _words(self.device_tensor)  # what a kernel writes
        self.count = len(self.words)
        self._done: list[Any] = [None, None]  # when the copies of each half are
        self._next = 0
        self._last = b""

    def stage(self, values: Any) -> torch.Tensor:
        """``values`` (rows of numbers, one per table) in pinned memory, as int32. A kernel that
        copies them from there must be queued before the next call."""
        place = self._next
        half, first = divmod(place, self.ROUNDS // 2)
        if first == 0 and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()  # after the copies of the other half
            self._done[1 - half] = event
            if self._done[half] is not None:
                self._done[half].synchronize()  # long done: a hundred batches ago
        self._arrays[place][:] = values
        self._next = (place + 1) % self.ROUNDS
        return self._places[place]

    def write(self, values: Any) -> torch.Tensor:
        """Queue the copy of ``values`` on the current stream."""
        launch(
            dedup.numbers_kernel,
            1,
            (self.stage(values), self.words, self.count),
            (COPIED,),
            device=self._device,
        )
        return self.device_tensor

    def keep(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """:meth:`write`, unless these were kept last."""
        kept = values.tobytes()
        if kept != self._last:
            self._last = kept
            self.write(values)
        return self.device_tensor


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)
