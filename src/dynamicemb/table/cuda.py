"""Tables in the memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynamicemb.admission import admission_mask
from dynamicemb.errors import (
    InvalidArgumentError,
    UsageError,
    check_integer,
    wrong_value,
)
from dynamicemb.kernels import initialize
from dynamicemb.kernels.launch import INTERPRETED, aligned, blocks, launch
from dynamicemb.kernels.layout import COUNTER_NAMES
from dynamicemb.optimizers import Optimizer, OptimizerKind
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
)
from dynamicemb.table.base import Table
from dynamicemb.table.cuda_batch import SLOT_REJECTED, Batch
from dynamicemb.table.cuda_counter import CudaIdCounter, counting_options
from dynamicemb.table.cuda_group import CudaTableGroup
from dynamicemb.table.cuda_layout import bits, initializer_column, signed, to_device
from dynamicemb.table.cuda_writing import CudaWriting
from dynamicemb.table.numbers import (
    initializer_numbers,
)
from dynamicemb.table.rows import Inserted, Pooling, TableStats

#: Columns of a row at most: a row is one tile of a kernel.
MAX_CUDA_DIM = 4096
#: Optimizers that the kernels have.
KINDS = tuple(kind for kind in OptimizerKind if kind is not OptimizerKind.SMART_DECAY_ADAM)
_SIZE, _EVICTIONS = map(COUNTER_NAMES.index, ("size", "evictions"))


class CudaTable(CudaWriting):
    """A table in the memory of a GPU. See :class:`Table`; the results are those of a CPU table.

    Everything runs on the current stream; a call on another stream than the one before waits for
    that one first. Training and evaluation through a group do not wait for the device, but for an
    admission strategy, near a growth, with ``safe_check_mode`` ERROR or WARNING and with
    ``return_evicted``. Rows take memory for all slots of the present capacity; set
    ``init_capacity`` to start small.
    """

    def __init__(
        self,
        options: DynamicEmbTableOptions,
        *,
        optimizer: Optimizer | None = None,
        name: str = "table",
        seed: int | None = None,
        clock: Callable[[], int] | None = None,
        device: torch.device | str = "cuda",
        rowless: bool = False,
    ) -> None:
        super().__init__(options, optimizer=optimizer, name=name, seed=seed, clock=clock)
        self._device = _checked_device(device)
        check_integer("dim", self.dim, maximum=MAX_CUDA_DIM)
        self.rowless = rowless
        self._width, self.buckets, self._max_buckets = self.bucket_layout_of(self.options)
        self.max_slots = self._width * self._max_buckets
        self._allocate()
        self.admit_strategy = None
        self.counter: CudaIdCounter | None = None
        if self.options.admit_strategy is not None:
            self.admit_strategy = self.options.admit_strategy.per_table()
        if self.options.admission_counter is not None:
            config = self.options.admission_counter
            counting = counting_options(config.capacity, config.bucket_capacity)
            self.counter = CudaIdCounter(
                CudaTable(counting, name="counter", seed=0, device=self._device, rowless=True)
            )

    # ---- what a table is ----

    def stats(self) -> TableStats:
        with self.entered:
            counts = dict(zip(COUNTER_NAMES, self.counters.tolist(), strict=True))
        used = 0 if self.known_changes.removals is None else self.known_changes.removals.bytes
        used += sum(tensor.nbytes for tensor in self._tensors())
        used += 0 if self.counter is None else self.counter.table.stats().bytes
        return TableStats(
            **counts, capacity=self.capacity, load_factor=counts["size"] / self.capacity, bytes=used
        )

    def reset_stats(self) -> None:
        with self.entered:
            self.counters[:_SIZE] = 0

    # ---- writing ----

    def find_or_insert(
        self,
        ids: torch.Tensor,
        *,
        counts: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Inserted:
        ids = self.check_ids("ids", ids)
        if counts is not None:
            counts = self.check_counts(counts, len(ids))
        with self.entered:
            group = self.group
            before = self.failures()
            lookup = group.find_or_insert(
                ids, (0, len(ids)), counts=counts, keep_evicted=return_evicted, check=False
            )
            embeddings = torch.empty(len(ids), self.dim, dtype=self.dtype, device=self._device)
            group.read(lookup, Pooling(DynamicEmbPoolingMode.NONE, self.dtype, (1,)), embeddings)
            batch = lookup.batch
            slots = batch.slots[batch.entry_of.to(torch.int64)].to(torch.int64)
            slots = slots.masked_fill(slots <= SLOT_REJECTED, -2)
            evicted = None if lookup.evicted is None else lookup.evicted[0]
            self.report_failures(before, len(ids), evicted)
        return Inserted(embeddings, slots, evicted)

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        with self.entered:
            batch = Batch(self.group.layout, aligned(ids), None)
            if batch.n == 0:
                return torch.zeros(0, dtype=torch.bool, device=self._device)
            slots = batch.locate(None)
            used = torch.arange(batch.n, device=self._device) < batch.count
            there = used & (slots >= 0)
            removed = torch.zeros(batch.n, dtype=torch.bool, device=self._device)
            entries = there.nonzero().squeeze(1)
            removed[batch.first[entries].to(torch.int64)] = True
            gone = slots[entries].to(torch.int64)
            self._log_removed(gone)
            self.digests[gone] = 0
            self.scores[gone] = 0
            self.counters[_SIZE] -= len(gone)
            self.changes += 1
            return removed

    can_expire = True

    def expire(self, before: int, *, slots: int) -> int:
        return int(self._expire(before, slots))

    def sweep(self, before: int, *, slots: int) -> None:
        self._expire(before, slots)

    def _expire(self, before: int, slots: int) -> torch.Tensor:
        """:meth:`expire`, with the count on the device. Waits for it only to log removals."""
        before = check_integer("before", before, minimum=0, maximum=2**64 - 1)
        slots = min(check_integer("slots", slots, minimum=1), self.capacity)
        words = self.scores if self.times is None else self.times
        with self.entered:
            removed = self._zeros(1, torch.int64)
            while slots > 0:
                begin = self._expired_up_to % self.capacity
                end = min(begin + slots, self.capacity)
                part = slice(begin, end)
                gone = (words[part] ^ -(2**63)) < signed(before) ^ -(2**63)
                gone &= self.digests[part] != 0
                if self.logs_removals:
                    self._log_removed(gone.nonzero().squeeze(1) + begin)
                self.digests[part].masked_fill_(gone, 0)
                self.scores[part].masked_fill_(gone, 0)
                removed += gone.sum()
                slots -= end - begin
                self._expired_up_to = end
            self.counters[_EVICTIONS] += removed[0]
            self.counters[_SIZE] -= removed[0]
            self.changes += 1
            return removed

    _expired_up_to = 0  # the slot that expire() looks at next

    def clear(self) -> None:
        with self.entered:
            if self.logs_removals:
                self._log_removed((self.digests != 0).nonzero().squeeze(1))
            for tensor in (self.digests, self.keys, self.scores, self.times):
                if tensor is not None:
                    tensor.zero_()
            self.counters[_SIZE] = 0
            self.next_number.zero_()
            self._size_bound, self._pending_size = 0, None
            self.changes += 1

    def undo_point(self) -> Callable[[], None] | None:
        if self.size() or self.logs_removals:  # the log would have to forget what came after
            return None
        buckets, counters = self.buckets, self.counters.clone()
        optimizer, progress = self.optimizer, self.progress()

        def undo() -> None:
            with self.entered:
                self.clear()
                if self.buckets != buckets:
                    self._set_index(self._index(buckets))
                    self.rows, self.state = self._rows(buckets, self._optimizer)
                    self._forget_stamps(buckets)
                    self.buckets = buckets
                    self.moved()
                self.counters.copy_(counters)
                self.set_optimizer(optimizer)
                self.restore_progress(progress)

        return undo

    def _checked_optimizer(self, optimizer: Optimizer | None) -> Optimizer:
        optimizer = super()._checked_optimizer(optimizer)
        if optimizer.kind not in KINDS:
            allowed = ", ".join(kind.name for kind in KINDS)
            raise wrong_value("the optimizer of a table on a GPU", optimizer.kind.name, allowed)
        return optimizer

    def set_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = self._checked_optimizer(optimizer)
        with self.entered:
            if optimizer.kind is not self._optimizer.kind:
                state = self._states(len(self.state), optimizer)
                columns = optimizer.state_dim(self.dim)
                state[:, :columns] = to_device(optimizer.initial_state(self.dim), self._device)
                self.state = state
                self._streams = set()
                self.iteration = 0
                if self.known_changes.stamps is not None:
                    self.known_changes.stamps.fill_(self.known_changes.now)
            self._optimizer = optimizer
            self.moved()

    def set_seed(self, seed: int) -> None:
        """New rows follow another seed."""
        with self.lock:
            self.seed = seed
            self.moved()

    # ---- admission ----

    def decide(
        self, ids: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Ask the admission strategy and the limit about missing ids, in order of first occurrence:
        (bool [n], rows of the rejected ones)."""
        counts = torch.where(counts < 0, 2**63 - 1, counts)  # unsigned counts beyond int64
        mask = torch.ones(len(ids), dtype=torch.bool, device=self._device)
        side = None
        strategy = self.admit_strategy
        if strategy is not None:
            frequencies = counts
            if self.counter is not None:
                frequencies = counts + self.counter.counts(ids)
            mask = admission_mask(strategy, ids, frequencies)
            mask = mask.to(self._device)
            rejected = ids[~mask]
            if strategy.writes_rejected_rows:
                values = torch.zeros(len(rejected), self.dim, device=self._device)
                strategy.initialize_non_admitted_embeddings(
                    values, torch.arange(len(rejected), device=self._device)
                )
                side = values.to(self.dtype)
            elif len(rejected):
                args = strategy.initializer_args or self.options.initializer_args
                side = self.initial_rows(rejected, args)
        refused = self._refused(ids, mask)
        if refused is not None:
            without = ~mask | refused
            every = torch.zeros(int(without.sum()), self.dim, dtype=self.dtype, device=self._device)
            if side is not None:
                every[~mask[without]] = side
            side, mask = every, mask & ~refused
        if self.counter is not None:  # after the strategy, which may have raised
            self.counter.add(ids, counts)
        return mask, side

    def initial_rows(
        self, ids: torch.Tensor, args: DynamicEmbInitializerArgs | None = None
    ) -> torch.Tensor:
        ids = self.check_ids("ids", ids)
        numbers = initializer_numbers(args or self.options.initializer_args)
        out = torch.empty(len(ids), self.dim, dtype=self.dtype, device=self._device)
        column = torch.tensor(initializer_column(numbers), dtype=torch.float32, device="cpu")
        with self.entered as layout:
            (one,) = layout.classes
            launch(
                initialize.rows_kernel,
                blocks(len(ids), one.row_block),
                (
                    aligned(ids),
                    len(ids),
                    layout.meta,
                    to_device(column, self._device),
                    1,
                    bits(out),
                ),
                (one.dim, one.columns, one.type, int(numbers["mode"]), one.row_block),
                warps=4,
                device=self._device,
            )
        return out

    def make_group(self, tables: Sequence[Table]) -> CudaTableGroup:
        return CudaTableGroup([table for table in tables if isinstance(table, CudaTable)])

    # ---- saving ----

    @property
    def next_row_number(self) -> int:
        with self.entered:
            return int(self.next_number) % 2**64

    @next_row_number.setter
    def next_row_number(self, number: int) -> None:
        with self.entered:
            self.next_number.fill_(signed(number))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling and copying carry the rows along."""
        settings = (self.options, self.optimizer, self.name, self.seed, self._clock_function)
        return _restore_table, (*settings, str(self._device), self.state_dict())


def _checked_device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cpu" and INTERPRETED:
        return device
    if device.type != "cuda":
        raise wrong_value("device", str(device), "'cuda', 'cuda:0', ...")
    if not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"device is {str(device)!r}, but torch sees no GPU; allowed: 'cpu'"
        )
    if INTERPRETED:
        raise UsageError("TRITON_INTERPRET=1 is set: kernels run on CPU tensors only")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _restore_table(
    options: DynamicEmbTableOptions,
    optimizer: Optimizer,
    name: str,
    seed: int,
    clock: Callable[[], int],
    device: str,
    state: Mapping[str, torch.Tensor],
) -> CudaTable:
    table = CudaTable(
        options, optimizer=optimizer, name=name, seed=seed, clock=clock, device=device
    )
    table.load_state_dict(state)
    table.reset_stats()
    return table
