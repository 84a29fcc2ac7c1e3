"""The tables of a content in another layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dynamicemb.checkpoint.exchange import SUFFIXES
from dynamicemb.checkpoint.exchange_formats import FORMATS, Array
from dynamicemb.checkpoint.index import with_buckets, with_index
from dynamicemb.checkpoint.manifest import MANIFEST_NAME
from dynamicemb.checkpoint.names import distinct_stems
from dynamicemb.checkpoint.opt_args import opt_args_json
from dynamicemb.checkpoint.writer import TableSource, write_shards
from dynamicemb.cli.contents.base import Batch, Columns, Content, TableInfo
from dynamicemb.cli.contents.checkpoints import CheckpointContent
from dynamicemb.cli.contents.meta import describe, progress_of
from dynamicemb.errors import InvalidArgumentError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbTableOptions, ScoreStrategy
from dynamicemb.routing import Routing
from dynamicemb.table.rows import Rows

LAYOUTS = ("checkpoint", "upstream", *FORMATS, "oneembedding")
SUFFIX_OF = {format_: suffix for suffix, format_ in SUFFIXES.items()}

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Wanted:
    """How to write. ``world_size``, ``dist_type``: of layouts that have a part for each rank;
    ``None``: as the source has it."""

    state: bool = True
    scores: bool = True
    counter: bool = True
    world_size: int | None = None
    dist_type: str | None = None
    serving_index: bool = False
    snapshot: str = "converted"


@dataclass(frozen=True)
class Done:
    """How many rows were written, and what a user should know of them."""

    rows: int
    warnings: tuple[str, ...] = ()


def losses(table: TableInfo, layout: str, wanted: Wanted) -> list[str]:
    """What the layout has no place for, of what the table has and was asked for."""
    lost = []
    if layout == "oneembedding" and table.strategy is not None and wanted.scores:
        lost.append("scores")
    if layout not in ("checkpoint", "upstream") and table.counted is not None and wanted.counter:
        lost.append("the admission counter")
    if layout == "upstream" and table.dtype != torch.float32:
        lost.append(f"that the table is {str(table.dtype).removeprefix('torch.')} (no bit of rows)")
    return lost


def chosen(table: TableInfo, wanted: Wanted) -> TableInfo:
    """The table with only what is to be written."""
    return replace(
        table,
        strategy=table.strategy if wanted.scores else None,
        state_dim=table.state_dim if wanted.state else 0,
    )


def write(
    path: Path, content: Content, layout: str, wanted: Wanted, names: Names, advance: Advance
) -> Done:
    """Write the tables of ``content`` to ``path``, where nothing is."""
    if layout in FORMATS:
        return Done(_write_files(path, content, layout, wanted, names, advance))
    if layout == "oneembedding":
        return Done(_write_one_embedding(path, content, wanted, names, advance))
    return _write_checkpoint(path, content, wanted, names, advance, upstream=layout == "upstream")


def passes(content: Content, layout: str, wanted: Wanted) -> int:
    """How often the rows are read."""
    if layout == "numpy":
        return 4
    if layout in ("checkpoint", "upstream"):
        return max(
            1 if _same_parts(table, _routing(table, wanted)) else _parts(table, wanted)
            for table in content.tables
        )
    return 1


@dataclass(frozen=True)
class Names:
    """Other names for the one table that is written; ``None``: those it has."""

    collection: str | None = None
    name: str | None = None

    def of(self, table: TableInfo) -> TableInfo:
        return replace(
            table,
            collection=table.collection if self.collection is None else self.collection,
            name=table.name if self.name is None else self.name,
            rank=None,
        )


# ---- files of rows ----


def _write_files(
    path: Path, content: Content, layout: str, wanted: Wanted, names: Names, advance: Advance
) -> int:
    suffix = SUFFIX_OF[layout]
    single = path.suffix == suffix
    if not single:
        path.mkdir()
    stems = distinct_stems(_file_stem(names.of(table)) for table in content.tables)
    rows = 0
    for table in content.tables:
        file = path if single else path / (stems[_file_stem(names.of(table))] + suffix)
        rows += _write_file(file, content, table, layout, wanted, names, advance)
    return rows


def _file_stem(table: TableInfo) -> str:
    return f"{table.collection}.{table.name}" if table.collection else table.name


def _write_file(
    file: Path,
    content: Content,
    table: TableInfo,
    layout: str,
    wanted: Wanted,
    names: Names,
    advance: Advance,
) -> int:
    count = content.count(table)
    kept = chosen(table, wanted)
    arrays = {
        "ids": Array((count,), torch.int64),
        "embeddings": Array((count, table.dim), table.value_dtype),
    }
    if kept.state_dim:
        arrays["state"] = Array((count, kept.state_dim), torch.float32)
    words = len(kept.score_names)
    if words:
        arrays["scores"] = Array((count,) if words == 1 else (count, words), torch.uint64)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for batch in _rows(content, table, None, kept, advance):
            columns = {
                "ids": batch.ids,
                "embeddings": batch.embeddings,
                "state": batch.state,
                "scores": None if batch.scores is None else batch.scores.view(torch.uint64),
            }
            yield {name: one for name in arrays if (one := columns[name]) is not None}

    FORMATS[layout].write(file, arrays, json.dumps(describe(names.of(kept))), batches)
    return count


def _rows(
    content: Content, table: TableInfo, part: int | None, kept: TableInfo, advance: Advance
) -> Iterator[Batch]:
    columns = Columns(state=kept.state_dim > 0, scores=kept.strategy is not None)
    size = kept.row_bytes(columns)
    for batch in content.batches(table, part, columns):
        yield batch
        advance(size * len(batch))


# ---- folders of OneEmbedding ----


def _write_one_embedding(
    path: Path, content: Content, wanted: Wanted, names: Names, advance: Advance
) -> int:
    from dynamicemb.one_embedding.folders import rank_folder
    from dynamicemb.one_embedding.persistent import noting_writer

    (table,) = content.tables
    kept = replace(chosen(table, wanted), strategy=None)
    optimizer = kept.optimizer
    whole = optimizer is not None and optimizer.state_dim(table.dim) == kept.state_dim
    note = {
        **describe(names.of(kept)),
        "name": names.of(kept).name,
        "embedding_dim": table.dim,
        "tables_in_keys": False,
        "optimizer": optimizer.kind.name if optimizer is not None and whole else None,
        "progress": asdict(progress_of(table)),
    }
    ranks = _parts(table, wanted)
    path.mkdir()
    folders = [rank_folder(str(path), rank, ranks) for rank in range(ranks)]
    rows = 0
    with noting_writer(folders, wanted.snapshot, table.dim + kept.state_dim, note) as writer:
        for batch in _rows(content, table, None, kept, advance):
            assert batch.embeddings is not None
            floats = batch.embeddings.float()
            if batch.state is not None:
                floats = torch.cat([floats, batch.state], 1)
            writer.write(batch.ids.numpy(), floats.numpy())
            rows += len(batch)
    return rows


# ---- checkpoints ----


def _parts(table: TableInfo, wanted: Wanted) -> int:
    return len(table.parts) if wanted.world_size is None else wanted.world_size


def _routing(table: TableInfo, wanted: Wanted, *, upstream: bool = False) -> Routing | None:
    """How ids are spread over the parts that are written."""
    size = _parts(table, wanted)
    present = table.routing
    kind = wanted.dist_type or ("roundrobin" if present is None else present.dist_type)
    if upstream and kind == "continuous":  # ids would have to become relative
        kind = "roundrobin"
    if size == 1 and present is None and wanted.dist_type is None:
        return None
    if kind != "continuous":
        return Routing(kind, size, 0)
    if present is None or present.block is None:
        raise InvalidArgumentError(
            "--dist-type is 'continuous'; allowed: for tables that are so already, whose number of "
            "rows is known"
        )
    return Routing.of_table(kind, present.block * present.world_size, size, 0)


def _same_parts(table: TableInfo, routing: Routing | None) -> bool:
    """Whether the parts that are written are those that are read."""
    if routing is None or len(table.parts) == 1 == routing.world_size:
        return len(table.parts) == 1
    return (
        routing == table.routing
        and len(table.parts) == routing.world_size
        and [part.rank for part in table.parts] == list(range(len(table.parts)))
    )


def _write_checkpoint(
    path: Path,
    content: Content,
    wanted: Wanted,
    names: Names,
    advance: Advance,
    *,
    upstream: bool,
) -> Done:
    sizes = {_parts(table, wanted) for table in content.tables}
    if len(sizes) > 1:
        raise InvalidArgumentError(
            f"the tables have parts of {sorted(sizes)} ranks; --world-size says how many to write"
        )
    written = [_Written(content, one, wanted, names, advance, upstream) for one in content.tables]
    shards = [[one.source(rank) for one in written] for rank in range(sizes.pop())]
    write_shards(path, shards, progress=False)
    if not upstream:
        return Done(sum(one.rows for one in written))
    (path / MANIFEST_NAME).unlink()
    reserved = tuple(
        f"{one.label}: ids -4 to -1 are {one.reserved} of its rows; upstream's tables cannot have "
        "them"
        for one in written
        if one.reserved
    )
    return Done(sum(one.rows for one in written), reserved)


class _Written:
    """A table that is written, part by part."""

    def __init__(
        self,
        content: Content,
        table: TableInfo,
        wanted: Wanted,
        names: Names,
        advance: Advance,
        upstream: bool,
    ) -> None:
        self._content, self._table, self._wanted = content, table, wanted
        self._advance, self._upstream = advance, upstream
        self._kept = chosen(table, wanted)
        self._called = names.of(table)
        self._routing = _routing(table, wanted, upstream=upstream)
        self._counter = content.counter(table) if wanted.counter else None
        self.label = table.label
        self.rows = 0
        self.reserved = 0  # of them, with ids that mark empty places of upstream's tables

    def source(self, rank: int) -> TableSource:
        table, kept = self._table, self._kept
        routing = None if self._routing is None else replace(self._routing, rank=rank)
        same = _same_parts(table, self._routing)
        progress = table.parts[rank].progress if same else progress_of(table)
        clock = table.parts[rank].clock if same else table.clock
        strategy = _strategy(kept)
        optimizer = kept.optimizer or Optimizer(OptimizerKind.SGD, OptimizerArgs())
        state = self._wanted.state and optimizer.state_dim(table.dim) == kept.state_dim
        dist_type = "roundrobin" if routing is None else routing.dist_type
        source = TableSource(
            collection=self._called.collection,
            name=self._called.name,
            dim=table.dim,
            dtype=table.dtype,
            value_dtype=torch.float32 if self._upstream else table.value_dtype,
            strategy=strategy,
            scores=kept.strategy is not None,
            state=state,
            optimizer=optimizer,
            routing=routing,
            clock=clock or 0,
            progress=progress,
            options=table.options,
            opt_args=opt_args_json(
                optimizer,
                strategy,
                iteration=progress.iteration,
                step=progress.step,
                dist_type=dist_type,
            ),
            rows=table.rows,
            batches=lambda: self._batches(rank if same else None, routing),
            counter=self._counted(routing),
        )
        if self._wanted.serving_index and not self._upstream:
            return with_index(source)
        return source if self._upstream or not same else self._in_buckets(source, rank)

    def _in_buckets(self, source: TableSource, rank: int) -> TableSource:
        """Rows that lie in the order of buckets stay so."""
        buckets = None
        if isinstance(self._content, CheckpointContent):
            buckets = self._content.buckets(self._table, rank)
        return source if buckets is None else with_buckets(source, buckets)

    def _batches(self, part: int | None, routing: Routing | None) -> Iterator[Rows]:
        kept = self._kept
        for batch in _rows(self._content, self._table, part, kept, self._advance):
            some = batch
            if part is None and routing is not None and routing.world_size > 1:
                some = batch.some(routing.owned(batch.ids))
            self.rows += len(some)
            self.reserved += int(((some.ids >= -4) & (some.ids < 0)).sum())
            assert some.embeddings is not None
            count = len(some)
            none = torch.empty(count, 0, device="cpu")
            words = (
                torch.zeros(count, dtype=torch.int64, device="cpu")
                if some.scores is None
                else some.scores
            )
            yield Rows(some.ids, some.embeddings, none if some.state is None else some.state, words)

    def _counted(self, routing: Routing | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._counter is None or routing is None or routing.world_size == 1:
            return self._counter
        mine = routing.owned(self._counter[0])
        return self._counter[0][mine], self._counter[1][mine]


def _strategy(table: TableInfo) -> ScoreStrategy:
    """Of the scores; without any, that of a table that nothing is said of."""
    if table.strategy is not None:
        return table.strategy
    options = DynamicEmbTableOptions(dim=table.dim, max_capacity=1)
    return options.score_strategy


def labels(tables: Sequence[TableInfo]) -> str:
    """The names of tables, for a sentence."""
    return ", ".join(table.label for table in tables)
