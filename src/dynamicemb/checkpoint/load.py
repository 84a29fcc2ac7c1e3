"""``DynamicEmbLoad``: a checkpoint of any number of ranks into the tables of a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dynamicemb.checkpoint.blocks import BlockReader
from dynamicemb.checkpoint.dump import TableNames
from dynamicemb.checkpoint.fill import Filler, read_ahead
from dynamicemb.checkpoint.index import REMOVED
from dynamicemb.checkpoint.legacy import Chosen, open_legacy
from dynamicemb.checkpoint.manifest import Shard
from dynamicemb.checkpoint.plan import (
    Plan,
    Wishes,
    owned,
    plan_of,
    restore_progress,
    to_table,
)
from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reader import (
    OPT_ARGS,
    CheckpointReader,
    NoCheckpointError,
    StoredRows,
)
from dynamicemb.checkpoint.replaced import tried_again
from dynamicemb.checkpoint.scores import uses_clock
from dynamicemb.checkpoint.threads import one_thread_for_files
from dynamicemb.errors import CheckpointError, ReplacedCheckpointError, check_bool, check_path
from dynamicemb.nn.discovery import accept_replaced, find_collections, select_tables
from dynamicemb.optimizers import Optimizer


@dataclass(frozen=True)
class TableLoad:
    """What became of one table, over all ranks.

    rows: in the checkpoint. did_not_fit: rows, of the checkpoint or in the table before, that have
    no place because the table is too small; those with the lowest scores. optimizer_state, counter:
    whether they were loaded.
    """

    rows: int
    did_not_fit: int
    optimizer_state: bool
    counter: bool


@dataclass(frozen=True)
class LoadReport:
    """What :func:`DynamicEmbLoad` did: ``tables[collection path][table name]``, and the tables of
    the model that the checkpoint does not have."""

    tables: dict[str, dict[str, TableLoad]]
    missing: tuple[tuple[str, str], ...]

    @property
    def did_not_fit(self) -> int:
        """Rows without a place, in all tables."""
        return sum(one.did_not_fit for some in self.tables.values() for one in some.values())


def DynamicEmbLoad(
    path: str | os.PathLike[str],
    model: nn.Module,
    table_names: TableNames = None,
    optim: bool = False,
    pg: Any = None,
    *,
    counter: bool = False,
    scores: bool = True,
    clear: bool = False,
    verify_first: bool = True,
    progress: bool | None = None,
) -> LoadReport:
    """Read the checkpoint in the folder ``path`` into the dynamic tables of ``model``.

    Every rank of ``pg`` must call it. The number of ranks and the way ids are spread over them may
    differ from those of the dump: every row goes to the rank that owns its id now. All checksums
    are compared, by all ranks, before a row of a table that has rows changes. Tables in main memory
    that are empty on every rank are filled first, each block as soon as it is compared: if one is
    corrupt, on any rank, they all become again what they were. Rows of the checkpoint overwrite
    rows of the same id; other rows stay. Memory in use is a few batches.

    table_names: as for :func:`DynamicEmbDump`.
    optim: load optimizer state, with the hyper-parameters (the learning rate among them) and the
        count of updates; without, loaded rows start from the optimizer's initial state. A
        checkpoint without state, or of another optimizer, warns.
    counter: load admission counters, in place of those of the tables.
    scores: load scores. TIMESTAMP scores keep their age; the step of STEP and the score of
        CUSTOMIZED go on from the dump. Without, rows are scored as in a training batch.
    clear: remove all rows of these tables first.
    verify_first: compare all checksums before the first row changes that could not be changed
        back. Without, each block is compared as its rows are read, for every table: faster by one
        pass over the files where tables have rows, but they may have a part of the rows when
        damage is found.
    progress: show a progress bar; ``None``: if standard error is a terminal.

    If a table is too small, the rows with the highest scores stay, and the number of the others is
    in the report and in a warning. Checkpoints of older layouts, which have no checksums, are read
    with a warning.

    Raises, on every rank and with the tables as they were: ``CheckpointError`` (no checkpoint
    there), ``CorruptCheckpointError`` (not as it was written), ``InvalidArgumentError`` (it does
    not fit the model: other dim, other score strategy, unknown names). Should a file fail only
    after it was verified, tables that were empty are empty again, others have a part of the rows.

    A dump may replace the checkpoint meanwhile: all ranks load the old one, or all the new one. If
    it has more files than a quarter of those that a process may have open (``ulimit -n``), they are
    not all held open, and the load raises ``ReplacedCheckpointError`` if the checkpoint is replaced
    before they were read.
    """
    wishes = Wishes(
        optim=check_bool("optim", optim),
        counter=check_bool("counter", counter),
        scores=check_bool("scores", scores),
        clear=check_bool("clear", clear),
    )
    check_bool("verify_first", verify_first)
    path = check_path("path", path)
    collections = find_collections(model)
    if not collections:
        warnings.warn(
            f"{type(model).__name__} has no dynamic embedding tables; nothing is loaded",
            UserWarning,
            stacklevel=2,
        )
        return LoadReport({}, ())
    chosen = [
        Chosen(where, module, table)
        for where, tables in select_tables(collections, table_names).items()
        for module, table in tables.values()
    ]
    loading = Loading(path, Ranks(pg), wishes, progress)
    try:
        explicit = table_names is not None
        tried_again(lambda: loading.plan(chosen, explicit=explicit, verified=verify_first))
        if verify_first:
            loading.verify(all_files=False)
        return loading.load()
    finally:
        loading.close()


#: Ids and how often each was seen, both int64 [n].
Counts = tuple[torch.Tensor, torch.Tensor]


class Loading:
    """The three steps of a load, each done by all ranks or by none. ``identity``: of the checkpoint
    that is to be there; ``None``: any."""

    def __init__(
        self,
        path: str,
        ranks: Ranks,
        wishes: Wishes,
        progress: bool | None,
        identity: str | None = None,
    ) -> None:
        self._path = path
        self._identity = identity
        self._ranks = ranks
        self._wishes = wishes
        self._shown = progress if ranks.rank == 0 else False
        self._reader: CheckpointReader | None = None
        self._plans: list[Plan] = []
        self._checked_later: list[bool] = []  # for each plan
        self._missing: list[tuple[str, str]] = []

    @property
    def reader(self) -> CheckpointReader:
        assert self._reader is not None
        return self._reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # ---- first: what is where, without a look at the rows ----

    def plan(self, chosen: Sequence[Chosen], *, explicit: bool, verified: bool = True) -> None:
        """Open the checkpoint and see that it fits the model. ``explicit``: every chosen table must
        be there; else only one of them. ``verified``: :meth:`verify` will be called. If a dump
        replaces it meanwhile, all ranks raise what ``tried_again`` takes for that, and this can be
        called again."""
        self.close()
        self._plans, self._missing = [], []

        def prepare() -> str:
            self._reader = open_checkpoint(self._path, chosen, self._identity)
            if self._wishes.clock_at_end is None and "delta" in self.reader.manifest.extra:
                raise CheckpointError(
                    f"{self._path!r} is a delta; allowed: a checkpoint, or apply_delta on the chain"
                )
            for one in chosen:
                if self.reader.has(one.collection, one.table.name):
                    entry = self.reader.table(one.collection, one.table.name)
                    self._plans.append(plan_of(one, entry, self._wishes, self._ranks))
                else:
                    self._missing.append((one.collection, one.table.name))
            if self._missing and (explicit or not self._plans):
                raise CheckpointError(
                    f"the checkpoint in {self._path!r} has no tables {_names(self._missing)}; it "
                    f"has {_names(self.reader.all_tables())}"
                )
            for plan in self._plans:
                self.reader.hold(
                    [(plan.chosen.collection, plan.entry.name)],
                    [shard.rank for shard in plan.shards],
                    skip=() if verified else _not_read(plan),
                )
            return self.reader.manifest.id

        identities = self._ranks.together(prepare)
        self._checked_later = [False] * len(self._plans)
        if len(set(identities)) > 1:
            raise ReplacedCheckpointError(
                f"{self._path} was replaced while it was opened: the ranks see the checkpoints "
                f"{sorted(set(identities))}"
            )
        if self._missing:
            warnings.warn(
                f"the checkpoint in {self._path!r} has no tables {_names(self._missing)}; they "
                "stay as they are",
                UserWarning,
                stacklevel=3,
            )

    # ---- second: every checksum, before the first row of a table that has rows changes ----

    def verify(self, *, all_files: bool = True) -> None:
        """Check the files of the chosen tables; where ranks read the same shards, each checks some
        of them. Without ``all_files``, leave out the rows of tables that :meth:`load` can make
        again what they were: it checks them as it reads."""
        if not all_files:
            self._checked_later = self._can_be_undone()
        rank, size = self._ranks.rank, self._ranks.size
        work = [
            (
                plan,
                [shard for shard in plan.shards if plan.exact or shard.rank % size == rank],
                plan.roles if later else (),
            )
            for plan, later in zip(self._plans, self._checked_later, strict=True)
        ]
        total = sum(
            entry.bytes
            for _, shards, skipped in work
            for shard in shards
            for role, entry in shard.files.items()
            if role not in skipped
        )

        def check() -> None:
            with ProgressBar("verify", total, shown=self._shown) as bar:
                for plan, shards, skipped in work:
                    self.reader.verify(
                        [(plan.chosen.collection, plan.entry.name)],
                        shards=[shard.rank for shard in shards],
                        skip=skipped,
                        advance=bar.add,
                    )

        self._ranks.together(check)

    def _can_be_undone(self) -> list[bool]:
        """For each table, whether every rank's part of it is empty and can be made so again."""
        mine = [plan.table.undo_point() is not None for plan in self._plans]
        return [all(answers) for answers in zip(*self._ranks.gather(mine), strict=True)]

    # ---- third: rows ----

    def load(self) -> LoadReport:
        """Insert the rows, and let counters and steps go on where the dump was."""
        lost = self._fill()
        if "delta" not in self.reader.manifest.extra:
            accept_replaced((plan.chosen.module, plan.table) for plan in self._plans)
        tables: dict[str, dict[str, TableLoad]] = {}
        for number, plan in enumerate(self._plans):
            tables.setdefault(plan.chosen.collection, {})[plan.entry.name] = TableLoad(
                rows=plan.entry.rows,
                did_not_fit=sum(one[number] for one in lost),
                optimizer_state=plan.state,
                counter=plan.counter,
            )
        for plan, mine in zip(self._plans, lost[self._ranks.rank], strict=True):
            if mine:
                warnings.warn(
                    f"{mine} rows did not fit table {plan.entry.name!r} with its "
                    f"{plan.table.capacity} slots; those with the highest scores were kept",
                    UserWarning,
                    stacklevel=3,
                )
        return LoadReport(tables, tuple(self._missing))

    def _fill(self) -> list[list[int]]:
        """For every rank and table, the rows that did not fit. Tables whose rows are checked only
        now come first: damage is found, and undone, before any other table changes."""
        undo = [(plan.table, plan.table.undo_point()) for plan in self._plans]
        emptied = [not len(plan.table) or self._wishes.clear for plan in self._plans]
        lost = [0] * len(self._plans)
        counters: list[Counts | None] = []
        total = sum(plan.read_bytes() for plan in self._plans)
        try:
            with (
                one_thread_for_files(),
                ProgressBar("load", total, shown=self._shown) as bar,
            ):

                def fill(later: bool) -> None:
                    for number, plan in enumerate(self._plans):
                        if self._checked_later[number] is later:
                            lost[number] = self._insert(plan, bar)

                self._ranks.together(lambda: fill(True))
                self._ranks.together(lambda: fill(False))
            self._ranks.together(
                lambda: counters.extend(
                    self._counter(plan) if plan.counter else None for plan in self._plans
                )
            )
        except BaseException:  # a file is corrupt, perhaps only since it was verified
            for (table, back), empty in zip(undo, emptied, strict=True):
                if back is not None:
                    back()
                elif empty:
                    table.clear()
            raise
        for plan, counter in zip(self._plans, counters, strict=True):
            if counter is not None:
                plan.table.restore_counter(*counter)
            restore_progress(plan)
        return self._ranks.gather(lost)

    def _insert(self, plan: Plan, bar: ProgressBar) -> int:
        """Put a table's rows into it; how many did not fit."""
        table = plan.table
        if plan.state and (
            plan.chosen.module.fused or plan.entry.optimizer.kind is not table.optimizer.kind
        ):
            optimizer = plan.entry.optimizer
            table.set_optimizer(Optimizer(optimizer.kind, replace(optimizer.args)))
        if self._wishes.clear:
            table.clear()
        table.reserve(max(0, plan.expected_rows() - table.size()))
        now = table.get_score() if uses_clock(table.options.score_strategy) else 0
        for shard in plan.shards:
            if REMOVED in shard.files:
                self._erase(plan, shard)
        once = plan.routing is not None or len(plan.shards) == 1
        filler = Filler(table, each_once=once and table.size() == 0)
        for shard, stored in read_ahead(lambda: self._stored(plan)):
            rows = to_table(plan, shard, owned(plan, stored), self._now_for(shard, now))
            filler.put(rows, scored=plan.scores)
            bar.add(plan.row_bytes * len(stored))
        return filler.lost()

    def _now_for(self, shard: Shard, now: int) -> int:
        """The reading that the shard's clock is to become."""
        end = self._wishes.clock_at_end
        if end is None or shard.clock is None:
            return now
        return max(0, shard.clock + min(0, now - end))

    def _erase(self, plan: Plan, shard: Shard) -> None:
        """Remove the ids that a delta says are gone."""
        entry = shard.files[REMOVED]
        with self.reader.open_file(plan.chosen.collection, plan.entry, shard, REMOVED) as file:
            reader = BlockReader(file, entry, self.reader.manifest.block_bytes)
            ids = reader.read((entry.bytes // 8,), torch.int64)
        mine = plan.mine(ids)
        if mine is not None:
            ids = ids[mine]
        plan.table.erase(ids.to(plan.table.device))

    def _stored(self, plan: Plan) -> Iterator[tuple[Shard, StoredRows]]:
        for shard in plan.shards:
            for stored in self.reader.rows(
                plan.chosen.collection,
                plan.entry,
                shard,
                state=plan.state,
                scores=plan.scores,
                buffers=2,  # one is read while the other is inserted
            ):
                yield shard, stored

    def _counter(self, plan: Plan) -> Counts:
        """The ids of this rank in the admission counter, and their counts."""
        ids, counts = [], []
        for shard in plan.shards:
            some_ids, some_counts = self.reader.counter(plan.chosen.collection, plan.entry, shard)
            mine = plan.mine(some_ids)
            ids.append(some_ids if mine is None else some_ids[mine])
            counts.append(some_counts if mine is None else some_counts[mine])
        device = plan.table.device
        return torch.cat(ids).to(device), torch.cat(counts).to(device)


def open_checkpoint(
    path: str, chosen: Sequence[Chosen], identity: str | None = None
) -> CheckpointReader:
    """The checkpoint in ``path``, of this or an older layout. ``chosen``: the tables that are
    wanted, from which what older layouts do not say is taken. ``identity``: of a checkpoint that
    was seen there."""
    if identity is not None:
        return CheckpointReader.open_known(path, identity)
    try:
        return CheckpointReader.open(path)
    except NoCheckpointError:
        older = open_legacy(path, chosen)
        if older is None:
            raise
        return older


def _not_read(plan: Plan) -> tuple[str, ...]:
    """The roles of a table's files that are not read where nothing is verified."""
    read = {*plan.roles, REMOVED}
    if plan.counter:
        read |= {"counter_keys", "counter_frequencies"}
    return (OPT_ARGS, *{role for one in plan.shards for role in one.files if role not in read})


def _names(tables: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name!r} of {collection!r}" for collection, name in tables) or "none"
