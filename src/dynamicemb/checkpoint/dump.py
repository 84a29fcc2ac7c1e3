"""``DynamicEmbDump`` and its variant that writes in the background."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dynamicemb.checkpoint.index import with_buckets, with_index
from dynamicemb.checkpoint.opt_args import opt_args_json, options_json
from dynamicemb.checkpoint.ranks import Ranks, background_group
from dynamicemb.checkpoint.scores import uses_clock
from dynamicemb.checkpoint.writer import TableSource, write_checkpoint
from dynamicemb.errors import check_bool, check_path
from dynamicemb.nn.discovery import find_collections, select_tables
from dynamicemb.nn.module import DynamicModule
from dynamicemb.optimizers import Optimizer
from dynamicemb.routing import Routing
from dynamicemb.table import Rows, Table

logger = logging.getLogger(__name__)

#: Bytes of rows that are exported at a time.
BATCH_BYTES = 8 * 2**20

TableNames = Mapping[str, Sequence[str]] | Sequence[str] | None


def DynamicEmbDump(
    path: str | os.PathLike[str],
    model: nn.Module,
    table_names: TableNames = None,
    optim: bool = False,
    pg: Any = None,
    *,
    counter: bool = False,
    allow_overwrite: bool = False,
    scores: bool = True,
    compact: bool = False,
    serving_index: bool = False,
    progress: bool | None = None,
) -> None:
    """Write the dynamic tables of ``model`` to the folder ``path``, as one checkpoint of all ranks.

    Every rank of ``pg`` must call it (``None``: of the default group; or this process alone), with
    a path on storage that all of them see. It is all or nothing: until the last step, and if any
    rank fails or is killed, the folder holds the checkpoint that it held before. Each rank streams
    its rows to its own files; memory in use is a few batches. A row's embedding, state and score
    are from one instant; rows that other threads insert or move meanwhile may be missed or doubled,
    so leave the tables alone until it returns, or use :func:`dump_async`.

    table_names: ``{collection: [table, ...]}`` (a collection by its path or the last part of it;
        others are left out), or ``[table, ...]``, or ``None`` for all.
    optim, counter, scores: whether to write optimizer state, admission counters, and scores.
    allow_overwrite: replace the checkpoint that is at ``path``, once the new one is committed.
        Without, the folder must be empty. Files of other kinds stay.
    compact: write float16 and bfloat16 rows in their own width. By default rows are float32, which
        other readers of this layout expect, and which loses nothing.
    serving_index: also write an index, with which a ``ServingTable`` finds ids faster: 12 bytes per
        row, and 20 bytes of memory per row until it is written.
    progress: show a progress bar; ``None``: if standard error is a terminal.

    Warns if there are no dynamic tables. Raises ``CheckpointError`` if the folder is not empty or a
    file cannot be written, on every rank.
    """
    flags = DumpFlags(optim, counter, scores, compact, serving_index)
    chosen = _chosen(model, table_names)
    if chosen is None:
        return
    write_checkpoint(
        check_path("path", path),
        [table_source(path_, module, table, flags) for path_, module, table in chosen],
        Ranks(pg),
        allow_overwrite=check_bool("allow_overwrite", allow_overwrite),
        progress=progress,
    )


class DumpHandle:
    """A dump that runs in the background."""

    def __init__(self, path: str, future: Future[str] | None) -> None:
        self.path = path
        self._future = future

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future is None or self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed. Raises what went wrong, as
        :func:`DynamicEmbDump` does, or ``TimeoutError`` after ``timeout`` seconds."""
        if self._future is not None:
            self._future.result(timeout)


# One at a time, in the order of the calls, which is the same on every rank.
_background = ThreadPoolExecutor(1, thread_name_prefix="dynamicemb-async-dump")


def dump_async(
    path: str | os.PathLike[str],
    model: nn.Module,
    table_names: TableNames = None,
    optim: bool = False,
    pg: Any = None,
    *,
    counter: bool = False,
    allow_overwrite: bool = False,
    scores: bool = True,
    compact: bool = False,
    serving_index: bool = False,
) -> DumpHandle:
    """:func:`DynamicEmbDump` that returns as soon as the rows are copied aside.

    Training may go on at once: the checkpoint holds the tables as they were at the call. Until it
    is written, the copy needs as much main memory as the rows that are saved. Call ``wait()`` of
    the result before relying on the checkpoint; an error that nobody waits for is logged. Dumps
    run one after the other; the interpreter does not end before they do.
    """
    flags = DumpFlags(optim, counter, scores, compact, serving_index)
    chosen = _chosen(model, table_names)
    allow_overwrite = check_bool("allow_overwrite", allow_overwrite)
    target = check_path("path", path)
    if chosen is None:
        return DumpHandle(target, None)
    ranks = Ranks(pg)
    if ranks.size > 1:
        ranks = Ranks(background_group(pg))
    sources = [
        _staged(table_source(where, module, table, flags)) for where, module, table in chosen
    ]
    return DumpHandle(target, _background.submit(_write, target, sources, ranks, allow_overwrite))


