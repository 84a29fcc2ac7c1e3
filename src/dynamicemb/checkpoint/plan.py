"""What a load takes from a checkpoint for each table, and in what form the table gets it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from dynamicemb.checkpoint.dump import routing_of
from dynamicemb.checkpoint.legacy import Chosen
from dynamicemb.checkpoint.manifest import Shard, TableEntry
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.reader import StoredRows
from dynamicemb.checkpoint.scores import from_file
from dynamicemb.errors import wrong_value
from dynamicemb.options import get_physical_score_order
from dynamicemb.routing import Routing
from dynamicemb.table import Progress, Rows, Table


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
class Plan:
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
    def roles(self) -> tuple[str, ...]:
        """The files that rows are read from."""
        scores = ("scores",) if self.scores else ()
        state = ("opt_values",) if self.state else ()
        return ("keys", "values", *scores, *state)

    @property
    def row_bytes(self) -> int:
        """Bytes that are read for a row."""
        return sum(self.entry.row_bytes(role) for role in self.roles)

    def read_bytes(self) -> int:
        return self.row_bytes * sum(shard.rows for shard in self.shards)

    def mine(self, ids: torch.Tensor) -> torch.Tensor | None:
        """bool [n]: which of the ids of ``shards`` are this rank's; ``None``: all."""
        if self.exact or self.routing is None or self.routing.world_size == 1:
            return None
        return self.routing.owned(ids)


def plan_of(chosen: Chosen, entry: TableEntry, wishes: Wishes, ranks: Ranks) -> Plan:
    """What to do for a table that the checkpoint has. Raises ``InvalidArgumentError`` if it does
    not fit the table."""
    table = chosen.table
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
    shards, exact = _shards_for(entry, routing, ranks)
    return Plan(
        chosen=chosen,
        entry=entry,
        routing=routing,
        shards=shards,
        exact=exact,
        state=wishes.optim and _can_load_state(chosen, entry),
        scores=scores,
        counter=wishes.counter and _can_load_counter(table, entry),
    )


def _can_load_state(chosen: Chosen, entry: TableEntry) -> bool:
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


def owned(plan: Plan, stored: StoredRows) -> StoredRows:
    """The rows that are this rank's."""
    mine = plan.mine(stored.ids)
    if mine is None:
        return stored
    return StoredRows(
        *(None if part is None else part[mine] for part in vars(stored).values())  # type: ignore[arg-type]
    )


def to_table(plan: Plan, shard: Shard, stored: StoredRows, now: int) -> Rows:
    """Rows as the table takes them."""
    table = plan.table
    assert stored.embeddings is not None
    state = stored.state
    if not plan.state:
        initial = table.optimizer.initial_state(table.dim)
        state = initial.expand(len(stored), -1).contiguous()
    if stored.scores is None:
        shape = (len(stored),) if table.score_words == 1 else (len(stored), 2)
        scores = torch.zeros(shape, dtype=torch.int64, device="cpu")
    else:
        scores = from_file(stored.scores, plan.entry.strategy, shard.clock, now)
    assert state is not None
    return Rows(
        stored.ids.to(table.device),
        stored.embeddings.to(table.dtype).to(table.device),
        state.to(table.device),
        scores.to(table.device),
    )


def restore_progress(plan: Plan) -> None:
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
