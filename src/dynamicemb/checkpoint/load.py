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
from dynamicemb.checkpoint.dump import TableNames, checked_path, routing_of
from dynamicemb.checkpoint.fill import Filler, read_ahead
from dynamicemb.checkpoint.index import REMOVED
from dynamicemb.checkpoint.legacy import Chosen, open_legacy
from dynamicemb.checkpoint.manifest import Shard, TableEntry
from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reader import CheckpointReader, NoCheckpointError, StoredRows
from dynamicemb.checkpoint.scores import from_file, uses_clock
from dynamicemb.checkpoint.threads import one_thread_for_files
from dynamicemb.errors import CheckpointError, check_bool, wrong_value
from dynamicemb.nn.discovery import find_collections, select_tables
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import get_physical_score_order
from dynamicemb.routing import Routing
from dynamicemb.table import Progress, Rows, Table


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
    are compared, by all ranks, before the first row is inserted. Rows of the checkpoint overwrite
    rows of the same id; other rows stay. Memory in use is a few batches.

    table_names: as for :func:`DynamicEmbDump`.
    optim: load optimizer state, with the hyper-parameters (the learning rate among them) and the
        count of updates; without, loaded rows start from the optimizer's initial state. A
        checkpoint without state, or of another optimizer, warns.
    counter: load admission counters, in place of those of the tables.
    scores: load scores. TIMESTAMP scores keep their age; the step of STEP and the score of
        CUSTOMIZED go on from the dump. Without, rows are scored as in a training batch.
    clear: remove all rows of these tables first.
    verify_first: compare all checksums before the first row is inserted. Without, each block is
        compared as its rows are read: faster by one pass over the files, but damage may be found
        when a part of the rows is in the tables (those that were empty are then emptied again).
    progress: show a progress bar; ``None``: if standard error is a terminal.

    If a table is too small, the rows with the highest scores stay, and the number of the others is
    in the report and in a warning. Checkpoints of older layouts, which have no checksums, are read
    with a warning.

    Raises, on every rank and with the tables as they were: ``CheckpointError`` (no checkpoint
    there), ``CorruptCheckpointError`` (not as it was written), ``InvalidArgumentError`` (it does
    not fit the model: other dim, other score strategy, unknown names). Should a file fail only
    after it was verified, tables that were empty are empty again, others have a part of the rows.
    """
    wishes = Wishes(
        optim=check_bool("optim", optim),
        counter=check_bool("counter", counter),
        scores=check_bool("scores", scores),
        clear=check_bool("clear", clear),
    )
    check_bool("verify_first", verify_first)
    path = checked_path(path)
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
        loading.plan(chosen, explicit=table_names is not None)
        if verify_first:
            loading.verify()
        return loading.load()
    finally:
        loading.close()


@dataclass(frozen=True)
class Wishes:
    """What to load. ``clock_at_end``: for the base and the deltas of a chain, the clock at the end
    of it. Their scores stay as they are, so that they agree with each other, unless the table's
    clock is behind that."""

    optim: bool
    counter: bool
    scores: bool
    clear: bool
    clock_at_end: int | None = None


@dataclass(frozen=True)
class _Plan:
    """One table: where its rows are and what this rank takes of them.

    shards: those this rank reads. exact: they are this rank's own, to be taken whole; else rows are
    chosen by ``routing``, and all of them where that is ``None``.
    """

    chosen: Chosen
    entry: TableEntry
    routing: Routing | None
    shards: tuple[Shard, ...]
    exact: bool
    state: bool
    scores: bool
    counter: bool

    @property
    def table(self) -> Table:
        return self.chosen.table

    def expected_rows(self) -> int:
        """About how many rows this rank gets."""
        rows = sum(shard.rows for shard in self.shards)
        if self.exact or self.routing is None:
            return rows
        return rows // self.routing.world_size

    @property
    def row_bytes(self) -> int:
        """Bytes that are read for a row."""
        roles = ["keys", "values"]
        roles += ["scores"] if self.scores else []
        roles += ["opt_values"] if self.state else []
        return sum(self.entry.row_bytes(role) for role in roles)

    def read_bytes(self) -> int:
        return self.row_bytes * sum(shard.rows for shard in self.shards)


class Loading:
    """The three steps of a load, each done by all ranks or by none."""

    def __init__(self, path: str, ranks: Ranks, wishes: Wishes, progress: bool | None) -> None:
        self._path = path
        self._ranks = ranks
        self._wishes = wishes
        self._shown = progress if ranks.rank == 0 else False
        self._reader: CheckpointReader | None = None
        self._plans: list[_Plan] = []
        self._missing: list[tuple[str, str]] = []

    @property
    def reader(self) -> CheckpointReader:
        assert self._reader is not None
        return self._reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    # ---- first: what is where, without a look at the rows ----

    def plan(self, chosen: Sequence[Chosen], *, explicit: bool) -> None:
        """Open the checkpoint and see that it fits the model. ``explicit``: every chosen table must
        be there; else only one of them."""

        def prepare() -> str:
            self._reader = open_checkpoint(self._path, chosen)
            if self._wishes.clock_at_end is None and "delta" in self.reader.manifest.extra:
                raise CheckpointError(
                    f"{self._path!r} is a delta; allowed: a checkpoint, or apply_delta on the chain"
                )
            for one in chosen:
                if self.reader.has(one.collection, one.table.name):
                    self._plans.append(self._plan_of(one))
                else:
                    self._missing.append((one.collection, one.table.name))
            if self._missing and (explicit or not self._plans):
                raise CheckpointError(
                    f"the checkpoint in {self._path!r} has no tables {_names(self._missing)}; it "
                    f"has {_names(self.reader.all_tables())}"
                )
            return self.reader.manifest.id

        identities = self._ranks.together(prepare)
        if len(set(identities)) > 1:
            raise CheckpointError(
                f"the ranks see different checkpoints in {self._path!r}: {sorted(set(identities))}"
            )
        if self._missing:
            warnings.warn(
                f"the checkpoint in {self._path!r} has no tables {_names(self._missing)}; they "
                "stay as they are",
                UserWarning,
                stacklevel=4,
            )

    def _plan_of(self, chosen: Chosen) -> _Plan:
        table, wishes = chosen.table, self._wishes
        entry = self.reader.table(chosen.collection, table.name)
        if entry.dim != table.dim:
            raise wrong_value(
                f"dim of table {table.name!r}", table.dim, f"{entry.dim}, as in the checkpoint"
            )
        scores = wishes.scores and entry.scores
        saved = get_physical_score_order(entry.strategy)
        if scores and saved != get_physical_score_order(table.options.score_strategy):
            raise wrong_value(
                f"score_strategy of table {table.name!r}",
                table.options.score_strategy,
                f"{entry.strategy!r}, as in the checkpoint, or scores=False",
            )
        routing = routing_of(chosen.module, table)
        shards, exact = _shards_for(entry, routing, self._ranks)
        return _Plan(
            chosen=chosen,
            entry=entry,
            routing=routing,
            shards=shards,
            exact=exact,
            state=wishes.optim and self._can_load_state(chosen, entry),
            scores=scores,
            counter=wishes.counter and self._can_load_counter(table, entry),
        )

    def _can_load_state(self, chosen: Chosen, entry: TableEntry) -> bool:
        table, reason = chosen.table, None
        if not entry.state:
            reason = "the checkpoint was written without optimizer state"
        elif chosen.module.fused and entry.optimizer.kind is not table.optimizer.kind:
            reason = (
                f"the checkpoint has the state of {entry.optimizer.kind.name}, and the table uses "
                f"{table.optimizer.kind.name}"
            )
        if reason is not None:
            warnings.warn(
                f"optimizer state of table {table.name!r} is not loaded: {reason}",
                UserWarning,
                stacklevel=2,
            )
        return reason is None

    @staticmethod
    def _can_load_counter(table: Table, entry: TableEntry) -> bool:
        reason = None
        if any(shard.counter_rows is None for shard in entry.shards):
            reason = "the checkpoint was written without it"
        elif table.options.admission_counter is None:
            reason = "the table has none"
        if reason is not None:
            warnings.warn(
                f"the admission counter of table {table.name!r} is not loaded: {reason}",
                UserWarning,
                stacklevel=2,
            )
        return reason is None

    # ---- second: every checksum, before the first row ----

    def verify(self) -> None:
        """Check the files of the chosen tables; where ranks read the same shards, each checks some
        of them."""
        rank, size = self._ranks.rank, self._ranks.size
        work = [
            (
                plan,
                [shard.rank for shard in plan.shards if plan.exact or shard.rank % size == rank],
            )
            for plan in self._plans
        ]
        total = sum(
            entry.bytes
            for plan, some in work
            for shard in plan.entry.shards
            if shard.rank in some
            for entry in shard.files.values()
        )

        def check() -> None:
            with ProgressBar("verify", total, shown=self._shown) as bar:
                for plan, some in work:
                    key = (plan.chosen.collection, plan.entry.name)
                    self.reader.verify([key], shards=some, advance=bar.add)

        self._ranks.together(check)

    # ---- third: rows ----

    def load(self) -> LoadReport:
        """Insert the rows, and let counters and steps go on where the dump was."""
        total = sum(plan.read_bytes() for plan in self._plans)
        empty = [plan.table for plan in self._plans if len(plan.table) == 0 or self._wishes.clear]
        try:
            with (
                one_thread_for_files(),
                ProgressBar("load", total, shown=self._shown) as bar,
            ):
                lost = self._ranks.together(lambda: [self._load(plan, bar) for plan in self._plans])
        except BaseException:  # a file that is damaged, or has become so since it was verified
            for table in empty:
                table.clear()
            raise
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

    def _load(self, plan: _Plan, bar: ProgressBar) -> int:
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
        filler = Filler(table)
        for shard, stored in read_ahead(lambda: self._stored(plan)):
            rows = _to_table(plan, shard, _owned(plan, stored), self._now_for(shard, now))
            filler.put(rows, scored=plan.scores)
            bar.add(plan.row_bytes * len(stored))
        if plan.counter:
            self._load_counter(plan)
        _restore_progress(plan)
        return filler.lost

    def _now_for(self, shard: Shard, now: int) -> int:
        """The reading that the shard's clock is to become."""
        end = self._wishes.clock_at_end
        if end is None or shard.clock is None:
            return now
        return max(0, shard.clock + min(0, now - end))

    def _erase(self, plan: _Plan, shard: Shard) -> None:
        """Remove the ids that a delta says are gone."""
        entry = shard.files[REMOVED]
        with self.reader.open_file(plan.chosen.collection, plan.entry, shard, REMOVED) as file:
            reader = BlockReader(file, entry, self.reader.manifest.block_bytes)
            ids = reader.read((entry.bytes // 8,), torch.int64)
        if not plan.exact and plan.routing is not None:
            ids = ids[plan.routing.owned(ids)]
        plan.table.erase(ids.to(plan.table.device))

    def _stored(self, plan: _Plan) -> Iterator[tuple[Shard, StoredRows]]:
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

    def _load_counter(self, plan: _Plan) -> None:
        ids, counts = [], []
        for shard in plan.shards:
            some_ids, some_counts = self.reader.counter(plan.chosen.collection, plan.entry, shard)
            if not plan.exact and plan.routing is not None:
                mine = plan.routing.owned(some_ids)
                some_ids, some_counts = some_ids[mine], some_counts[mine]
            ids.append(some_ids)
            counts.append(some_counts)
        device = plan.table.device
        plan.table.restore_counter(torch.cat(ids).to(device), torch.cat(counts).to(device))


def open_checkpoint(path: str, chosen: Sequence[Chosen]) -> CheckpointReader:
    """The checkpoint in ``path``, of this or an older layout. ``chosen``: the tables that are
    wanted, from which what older layouts do not say is taken."""
    try:
        return CheckpointReader.open(path)
    except NoCheckpointError:
        older = open_legacy(path, chosen)
        if older is None:
            raise
        return older


def _shards_for(
    entry: TableEntry, routing: Routing | None, ranks: Ranks
) -> tuple[tuple[Shard, ...], bool]:
    """The shards this rank reads, and whether they are its own, to be taken whole."""
    if routing is None:
        if entry.routing is None and len(entry.shards) == ranks.size:
            return (entry.shards[ranks.rank],), True
        return entry.shards, False
    if entry.routing == replace(routing, rank=0):
        own = tuple(shard for shard in entry.shards if shard.owner == routing.rank)
        if own:
            return own, True
    return entry.shards, False


def _owned(plan: _Plan, stored: StoredRows) -> StoredRows:
    """The rows that are this rank's."""
    if plan.exact or plan.routing is None or plan.routing.world_size == 1:
        return stored
    mine = plan.routing.owned(stored.ids)
    return StoredRows(
        *(None if part is None else part[mine] for part in vars(stored).values())  # type: ignore[arg-type]
    )


def _to_table(plan: _Plan, shard: Shard, stored: StoredRows, now: int) -> Rows:
    """Rows as the table takes them."""
    table = plan.table
    assert stored.embeddings is not None
    state = stored.state
    if not plan.state:
        initial = table.optimizer.initial_state(table.dim)
        state = initial.expand(len(stored), -1).contiguous()
    if stored.scores is None:
        shape = (len(stored),) if table.score_words == 1 else (len(stored), 2)
        scores = torch.zeros(shape, dtype=torch.int64)
    else:
        scores = from_file(stored.scores, plan.entry.strategy, shard.clock, now)
    assert state is not None
    return Rows(
        stored.ids.to(table.device),
        stored.embeddings.to(table.dtype).to(table.device),
        state.to(table.device),
        scores.to(table.device),
    )


def _restore_progress(plan: _Plan) -> None:
    """Go on counting where the dump was; over several shards, from the highest of each number."""
    saved = [shard.progress for shard in plan.shards]
    present = plan.table.progress()
    custom = [one.custom_score for one in saved if one.custom_score is not None]
    seeds = {one.seed for one in saved}
    restored = Progress(
        step=max(one.step for one in saved) if plan.scores else present.step,
        custom_score=max(custom) if custom and plan.scores else present.custom_score,
        iteration=max(one.iteration for one in saved) if plan.state else present.iteration,
        next_row_number=max(present.next_row_number, *(one.next_row_number for one in saved)),
        admission_calls=max(one.admission_calls for one in saved),
        seed=seeds.pop() if len(seeds) == 1 else present.seed,
    )
    plan.table.restore_progress(restored)


def _names(tables: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name!r} of {collection!r}" for collection, name in tables) or "none"