def _write(path: str, sources: list[TableSource], ranks: Ranks, allow_overwrite: bool) -> str:
    try:
        return write_checkpoint(
            path, sources, ranks, allow_overwrite=allow_overwrite, progress=False
        )
    except BaseException as error:  # it is raised by wait(), if somebody calls that
        logger.error("a dump in the background failed: %s", error)
        raise


class DumpFlags:
    """What to write."""

    def __init__(
        self, optim: Any, counter: Any, scores: Any, compact: Any, serving_index: Any
    ) -> None:
        self.optim = check_bool("optim", optim)
        self.counter = check_bool("counter", counter)
        self.scores = check_bool("scores", scores)
        self.compact = check_bool("compact", compact)
        self.serving_index = check_bool("serving_index", serving_index)


def _chosen(
    model: nn.Module, table_names: TableNames
) -> list[tuple[str, DynamicModule, Table]] | None:
    """(collection path, module, table) of what is to be written; ``None``, with a warning, if the
    model has no dynamic table."""
    collections = find_collections(model)
    if not collections:
        warnings.warn(
            f"{type(model).__name__} has no dynamic embedding tables; nothing is dumped",
            UserWarning,
            stacklevel=3,
        )
        return None
    selected = select_tables(collections, table_names)
    return [
        (path, module, table)
        for path, tables in selected.items()
        for module, table in tables.values()
    ]


def routing_of(module: DynamicModule, table: Table) -> Routing | None:
    """How the table's ids are spread over ranks; ``None`` if they are not."""
    routings = getattr(module, "routings", None)
    return None if routings is None else routings.get(table.name)


def batch_rows(row_bytes: int) -> int:
    """Rows of one batch."""
    return max(1, min(2**20, BATCH_BYTES // row_bytes))


def table_source(
    path: str,
    module: DynamicModule,
    table: Table,
    flags: DumpFlags,
    *,
    changed_since: int | None = None,
    removed: torch.Tensor | None = None,
) -> TableSource:
    """The table as this rank writes it; for a delta, the rows that changed since a mark and the ids
    that were removed."""
    module.check_written()
    flush = getattr(module, "flush", None)
    if callable(flush):
        flush()
    strategy = table.options.score_strategy
    routing = routing_of(module, table)
    progress = table.progress()
    counter = table.export_counter() if flags.counter else None
    if flags.counter and counter is None:
        warnings.warn(
            f"counter is True and table {table.name!r} has no admission counter",
            UserWarning,
            stacklevel=3,
        )
    row_bytes = table.dim * table.dtype.itemsize + 4 * table.state_dim + 8 * (1 + table.score_words)

    def batches() -> Iterator[Rows]:
        for rows in table.export(batch_size=batch_rows(row_bytes), changed_since=changed_since):
            yield Rows(rows.ids.cpu(), rows.embeddings.cpu(), rows.state.cpu(), rows.scores.cpu())

    source = TableSource(
        collection=path,
        name=table.name,
        dim=table.dim,
        dtype=table.dtype,
        value_dtype=table.dtype if flags.compact else torch.float32,
        strategy=strategy,
        scores=flags.scores,
        state=flags.optim,
        optimizer=Optimizer(table.optimizer.kind, replace(table.optimizer.args)),
        routing=routing,
        clock=table.get_score() if uses_clock(strategy) else 0,
        progress=progress,
        options=options_json(table.options),
        opt_args=opt_args_json(
            table.optimizer,
            strategy,
            iteration=progress.iteration,
            step=progress.step,
            dist_type=table.options.dist_type if routing is None else routing.dist_type,
        ),
        rows=table.size(),
        batches=batches,
        counter=None if counter is None else (counter[0].cpu(), counter[1].cpu()),
    )
    if flags.serving_index:
        return with_index(source, removed)
    buckets = table.export_buckets()
    return source if buckets is None or removed is not None else with_buckets(source, buckets)


def _staged(source: TableSource) -> TableSource:
    """The same with the rows copied into main memory now; each batch is let go once written."""
    batches = [_only_needed(rows, source) for rows in source.batches()]
    batches.reverse()

    def drain() -> Iterator[Rows]:
        while batches:
            yield batches.pop()

    return replace(source, batches=drain)


def _only_needed(rows: Rows, source: TableSource) -> Rows:
    state = rows.state if source.state else rows.state[:, :0].clone()
    return Rows(rows.ids, rows.embeddings, state, rows.scores)
