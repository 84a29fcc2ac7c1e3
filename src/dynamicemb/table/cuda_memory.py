"""The memory of a table on a GPU: index and rows, the streams that use them, growth."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

import torch

from dynamicemb.errors import OutOfMemoryError, check_integer
from dynamicemb.kernels.layout import COUNTER_NAMES
from dynamicemb.kernels.queues import QUEUE
from dynamicemb.optimizers import Optimizer
from dynamicemb.table.cuda_changes import Changes
from dynamicemb.table.cuda_streams import Entrance, current_stream, record
from dynamicemb.table.device_table import DeviceTable
from dynamicemb.table.numbers import has_batch_scores, strategy_number

_SIZE = COUNTER_NAMES.index("size")
#: Of rows that growth copies at a time.
COPIED_BYTES = 64 << 20


class CudaMemory(DeviceTable):
    """What :class:`CudaTable` keeps on its device. Rows take memory for all slots of the present
    capacity; while it grows, a table is in memory twice."""

    rowless: bool
    buckets: int
    _device: torch.device
    _max_buckets: int
    digests: torch.Tensor
    keys: torch.Tensor
    scores: torch.Tensor
    times: torch.Tensor | None
    touched: torch.Tensor
    heads: torch.Tensor
    queues: torch.Tensor | None
    rows: torch.Tensor
    state: torch.Tensor

    def _allocate(self) -> None:
        """An empty table."""
        self.lock = threading.RLock()
        self.layout_version = 0
        self.mark = 0  # of the running batch in ``touched``
        self.known_changes = Changes()
        self.changes = 0  # whatever may have moved a row: batches, erasures, growth
        self.stream = current_stream(self._device)  # where the last work is queued
        self._streams: set[int | None] = set()  # that are known to use the memory
        self._batch_scores = has_batch_scores(strategy_number(self.options))
        self.newest_score = -1  # no score in the table is above
        self._size_bound = 0  # rows at most, as far as the host knows
        self._pending_size: tuple[torch.Tensor, Any, int] | None = None
        try:
            self._set_index(self._index(self.buckets))
            self.rows, self.state = self._rows(self.buckets, self._optimizer)
            self.counters = self._zeros(len(COUNTER_NAMES), torch.int64)
            self.next_number = self._zeros(1, torch.int64)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemoryError(f"table {self.name!r}: {error}") from error

    def _zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)

    def _index(self, buckets: int) -> dict[str, torch.Tensor | None]:
        """An empty index: 18.3 bytes per slot of usual buckets, 8 more for the pair strategy."""
        slots, queues = buckets * self._width, buckets * QUEUE.value
        records = self._zeros(2 * slots, torch.int64).view(slots, 2)  # id and score of each slot
        return {
            "digests": self._zeros(slots, torch.uint8),
            "keys": records[:, 0],
            "scores": records[:, 1],
            "times": self._zeros(slots, torch.int64) if self.score_words == 2 else None,
            "touched": self._zeros(slots, torch.uint8),
            # For each bucket its newcomers, and where those are listed that it evicts.
            "heads": torch.full((2 * buckets,), -1, dtype=torch.int32, device=self._device),
            "queues": self._zeros(queues, torch.uint8) if self._batch_scores else None,
        }

    def _set_index(self, index: dict[str, torch.Tensor | None]) -> None:
        for name, tensor in index.items():
            setattr(self, name, tensor)
        self._streams = set()

    def _rows(self, buckets: int, optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for rows and for their optimizer states."""
        slots = 0 if self.rowless else buckets * self._width
        unit = 16 // self.dtype.itemsize
        stride = -(-self.dim // unit) * unit
        rows = torch.empty(slots, stride, dtype=self.dtype, device=self._device)
        return rows, self._states(slots, optimizer)

    def _states(self, slots: int, optimizer: Optimizer) -> torch.Tensor:
        columns = optimizer.state_dim(self.dim)
        stride = columns if columns < 2 else -(-columns // 4) * 4
        return torch.empty(slots, stride, dtype=torch.float32, device=self._device)

    def _forget_stamps(self, buckets: int) -> None:
        """Another number of slots, none of them changed since the last mark."""
        if self.known_changes.stamps is not None:
            self.known_changes.stamps = self._zeros(buckets * self._width, torch.int32)

    def _tensors(self) -> list[torch.Tensor]:
        """All memory that grows with the capacity."""
        some = (
            self.digests, self.keys, self.scores, self.times, self.touched, self.heads,
            self.queues, self.known_changes.stamps, self.rows, self.state,
        )  # fmt: skip
        return [tensor for tensor in some if tensor is not None]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def capacity(self) -> int:
        return self.buckets * self._width

    @property
    @abstractmethod
    def entered(self) -> Entrance:
        """What all work on the table is done in; see :class:`Entrance`."""

    def size(self) -> int:
        with self.entered:
            return int(self.counters[_SIZE])

    def moved(self) -> None:
        """The table's tensors were replaced, or its numbers changed."""
        self.layout_version += 1

    def start_batch(self, score: int) -> bool:
        """A batch starts that has ``score`` and another ``mark``. Returns whether it writes the
        score to all its rows, and it is above all others."""
        self.mark += 1
        if self.mark == 256:
            self.touched.zero_()
            self.mark = 1
        if score <= self.newest_score:
            return False
        self.newest_score = score
        return self._batch_scores

    def enter(self) -> None:
        """Called before work on the table: order it after work on another stream."""
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            current = current_stream(self._device)
            if self.stream != current:
                before = torch.cuda.ExternalStream(self.stream, device=self._device)
                torch.cuda.current_stream(self._device).wait_stream(before)
                if current not in self._streams:
                    self._streams.add(current)
                    record(self._tensors())
            self.stream = current

    @abstractmethod
    def buckets_of(self, ids: torch.Tensor, buckets: int | None = None) -> torch.Tensor:
        """int64: the bucket of each id."""

    # ---- growth ----

    @property
    def may_grow(self) -> bool:
        return self.buckets < self._max_buckets and self.options.max_load_factor > 0

    def _fits(self, rows: int, buckets: int) -> bool:
        return rows <= self.options.max_load_factor * (buckets * self._width)

    def growth_possible(self, incoming: int) -> bool:
        """Whether ``incoming`` more rows might pass the load factor, as far as the host knows."""
        if not self.may_grow:
            return False
        if self._fits(self._size_bound + incoming, self.buckets):
            return False
        self._refine_bound()
        return not self._fits(self._size_bound + incoming, self.buckets)

    def expect(self, incoming: int) -> None:
        """A batch of at most ``incoming`` new rows was started: ask for the size, to be read when
        it has arrived."""
        if not self.may_grow:
            return
        if self._pending_size is not None:
            copy, event, since = self._pending_size
            if not event.query():
                self._size_bound += incoming
                self._pending_size = copy, event, since + incoming
                return
            self._refine_bound()
        self._size_bound += incoming  # until the size that is asked for now has arrived
        if self._device.type == "cuda":
            copy = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            copy.copy_(self.counters[_SIZE : _SIZE + 1], non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._pending_size = copy, event, 0
        else:
            self._size_bound = self.size()

    def _refine_bound(self) -> None:
        if self._pending_size is not None:
            copy, event, since = self._pending_size
            if event.query():
                self._size_bound = int(copy) + since
                self._pending_size = None

    def grow_for(self, incoming: int) -> bool:
        """Grow so that ``incoming`` more ids stay under the load factor, as far as allowed."""
        size = self.size()
        self._size_bound, self._pending_size = size, None
        if incoming == 0 or not self.may_grow or self._fits(size + incoming, self.buckets):
            return False
        buckets = self.buckets
        while buckets < self._max_buckets and not self._fits(size + incoming, buckets):
            buckets = min(2 * buckets, self._max_buckets)
        return self._grow_to(buckets)

    def reserve(self, rows: int) -> None:
        rows = check_integer("rows", rows, minimum=0, maximum=2**63 - 1)
        with self.entered:
            self.grow_for(rows)

    def _grow_to(self, buckets: int) -> bool:
        """Ids are placed in the order of their old slots, each in the lowest free position. Growth
        must not lose a row, so it does not happen if a bucket would overflow."""
        try:
            grown = self._grown(buckets)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"table {self.name!r} could not grow to {buckets * self._width} slots: {error}"
            ) from error
        if grown is None:
            return False
        index, moved, stamps = grown
        self.known_changes.stamps = stamps
        self._set_index(index)
        self.rows, self.state = moved
        self.buckets = buckets
        self.changes += 1
        self.moved()
        return True

    def _grown(
        self, buckets: int
    ) -> tuple[dict[str, torch.Tensor | None], list[torch.Tensor], torch.Tensor | None] | None:
        """Index, rows with their states and stamps of a larger table; ``None`` if a bucket would
        overflow. This one stays as it is."""
        old = (self.digests != 0).nonzero().squeeze(1)
        bucket, order = torch.sort(self.buckets_of(self.keys[old], buckets), stable=True)
        old = old[order]
        position = torch.arange(len(old), device=self._device) - torch.searchsorted(bucket, bucket)
        if len(old) and int(position.max()) >= self._width:
            return None
        new = bucket * self._width + position
        index, moved = self._index(buckets), list(self._rows(buckets, self._optimizer))
        for name in ("digests", "keys", "scores", "times"):
            to, source = index[name], getattr(self, name)
            if to is not None:
                to[new] = source[old]
        for to, source in zip(moved, (self.rows, self.state), strict=True):
            if to.numel():
                some = max(1, COPIED_BYTES // (to.shape[1] * to.element_size()))
                for into, of in zip(new.split(some), old.split(some), strict=True):
                    to[into] = source[of]
        stamps = None
        if self.known_changes.stamps is not None:
            stamps = self._zeros(buckets * self._width, torch.int32)
            stamps[new] = self.known_changes.stamps[old]
        return index, moved, stamps
