"""The modules: several tables over one store, which may be larger than memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
from torch import nn

from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.errors import (
    DynamicEmbError,
    UsageError,
    check_bool,
    check_choice,
    check_integer,
    wrong_value,
)
from dynamicemb.nn.checks import check_ids
from dynamicemb.nn.module import DynamicModule
from dynamicemb.nn.plan import Plan
from dynamicemb.one_embedding import folders
from dynamicemb.one_embedding.initializers import InitializerOptions
from dynamicemb.one_embedding.keys import KEY_TYPES, Keys, check_padding_idx
from dynamicemb.one_embedding.room import Room
from dynamicemb.one_embedding.routed import look_up_everywhere
from dynamicemb.one_embedding.row_size import check_row_size, first_optimizer
from dynamicemb.one_embedding.snapshots import Snapshots
from dynamicemb.one_embedding.store_table import StoreTable, rank_capacity
from dynamicemb.one_embedding.stores import StoreOptions, options_text
from dynamicemb.one_embedding.tables import TableOptions, column_widths, new_rows
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbPoolingMode
from dynamicemb.routing import Routing
from dynamicemb.table import Lookup, Pooling, Table

_SNAPSHOT_KEY, _OPTIONS_KEY = "OneEmbeddingSnapshot", "OneEmbeddingKeyValueOptions"
_named: weakref.WeakValueDictionary[str, Embedding] = weakref.WeakValueDictionary()


@dataclass
class KeyPlan(Plan):
    """A checked call. ``numbers``: the table of each key, where there are several."""

    numbers: torch.Tensor | None = None


class Embedding(DynamicModule):
    """What :class:`MultiTableEmbedding` and :class:`MultiTableMultiColumnEmbedding` share."""

    #: Whether ``embedding_dim`` may be a list.
    _several_columns = False

    def __init__(
        self,
        name: str,
        embedding_dim: int | Sequence[int],
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[TableOptions] | None,
        store_options: Mapping[str, Any],
        default_initializer: InitializerOptions | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
        *,
        share_ids: bool = True,
        resume: bool | None = None,
        gradient_reduction: str = "sum",
        process_group: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise wrong_value("name", name, "a string that is not empty")
        if name in _named:
            raise wrong_value("name", name, "a name that no other embedding of this process has")
        check_choice("dtype", dtype, (torch.float32,))
        check_choice("key_type", key_type, KEY_TYPES)
        check_choice("gradient_reduction", gradient_reduction, ("sum", "mean"))
        widths = column_widths(embedding_dim, several=self._several_columns)
        store = StoreOptions.parse(store_options)
        rows = new_rows(tables, default_initializer, widths)
        optimizer = first_optimizer(store, sum(widths))
        seed = check_integer("seed", seed, minimum=-(2**63), maximum=2**64 - 1)
        padding_idx = check_padding_idx(padding_idx, key_type)
        check_bool("share_ids", share_ids)
        if resume is not None:
            check_bool("resume", resume)
        ranks = Ranks(process_group)
        made_of = StoreTable(
            store=store,
            dim=sum(widths),
            # Where there are several, each new row is drawn before the table would.
            initializer=rows.uniform or rows.tables[0][0],
            name=name,
            seed=seed,
            ranks=ranks.size,
            folder=folders.rank_folder(store.path, ranks.rank, ranks.size),
        )
        table = made_of.make(optimizer, torch.get_default_device() if device is None else device)
        super().__init__([table], [1], output_dtype=torch.float32, fused=False)
        self._made_of = made_of
        self._new_rows = rows
        self._keys = Keys(key_type, len(rows.tables), folded=not share_ids)
        self._average = gradient_reduction == "mean"
        limit = None
        if store.capacity is not None and not store.grows:
            limit = rank_capacity(store.capacity, ranks.size)
        self._room = Room(table, limit, embedding=name, rank=ranks.rank)
        self._routing = Routing("hash_roundrobin", ranks.size, ranks.rank)
        self._ranks = ranks
        if ranks.size > 1:
            self.process_group = process_group
            self.routings = {name: self._routing}
        self.embedding_name, self.embedding_dim, self.dtype = name, sum(widths), dtype
        self.key_type, self.padding_idx, self.seed = key_type, padding_idx, seed
        self.storage_dim = self.embedding_dim + optimizer.state_dim(self.embedding_dim)
        self.num_tables = len(rows.tables)
        self.rank_id, self.world_size = ranks.rank, ranks.size
        self.local_rank = int(os.environ.get("LOCAL_RANK", ranks.rank))
        self.is_full_cache = store.in_device_memory
        self._options_text = options_text(store_options)
        self._snapshots = Snapshots(
            table,
            None if store.on_ssd else made_of.make_snapshot_store(table),
            store.path,
            ranks,
            self._routing,
            key_type=key_type,
            physical_block_size=store.physical_block_size,
            about={
                "name": name,
                "embedding_dim": self.embedding_dim,
                "tables_in_keys": self._keys.folded and self.num_tables > 1,
            },
            room=self._room,
            at_a_server=store.url is not None,
        )
        try:
            self._snapshots.start(resume)
        except BaseException:
            self._snapshots.store.close()  # another try may come
            raise
        self._room.count()
        _named[name] = self

    # ---- lookups ----

    @property
    def shadow(self) -> nn.Parameter:
        """The parameter of one element that optimizers see; the same as ``handle``."""
        return self.handle

    @property
    def pooled(self) -> bool:
        return False

    def forward(self, ids: torch.Tensor, table_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of ``ids`` (of ``key_type``, any shape): [*ids.shape, embedding_dim], float32.

        ``table_ids``: the table of each id, integers in the shape of ``ids`` or of its last places.
        ``None``: the last axis of ``ids`` has one id for each table. With one table it is not
        looked at. In training, an id that has no row gets one; in evaluation it reads what that
        would be, and nothing changes. With several ranks all must call it, each with its own ids.
        """
        flat, numbers = self._keys.flat(ids, table_ids)
        look_up = self.lookup if self.world_size == 1 else self._routed
        rows = look_up(flat, numbers)
        return rows.view(*ids.shape, self.embedding_dim)

    def plan(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> KeyPlan:
        """``offsets`` are the numbers of the tables here."""
        return self._plan(self._folded(ids, offsets), offsets)

    def _folded(self, ids: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
        return self._keys.fold(check_ids("ids", ids, self.device), numbers)

    def _plan(self, keys: torch.Tensor, numbers: torch.Tensor | None) -> KeyPlan:
        count, keep = len(keys), None
        if self.padding_idx is not None:
            keep = (~self._keys.padding(keys, self.padding_idx)).nonzero().squeeze(1)
            if len(keep) < count:
                keys = keys[keep]
                numbers = None if numbers is None else numbers[keep]
            else:
                keep = None
        pooling = Pooling(DynamicEmbPoolingMode.NONE, self.output_dtype, self.features)
        return KeyPlan(keys, (0, len(keys)), pooling, count, keep, numbers)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # how much goes where is known only when it runs
    def _routed(self, ids: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
        keys = self._folded(ids, numbers)
        padded, count = None, len(keys)
        if self.padding_idx is not None:
            padded = self._keys.padding(keys, self.padding_idx)
            keys, numbers = keys[~padded], None if numbers is None else numbers[~padded]
        rows = look_up_everywhere(
            keys,
            numbers,
            routing=self._routing,
            group=self.process_group,
            average=self._average,
            look_up=lambda theirs, tables: self.look_up(self._plan(theirs, tables)),
        )
        if padded is None:
            return rows
        out = rows.new_zeros(count, self.embedding_dim)
        return out.index_copy(0, (~padded).nonzero().squeeze(1), rows)

    def evaluate(self, plan: Plan, out: torch.Tensor) -> None:
        self._snapshots.used()
        super().evaluate(plan, out)
        missing = (~self.tables[0].contains(plan.ids)).nonzero().squeeze(1)
        if len(missing):
            assert isinstance(plan, KeyPlan)
            numbers = None if plan.numbers is None else plan.numbers[missing]
            out[missing] = self._new_rows.draw(self.tables[0], plan.ids[missing], numbers)

    # ---- new rows ----

    def find_or_insert(
        self,
        plan: Plan,
        counts: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Lookup:
        assert isinstance(plan, KeyPlan)
        self._snapshots.used()
        self._room.check(plan.ids)
        self._snapshots.changed = True
        return self._room.grow_for(lambda: self._find_or_insert(plan, counts, out))

    def _find_or_insert(
        self, plan: KeyPlan, counts: torch.Tensor | None, out: torch.Tensor | None
    ) -> Lookup:
        if self._new_rows.uniform is None:
            self._start_rows(plan)
        return super().find_or_insert(plan, counts, out)

    def _start_rows(self, plan: KeyPlan) -> None:
        """Insert the rows of new keys, each as its table starts them; of a key in two tables, as
        the first does."""
        table = self.tables[0]
        missing = (~table.contains(plan.ids)).nonzero().squeeze(1)
        if not len(missing):
            return
        keys, places = torch.unique(plan.ids[missing], return_inverse=True)
        first = missing.new_full((len(keys),), len(plan.ids))
        first.scatter_reduce_(0, places, missing, "amin")
        first = torch.sort(first).values
        numbers = None if plan.numbers is None else plan.numbers[first]
        table.insert(plan.ids[first], self._new_rows.draw(table, plan.ids[first], numbers))

    # ---- optimizer ----

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise unless ``optimizer`` updates rows of ``storage_dim`` floats."""
        check_row_size(optimizer, self.storage_dim, self.embedding_dim, self.embedding_name)

    def prepare_torch_step(self, optimizer: Optimizer) -> None:
        self.check_optimizer(optimizer)
        self._snapshots.steps(optimizer.kind)
        super().prepare_torch_step(optimizer)

    # ---- snapshots ----

    def flush(self) -> None:
        """Write rows that are only in caches to where all rows are: main memory, the SSD, or the
        server, where another process finds them."""
        self.tables[0].flush()

    def save_snapshot(self, snapshot_name: str) -> None:
        """Keep all rows of now, with optimizer state, under a name; all ranks must call it.

        A snapshot is atomic and replaces one of the same name. Raises a ``StoreError`` if it cannot
        be written.
        """
        self.check_written()
        self._snapshots.save(snapshot_name)

    def load_snapshot(
        self,
        snapshot_name: str,
        *,
        persistent_path: str | Sequence[str] | None = None,
        optimizer: Any = None,
        step: int | None = None,
    ) -> None:
        """Return to a snapshot; all ranks must call it. What was not saved is lost.

        The snapshot may be one of another number of ranks, and the table may be one that OneFlow
        wrote or that ``make_persistent_table_writer`` wrote. A missing one is a ``StoreError``,
        rows that are more than the capacity an ``InsertionError``; then nothing changes.

        Args:
            snapshot_name: its name.
            persistent_path: where to look for it; default: the embedding's own.
            optimizer, step: for tables that do not name the optimizer of their state: an
                ``EmbOptimType`` or its name ("adam", "exact_adagrad", "ftrl", ...), and the number
                of updates so far. Without a name, a warning says which optimizer is assumed, and
                the first step of another one raises a ``UsageError``.
        """
        path = persistent_path
        if path is not None and not isinstance(path, str):
            path = list(path)
        kind = None if optimizer is None else Optimizer.from_emb_optim_type(optimizer)
        if kind is not None:
            self.check_optimizer(kind)
        if step is not None:
            check_integer("step", step, minimum=0)
        self._snapshots.load(snapshot_name, path=path, optimizer=kind, step=step)
        self._pending.clear()
        self._prefetched.clear()
        self._room.count()
        self.accept_written()

    def snapshots(self) -> list[str]:
        """The snapshots that this number of ranks has, oldest first; all ranks must call it."""
        return self._snapshots.names()

    def drop_snapshot(self, snapshot_name: str) -> None:
        """Forget a snapshot, so that the disk can forget its rows; all ranks must call it."""
        self._snapshots.drop(snapshot_name)

    def close(self) -> None:
        """Give the folder back. The embedding cannot be used afterwards."""
        self._snapshots.store.close()
        _named.pop(self.embedding_name, None)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.save_handle(destination, prefix, keep_vars)
        last = self._snapshots.last
        if any(self._ranks.gather(self._snapshots.changed or last is None)):
            now = f"{datetime.now():%Y-%m-%d-%H-%M-%S-%f}"
            last = self._ranks.first(lambda: now)
            self.save_snapshot(last)
        destination[prefix + _SNAPSHOT_KEY] = last
        destination[prefix + _OPTIONS_KEY] = self._options_text

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = dict(state_dict)
        name = rest.pop(prefix + _SNAPSHOT_KEY, None)
        rest.pop(prefix + _OPTIONS_KEY, None)
        self.load_handle(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if name is None:
            missing_keys.append(prefix + _SNAPSHOT_KEY)
            if prefix + "handle" in state_dict:
                error_msgs.append(
                    f"embedding {self.embedding_name!r}: the dictionary has {prefix + 'handle'!r} "
                    f"and no {prefix + _SNAPSHOT_KEY!r}, which names its rows; allowed: both, or "
                    "nothing of the embedding"
                )
            return
        try:
            self.load_snapshot(name)
        except DynamicEmbError as error:
            error_msgs.append(f"embedding {self.embedding_name!r}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            f"embedding {self.embedding_name!r} has a folder of its own and cannot be copied or "
            "pickled; use save_snapshot, or a checkpoint"
        )

    # ---- devices ----

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Embedding:
        """``to``, ``cuda``, ``cpu``: the table goes where the parameter goes."""
        to = fn(torch.empty(1, device=self.handle.device)).device
        if to != self.device:
            self._move(to)
        super()._apply(fn, recurse)
        return self

    def _move(self, device: torch.device) -> None:
        before = self.tables[0]
        on_ssd = self._made_of.store.on_ssd
        stays = self._made_of.store.outlives_the_table
        if stays:
            before.flush()
        if on_ssd:  # one store at a time has the folder
            self._snapshots.store.close()
        try:
            table = self._made_of.make(before.optimizer, device)
        except BaseException:
            if on_ssd:
                self._use(self._made_of.make(before.optimizer, before.device), before)
            raise
        if not stays:
            for rows in before.export():
                table.write_rows(*(part.to(table.device) for part in vars(rows).values()))
        self._use(table, before)

    def _use(self, table: Table, before: Table) -> None:
        """Another table with the rows of the one before."""
        table.restore_progress(before.progress())
        self.tables = [table]
        self._room.use(table)
        self._snapshots.use(table)
        self._attach()

    def extra_repr(self) -> str:
        return f"{self.embedding_name!r}, {self.embedding_dim}, tables={self.num_tables}" + (
            "" if self._made_of.store.url else f", rows={len(self.tables[0])}"
        )


class MultiTableEmbedding(Embedding):
    """Several tables with rows of one width over one store, on the device, in main memory, on an
    SSD or at a server. Ids are looked up without a vocabulary: a new one gets its row in training.

    Args:
        name: unique in the process.
        embedding_dim: columns of a row.
        dtype: of the rows, ``torch.float``.
        key_type: of the ids: ``torch.int64``, ``int32``, ``uint64`` or ``uint32``.
        tables: a list of ``make_table_options(...)``; ``None``: one table.
        store_options: of ``make_device_mem_store_options``, ``make_cached_ssd_store_options``,
            ``make_cached_host_mem_store_options`` or ``make_cached_remote_store_options``.
        default_initializer: of the one table if ``tables`` is ``None``; default N(0, 0.05).
        padding_idx: an id that reads zeros, is never stored and takes no gradient.
        seed: of new rows, which are a function of (seed, id, column).
        share_ids: equal ids of two tables are one row, which starts as the table that had it first
            says. ``False``: they are two rows; then ids have 56 bits.
        resume: ``True``: start from the newest snapshot in the folder, of any number of ranks, or
            at a server with the rows that it has. ``False``: start without rows; those at a server
            are deleted. ``None``: start without rows, and say so if there are any: the first lookup
            warns of snapshots that were not loaded, and rows at a server are a ``UsageError``.
        gradient_reduction: with several ranks, what happens to the gradients of a row: "sum", or
            "mean" as in ``DistributedDataParallel``.
        process_group: the ranks; default: those of the default group, if there is one.
        device: of the rows, ids and outputs; default: torch's default device. ``to`` moves it.

    With several ranks an id belongs to one of them by its hash, and each has a folder of its own.
    Rows are updated by the optimizer that gets ``parameters()``: SGD, Adam, AdamW, Adagrad of
    ``torch.optim``, or one of :mod:`dynamicemb.one_embedding`, whose weight decay of rows is
    OneFlow's: SGD, Adam, Adagrad, Ftrl, SmartDecayAdam.

    ``state_dict`` holds the name of a snapshot, which it takes if rows changed since the last one.
    """


class MultiTableMultiColumnEmbedding(Embedding):
    """:class:`MultiTableEmbedding` whose rows are several columns side by side, each started by an
    initialiser of its own.

    ``embedding_dim``: the widths of the columns, a list; ``embedding_dim`` of the module is their
    sum. ``tables``: ``make_table_options([make_column_options(...), ...])``.
    """

    _several_columns = True
