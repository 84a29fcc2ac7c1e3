"""What every table is, whatever device its rows are on."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from dynamicemb.errors import (
    InsertionError,
    InvalidArgumentError,
    UsageError,
    check_integer,
    wrong_type,
    wrong_value,
)
from dynamicemb.hashing import bucket_of
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbTableOptions,
    align_to_table_size,
    complete_initializer_args,
)
from dynamicemb.table import content
from dynamicemb.table.arguments import CheckedArguments
from dynamicemb.table.expiry import Expiry
from dynamicemb.table.rows import Found, Inserted, Progress, Rows, TableStats, Written
from dynamicemb.table.scored import ScoredTable

if TYPE_CHECKING:
    from dynamicemb.table.group import TableGroup

#: Slots of one table, and columns of a row, at most.
MAX_SLOTS = 2**31
MAX_DIM = 2**20


class Table(ScoredTable, CheckedArguments):
    """A scored hash table of trainable rows. Its batch semantics are in docs/design.md.

    Ids are any 64-bit integers (int64 or uint64 tensors, 1-D, on the table's device). No result
    depends on the number of threads (``torch.get_num_threads()`` are used). Calls from several
    Python threads are safe; writers exclude each other.
    """

    def __init__(
        self,
        options: DynamicEmbTableOptions,
        *,
        optimizer: Optimizer | None,
        name: str,
        seed: int | None,
        clock: Callable[[], int] | None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise wrong_value("name", name, "a string that is not empty")
        options.validate()
        for field in ("dim", "max_capacity"):
            if getattr(options, field) is None:
                raise InvalidArgumentError(
                    f"{field} of table {name!r} is None; allowed: a positive integer"
                )
        check_integer("dim", options.dim, maximum=MAX_DIM)
        if options.external_storage is not None:
            raise InvalidArgumentError(
                f"external_storage of table {name!r} is set; allowed: None, or a table "
                "that create_table makes (see dynamicemb.tiers)"
            )
        self.name = name
        self.options = replace(
            options, initializer_args=complete_initializer_args(options.initializer_args)
        )
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        self.seed = check_integer("seed", seed, minimum=-(2**63), maximum=2**64 - 1) % 2**64
        self._start_scores(clock)
        self._optimizer = self._checked_optimizer(optimizer)
        self.iteration = 0  # optimizer updates so far
        self._expiry: Expiry | None = None

    # ---- what a table is ----

    #: Whether a store of rows lies below.
    has_store: ClassVar[bool] = False
    #: Slots it can grow to.
    max_slots: int
    can_expire: ClassVar[bool] = False  # whether :meth:`expire` works

    @property
    def dim(self) -> int:
        """Numbers of an embedding."""
        assert self.options.dim is not None
        return self.options.dim

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings: float32, float16 or bfloat16."""
        return self.options.embedding_dtype or torch.float32

    @property
    def optimizer(self) -> Optimizer:
        """What updates rows, and so the layout of their state."""
        return self._optimizer

    @property
    def state_dim(self) -> int:
        """Numbers of a row's optimizer state, float32 each."""
        return self._optimizer.state_dim(self.dim)

    @property
    def score_words(self) -> int:
        """Words of a score: 2 for the pair (TIMESTAMP, LFU), else 1."""
        return 2 if isinstance(self.options.score_strategy, tuple) else 1

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the rows are, and ids and results."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Slots now; grows up to ``max_capacity`` rounded up to whole buckets."""

    @property
    @abstractmethod
    def bucket_capacity(self) -> int:
        """Slots of a bucket."""

    @abstractmethod
    def size(self) -> int:
        """Rows stored."""

    def __len__(self) -> int:
        return self.size()

    @property
    def load_factor(self) -> float:
        """Rows stored, as a share of the slots there are now."""
        return self.size() / self.capacity

    # ---- reading ----

    @abstractmethod
    def find(self, ids: torch.Tensor) -> Found:
        """The rows of ``ids``. Changes nothing: no score, no counter, no insertion."""

    @abstractmethod
    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the slot of each id, -1 where it is missing. Changes nothing."""

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: which ids are stored."""
        return self.find_slots(ids) >= 0

    @abstractmethod
    def export(
        self,
        *,
        batch_size: int = 65536,
        score_threshold: int | None = None,
        changed_since: int | None = None,
    ) -> Iterator[Rows]:
        """The rows in slot order, at most ``batch_size`` at a time, none skipped or doubled while
        the table is left alone. ``score_threshold``: only rows with a score (the timestamp of a
        pair) of at least this much, compared as unsigned 64-bit numbers. ``changed_since``: only
        rows that changed after this mark of :meth:`mark_changes`. With both: the rows that either
        asks for."""

    @abstractmethod
    def initial_rows(
        self, ids: torch.Tensor, args: DynamicEmbInitializerArgs | None = None
    ) -> torch.Tensor:
        """[n, dim] of the table's dtype: what new rows of ``ids`` would be, drawn by ``args``
        (default: the table's own) and the table's seed. Changes nothing."""

    # ---- changes ----

    @abstractmethod
    def mark_changes(self) -> int:
        """A mark: a positive number for this moment, for ``export(changed_since=)`` and
        :meth:`removed_since`.

        A row has changed after the mark if a training batch or ``insert`` or ``assign`` touched it
        after, or an update of its embedding or state came after, whenever it was looked up. Rows
        that wait for their forward after a ``prefetch`` may count as changed with every batch.
        Marks grow with time and mean nothing to another table, or after a restart.
        """

    @abstractmethod
    def log_removals(self, limit: int | None = None) -> None:
        """From now on remember which ids leave the table: evicted, erased, cleared.

        ``limit``: ids to remember, 8 bytes each, at most; None: 2**20, or two per slot where that
        is more (over a store: 2**20). Beyond it the oldest are forgotten, which
        :meth:`removed_since` then says. Off until the first call, and in copies; a later call sets
        another limit.
        """

    @property
    @abstractmethod
    def logs_removals(self) -> bool:
        """Whether :meth:`log_removals` was called."""

    @abstractmethod
    def logged_removals(self, mark: int) -> tuple[int, torch.Tensor]:
        """The oldest mark that the log can answer, and the ids that left after ``mark`` (int64, in
        any order, also more than once, also those that came back)."""

    def removed_since(self, mark: int) -> torch.Tensor:
        """int64 [n]: the ids that left the table after ``mark`` and are not stored now, each once,
        in ascending order. UsageError if the log does not reach back to the mark."""
        mark = check_integer("mark", mark, minimum=1)
        if not self.logs_removals:
            raise UsageError(
                f"table {self.name!r} does not remember which ids left it; call log_removals() "
                "before the time that is asked about"
            )
        known_since, ids = self.logged_removals(mark)
        if mark < known_since:
            raise UsageError(
                f"table {self.name!r} does not remember all ids that left it since mark {mark}, "
                f"only since {known_since}: the log began later, or more ids than its limit left. "
                "Dump the whole table, or raise the limit of log_removals()"
            )
        distinct: torch.Tensor = torch.unique(ids)
        return distinct[~self.contains(distinct)]

    @abstractmethod
    def stats(self) -> TableStats:
        """What went on since the table was made or ``reset_stats``, and its size now."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Start the counts of :meth:`stats` again from 0."""

    # ---- writing ----

    @abstractmethod
    def find_or_insert(
        self,
        ids: torch.Tensor,
        *,
        counts: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Inserted:
        """One training batch: find, score, admit, insert or evict, initialise.

        ``counts`` (int64, [n], at least 1): how many occurrences each id stands for. Ids that could
        not be inserted obey ``safe_check_mode``.
        """

    @abstractmethod
    def insert(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Written:
        """Store given rows, overwriting those that exist; of equal ids the last one counts.

        ``state`` None: new rows start from the optimizer's initial state, existing ones keep
        theirs. ``scores`` None: as in a training batch. Asks no admission strategy. Ids that could
        not be inserted are False in ``written`` and obey ``safe_check_mode``.
        """

    @abstractmethod
    def assign(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Overwrite the rows that exist; bool [n] says which. ``state`` and ``scores`` None: as
        they were."""

    @abstractmethod
    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        """Remove rows; bool [n], True at the first occurrence of an id that was there."""

    def expire(self, before: int, *, slots: int) -> int:
        """Look at the next ``slots`` slots, after the last one begin again at the first, and evict
        the rows whose score (the timestamp of two) is below ``before``. Returns how many."""
        raise self._no_expiry()

    def sweep(self, before: int, *, slots: int) -> None:
        """:meth:`expire`, without waiting for the count."""
        self.expire(before, slots=slots)

    def _no_expiry(self) -> UsageError:
        return UsageError(f"a {type(self).__name__} cannot expire rows")

    def expire_after(
        self, *, age: float | None = None, steps: int | None = None, sweep: int = 1000
    ) -> None:
        """From now on, evict rows whose last use is longer ago than ``age`` seconds (scores with
        timestamps) or ``steps`` training batches (STEP scores).

        Each training batch looks at one ``sweep``-th of the slots (4,096 at least), so a row is
        gone at most ``sweep`` batches after its time. Evicted ids are counted in :meth:`stats` and
        logged as removals. Not part of a saved table. Both ``None``: no longer.
        """
        self._expiry = self.check_expiry(age=age, steps=steps, sweep=sweep)

    def check_expiry(self, *, age: float | None, steps: int | None, sweep: int) -> Expiry | None:
        """What :meth:`expire_after` takes, or raise."""
        if age is None and steps is None:
            return None
        if not self.can_expire:
            raise self._no_expiry()
        return Expiry(self, age=age, steps=steps, sweep=sweep)

    @abstractmethod
    def clear(self) -> None:
        """Remove every row and give the memory back. Counters of :meth:`stats` stay."""

    def flush(self) -> None:
        """Write what is only in memory to the store below, if there is one."""

    def drop_cache(self) -> None:
        """:meth:`flush`, and keep no row above the store, if there is one."""

    def export_buckets(self) -> int | None:
        """Into how many equal parts of the range of hashes the order of :meth:`export` cuts the ids
        (see docs/design.md); ``None``: another order."""
        return None

    def undo_point(self) -> Callable[[], None] | None:
        """A function that makes the table, empty now, again what it is now, whatever rows,
        optimizer and numbers it gets until then; the admission counter is not touched. ``None``
        if it has rows, or is of a kind that cannot."""
        return None

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Grow once for ``rows`` more ids, as far as ``max_capacity`` allows, instead of step by
        step as they come. Changes no row."""

    @abstractmethod
    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use another optimizer. Embeddings and scores stay; if the kind changes, state starts
        again from its initial value and ``iteration`` from 0."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole table as tensors that share no memory with it: ``ids``, ``embeddings``,
        ``state``, ``scores``, ``counter_ids``, ``counter_counts`` and ``meta`` (numbers). Those
        that are empty are left out."""
        return content.save(self)

    def check_state_dict(self, state: Mapping[str, torch.Tensor], kind: OptimizerKind) -> None:
        """Raise unless :meth:`load_state_dict` would take ``state`` once the table's optimizer is
        of ``kind``."""
        content.check(self, state, kind)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> int:
        """Replace the content by that of :meth:`state_dict`; returns how many rows did not fit.

        Everything is checked before the first row changes. State of another kind of optimizer is
        refused.
        """
        return content.load(self, state)

    @abstractmethod
    def progress(self) -> Progress:
        """The numbers that go on counting."""

    @abstractmethod
    def restore_progress(self, progress: Progress) -> None:
        """Continue those of a saved table."""

    @abstractmethod
    def export_counter(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(ids, counts), both int64 [n], of the admission counter; ``None`` without one."""

    @abstractmethod
    def restore_counter(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Start the admission counter again from these counts; nothing without a counter."""

    def advance_step(self) -> None:
        super().advance_step()
        if self._expiry is not None:
            self._expiry.after_batch(self)

    # ---- shared by the implementations ----

    def check_failures(self, failures: int, batch: int, evicted: Rows | None = None) -> None:
        """Obey ``safe_check_mode`` after a batch in which ``failures`` ids found no slot. An error
        carries the rows the batch evicted, which would be lost otherwise."""
        mode = self.options.safe_check_mode
        if failures == 0 or mode is DynamicEmbCheckMode.IGNORE:
            return
        message = (
            f"table {self.name!r} could not insert {failures} distinct ids of a batch of {batch}: "
            "every slot of their buckets is in use by this batch or may not be evicted; they read "
            "0.0. Raise max_capacity"
        )
        if mode is DynamicEmbCheckMode.ERROR:
            raise InsertionError(message, evicted)
        warnings.warn(message, UserWarning, stacklevel=3)

    def empty_rows(self, count: int) -> Rows:
        """Uninitialised buffers for ``count`` rows."""
        shape = (count,) if self.score_words == 1 else (count, 2)
        return Rows(
            torch.empty(count, dtype=torch.int64, device=self.device),
            torch.empty(count, self.dim, dtype=self.dtype, device=self.device),
            torch.empty(count, self.state_dim, dtype=torch.float32, device=self.device),
            torch.empty(shape, dtype=torch.int64, device=self.device),
        )

    def bucket_of(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the bucket each id lives in, at the present capacity."""
        return bucket_of(ids, self.capacity // self.bucket_capacity)

    @abstractmethod
    def write_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, state: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """:meth:`insert` of saved rows; those that do not fit are counted, not reported."""

    @abstractmethod
    def make_group(self, tables: Sequence[Table]) -> TableGroup:
        """A group of tables of this class and device; use ``create_group``."""

    @staticmethod
    def bucket_layout_of(options: DynamicEmbTableOptions) -> tuple[int, int, int]:
        """(width, buckets at the start, buckets at most) of ``options``."""
        assert options.max_capacity is not None
        if options.bucket_capacity == MAX_BUCKET_CAPACITY:
            width, maximum = align_to_table_size(options.max_capacity), 1
        else:
            width = options.bucket_capacity
            maximum = -(-options.max_capacity // width)
        if width * maximum > MAX_SLOTS:
            raise wrong_value(
                "max_capacity", options.max_capacity, f"at most {MAX_SLOTS} slots per table"
            )
        wanted = maximum
        if options.init_capacity is not None:
            wanted = -(-options.init_capacity // width)
        # Doubling from the start must arrive at the maximum: halve it as long as that is enough.
        start = maximum
        while start > 1 and -(-start // 2) >= wanted:
            start = -(-start // 2)
        return width, start, maximum

    def _checked_optimizer(self, optimizer: Optimizer | None) -> Optimizer:
        if optimizer is None or not self.options.training:
            return Optimizer(OptimizerKind.SGD, OptimizerArgs())
        if not isinstance(optimizer, Optimizer):
            raise wrong_type("optimizer", optimizer, "None or an Optimizer")
        optimizer.validate()
        return optimizer
