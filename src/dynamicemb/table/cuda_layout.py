"""What the kernels need to know of the tables of a group, kept on their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.kernels import layout as words
from dynamicemb.kernels.dedup import DUMMIES
from dynamicemb.kernels.launch import INTERPRETED, power_of_two
from dynamicemb.kernels.queues import LONGEST
from dynamicemb.optimizers import Optimizer, OptimizerKind, args_changes
from dynamicemb.table.cuda_steps import StepNumbers
from dynamicemb.table.cuda_streams import current_stream, record
from dynamicemb.table.cuda_workspace import Numbers, Workspaces
from dynamicemb.table.numbers import (
    TYPES,
    has_batch_scores,
    initializer_numbers,
    strategy_number,
)

if TYPE_CHECKING:
    from dynamicemb.table.cuda import CudaTable

#: Buckets wider than this are found by sorting their ids instead of by their digests.
WIDEST_SCAN = 1024
_L2, _DECOUPLED = 1, 2


@dataclass(frozen=True)
class TableClass:
    """Tables whose rows have one shape and one treatment, so that one compiled kernel serves them.

    A launch goes over all ids of a call and works on those of one class.
    """

    number: int
    members: tuple[int, ...]
    fewest_buckets: int
    width: int
    strategy: int
    dim: int
    stride: int
    type: int
    mode: int
    kind: int
    state_dim: int
    state_stride: int
    maximize: bool
    decay: int  # how the optimizer's kernel treats ``weight_decay``: 0, _L2 or _DECOUPLED
    nesterov: bool
    rounds_at_random: bool
    clips: bool

    @cached_property
    def wide(self) -> bool:
        return self.width > WIDEST_SCAN

    @cached_property
    def line(self) -> int:
        """Digests that are read at a time."""
        return next(line for line in (128, 64, 32, 16) if self.width % line == 0)

    @cached_property
    def queued(self) -> int:
        """Positions in the queue of what a bucket evicts, or 0; see kernels/queues.py."""
        if not has_batch_scores(self.strategy):
            return 0
        longest: int = LONGEST.value
        return min(longest, self.width - 1)

    @cached_property
    def columns(self) -> int:
        return max(16, power_of_two(self.dim))

    @cached_property
    def state_columns(self) -> int:
        return max(1, power_of_two(self.state_dim))

    @cached_property
    def state_from(self) -> int:
        """The first state column that starts at the optimizer's initial value."""
        return self.dim if self.kind == OptimizerKind.FTRL else 0

    @cached_property
    def row_block(self) -> int:
        """Rows per program where whole rows are written."""
        return max(1, (8192 if INTERPRETED else 2048) // max(self.columns, self.state_columns))


class Layout:
    """Addresses and numbers of the tables, one column per table (see ``kernels/layout.py``)."""

    def __init__(self, owners: Sequence[CudaTable]) -> None:
        self.owners = list(owners)
        self.device = owners[0].device
        self.tables = len(self.owners)
        self.dummies = torch.zeros(DUMMIES, dtype=torch.int32, device=self.device)
        self.workspaces = Workspaces(self.tables, self.device)
        self.batch_numbers = Numbers(words.BATCH_NUMBERS, self.tables, torch.int64, self.device)
        self.now_numbers = Numbers(1, self.tables, torch.int32, self.device)
        self.step_numbers = StepNumbers(self.owners, self.device)
        # Entries, ids and hot blocks of a batch that is done: the device writes, the host reads at
        # any time.
        pinned = self.device.type == "cuda"
        self.hint = torch.zeros(3, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.hint_array = self.hint.numpy()
        self._features: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._versions: list[int] = []
        self._flags: list[Any] = []
        self._args_changes = -1
        self.version = 0  # counts changes of addresses and numbers
        # Written anew where something changes: a graph of the caller has their addresses.
        self.meta = torch.empty(words.INTEGERS, self.tables, dtype=torch.int64, device=self.device)
        self.floats = torch.empty(
            words.FLOATS, self.tables, dtype=torch.float32, device=self.device
        )
        self.stream = current_stream(self.device)  # that used this memory last
        self.refresh()

    def refresh(self) -> None:
        """Follow tables that moved or changed since."""
        versions = [table.layout_version for table in self.owners]
        if versions == self._versions and self._args_changes == args_changes():
            return
        self._args_changes = args_changes()
        flags = [_optimizer_flags(table.optimizer) for table in self.owners]
        if versions == self._versions and flags == self._flags:  # a learning rate, say
            return
        self._versions, self._flags = versions, flags
        self.version += 1
        shapes: dict[Any, list[int]] = {}
        for t, table in enumerate(self.owners):
            shapes.setdefault(_shape(table), []).append(t)
        self.classes = [
            TableClass(
                number,
                tuple(members),
                min(self.owners[t].buckets for t in members),
                *shape,
            )
            for number, (shape, members) in enumerate(shapes.items())
        ]
        self.one_class = len(self.classes) == 1
        # Whether a table writes down when rows change, and which ids leave.
        self.stamped = any(table.known_changes.stamps is not None for table in self.owners)
        self.logged = any(table.logs_removals for table in self.owners)
        self.growing = [table for table in self.owners if table.may_grow]
        class_of = {t: one.number for one in self.classes for t in one.members}
        integers = [_integers(table, class_of[t]) for t, table in enumerate(self.owners)]
        floats = [_floats(table) for table in self.owners]
        for to, columns in ((self.meta, integers), (self.floats, floats)):
            given = torch.tensor(columns, dtype=to.dtype, device="cpu").T.contiguous()
            to.copy_(given, non_blocking=True)

    def used_on(self, stream: int) -> None:
        """The current stream, ``stream``, is another one than before."""
        self.stream = stream
        record((self.meta, self.floats, self.dummies))
        record(
            one.device_tensor for one in (self.batch_numbers, self.now_numbers, self.step_numbers)
        )
        record(tensor for pair in self._features.values() for tensor in pair)
        self.workspaces.used_on(stream)

    def feature_arrays(self, features: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Per feature: its table, and the column where its output starts (int32)."""
        if features not in self._features:
            tables, columns, column = [], [], 0
            for t, count in enumerate(features):
                for _ in range(count):
                    tables.append(t)
                    columns.append(column)
                    column += self.owners[t].dim
            self._features[features] = (
                to_device(torch.tensor(tables, dtype=torch.int32, device="cpu"), self.device),
                to_device(torch.tensor(columns, dtype=torch.int32, device="cpu"), self.device),
            )
        return self._features[features]

    def aligned_rows(self, rows: torch.Tensor, pooled: bool) -> bool:
        """Whether rows of an output or gradient start at multiples of 16 bytes; those of pooled
        features lie side by side."""
        size = rows.element_size()
        return (
            rows.dim() > 1
            and rows.data_ptr() % 16 == 0
            and rows.stride(0) * size % 16 == 0
            and (not pooled or all(table.dim * size % 16 == 0 for table in self.owners))
        )

    def marks(self) -> list[Sequence[int]]:
        """Numbers of no batch of this group, with the marks of the batches that run elsewhere."""
        none = [0] * self.tables
        return [none, none, [table.mark for table in self.owners]]

    #: Whether the slots that the last started batch uses must be marked: its score is not above all
    #: others.
    marked = True

    def start_batch(self, scores: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """The numbers of the next batch: the scores that it writes, and its marks."""
        written, times = zip(*scores, strict=True)
        newest = [
            table.start_batch(score[0]) for table, score in zip(self.owners, scores, strict=True)
        ]
        self.marked = not all(newest)
        return [written, times, [table.mark for table in self.owners]]


def signed(value: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return value - 2**64 if value >= 2**63 else value


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16 as int16, as the kernels see it."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small CPU tensor on ``device``, without waiting for the device."""
    return tensor.to(device, non_blocking=True)


def _optimizer_flags(optimizer: Optimizer) -> tuple[bool, int, bool, bool, bool]:
    """What the kernels are compiled for; in the order of :class:`TableClass`."""
    args, decay = optimizer.args, 0
    if args.weight_decay != 0:
        decay = _DECOUPLED if optimizer.decoupled_weight_decay else _L2
    return (
        args.maximize,
        decay,
        args.nesterov,
        args.stochastic_rounding,
        args.gradient_clipping,
    )


def _shape(table: CudaTable) -> tuple[int, ...]:
    numbers = initializer_numbers(table.options.initializer_args)
    return (
        table.bucket_capacity,
        strategy_number(table.options),
        0 if table.rowless else table.dim,
        table.rows.shape[1],
        TYPES[table.dtype],
        int(numbers["mode"]),
        int(table.optimizer.kind),
        table.state_dim,
        table.state.shape[1],
        *_optimizer_flags(table.optimizer),
    )


def _integers(table: CudaTable, number: int) -> list[int]:
    values = dict.fromkeys(range(words.INTEGERS), 0)
    for key, tensor in (
        (words.DIGESTS, table.digests),
        (words.KEYS, table.keys),
        (words.SCORES, table.scores),
        (words.TIMES, table.times),
        (words.TOUCHED, table.touched),
        (words.HEADS, table.heads),
        (words.QUEUES, table.queues),
        (words.ROWS, table.rows),
        (words.STATE, table.state),
        (words.COUNTERS, table.counters),
        (words.STAMPS, table.known_changes.stamps),
    ):
        values[key.value] = 0 if tensor is None else tensor.data_ptr()
    values[words.BUCKETS.value] = table.buckets
    values[words.SEED.value] = signed(table.seed)
    values[words.CLASS.value] = number
    return list(values.values())


def _floats(table: CudaTable) -> list[float]:
    numbers = initializer_numbers(table.options.initializer_args)
    return initializer_column(
        numbers,
        missing=table.options.eval_initializer_args.value,
        initial=table.optimizer.state_initial_value(),
    )


def initializer_column(
    numbers: dict[str, float], *, missing: float = 0.0, initial: float = 0.0
) -> list[float]:
    """A table's column of the float array."""
    names = ("value", "lower", "upper", "mean", "std_dev", "cdf_lower", "cdf_upper")
    return [*(numbers[name] for name in names), missing, initial]
