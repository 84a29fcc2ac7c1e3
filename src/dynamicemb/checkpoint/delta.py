"""``dump_delta`` and ``apply_delta``: a base checkpoint and what changed since, delta by delta."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynamicemb.checkpoint.chain import (
    BASE,
    MAX_DELTAS,
    ChainLink,
    delta_extra,
    delta_name,
    read_chain,
)
from dynamicemb.checkpoint.dump import DumpFlags, TableNames, table_source
from dynamicemb.checkpoint.files import Directory
from dynamicemb.checkpoint.legacy import Chosen
from dynamicemb.checkpoint.load import Loading
from dynamicemb.checkpoint.manifest import MANIFEST_NAME
from dynamicemb.checkpoint.plan import Wishes
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.replaced import tried_again
from dynamicemb.checkpoint.serving import ServingTable
from dynamicemb.checkpoint.target import Target, naming
from dynamicemb.checkpoint.writer import TableSource, write_checkpoint
from dynamicemb.errors import CheckpointError, UsageError, check_path, wrong_type
from dynamicemb.nn.discovery import find_collections, select_tables
from dynamicemb.table import Table


@dataclass(frozen=True)
class Delta:
    """What :func:`dump_delta` wrote: its number (0: the base), id and folder, and how many rows and
    removed ids of all ranks are in it."""

    sequence: int
    id: str
    path: str
    rows: int
    removed: int


@dataclass(frozen=True)
class _Position:
    """The last checkpoint of a chain that a table agrees with, and the mark of that moment.
    ``coming``: the mark of a delta whose commit was not heard of."""

    sequence: int
    id: str
    mark: int
    coming: int | None = None


# Per table, by the id of the chain's base.
_positions: weakref.WeakKeyDictionary[Table, dict[str, _Position]] = weakref.WeakKeyDictionary()


def dump_delta(
    path: str | os.PathLike[str],
    model: nn.Module,
    table_names: TableNames = None,
    optim: bool = True,
    pg: Any = None,
    *,
    counter: bool = False,
    compact: bool = False,
    removal_limit: int | None = None,
    progress: bool | None = None,
) -> Delta:
    """Write what changed since the last call to the chain in the folder ``path``.

    The first call writes everything, as the chain's base (``path/base``, a checkpoint that
    ``DynamicEmbLoad`` reads too), and switches on the tables' removal logs. Each later one writes
    ``path/delta_00000001``, ...: the rows that were looked up, written or updated since, whole, and
    the ids that left the table. Each is all or nothing, over all ranks, as ``DynamicEmbDump`` is.
    Base and deltas, applied in order, are the tables bit for bit, scores included. Base and deltas
    have indexes for serving.

    table_names, optim, counter, compact: as for ``DynamicEmbDump``; for the base. Deltas follow it.
    removal_limit: ids per table whose removal is remembered until the next call; see
        ``Table.log_removals``.

    A process goes on with a chain that it wrote or that :func:`apply_delta` brought it to the end
    of. When a chain has grown long, begin a new one in another folder.

    Raises:
        UsageError: the tables do not stand at the chain's end, or more ids left than the log holds.
        CheckpointError: as ``DynamicEmbDump``.
    """
    ranks = Ranks(pg)
    path = check_path("path", path)
    links = ranks.first(lambda: _links(path))
    everything = _tables(model, table_names if not links else None)
    if not links:
        flags = DumpFlags(optim, counter, True, compact, True)
        return _write(path, everything, flags, ranks, None, removal_limit, progress)
    chosen: list[Chosen] = []
    ranks.together(lambda: chosen.extend(_at_end(path, everything, links)))
    saved = [one for some in links[0].manifest.collections.values() for one in some.tables.values()]
    flags = DumpFlags(
        all(one.state for one in saved),
        any(shard.counter_rows is not None for one in saved for shard in one.shards),
        True,
        all(one.value_dtype == one.dtype for one in saved),
        True,
    )
    return _write(path, chosen, flags, ranks, links, removal_limit, progress)


def apply_delta(
    path: str | os.PathLike[str],
    target: nn.Module | ServingTable,
    pg: Any = None,
    *,
    progress: bool | None = None,
) -> int:
    """Bring ``target`` to the end of the chain in the folder ``path``; returns how many of its
    checkpoints were applied (the base counts as one).

    A model that already stands on the chain takes the deltas it does not have; any other model
    takes the base first, in place of the rows it has. All ranks of ``pg`` must call; their number
    may differ from the writers'. For a :class:`ServingTable` see its ``apply_delta``.

    The order of the chain and every checksum of what will be applied are checked, on all ranks,
    before the first row changes. Raises ``CheckpointError`` or ``CorruptCheckpointError`` if a
    delta is missing, doubled, moved or corrupt, with the tables as they were.
    """
    if isinstance(target, ServingTable):
        return target.apply_delta(path)
    ranks = Ranks(pg)
    path = check_path("path", path)
    everything = _tables(target, None)
    loadings: list[Loading] = []
    try:
        links, chosen = tried_again(lambda: _opened(path, everything, ranks, progress, loadings))
        if not loadings:
            return 0
        base = links[0].id
        for loading in loadings:
            loading.verify()
        for one in chosen:  # until all is applied, the tables stand on no chain
            _positions.get(one.table, {}).pop(base, None)
        lost = sum(loading.load().did_not_fit for loading in loadings)
    finally:
        for loading in loadings:
            loading.close()
    if lost == 0:
        for one in chosen:
            one.table.log_removals()
            _stand(
                one.table, base, _Position(len(links) - 1, links[-1].id, one.table.mark_changes())
            )
    return len(loadings)


def _opened(
    path: str,
    everything: Sequence[Chosen],
    ranks: Ranks,
    progress: bool | None,
    loadings: list[Loading],
) -> tuple[list[ChainLink], list[Chosen]]:
    """The chain, the tables of it, and into ``loadings`` the part of it that they do not have,
    open."""
    for loading in loadings:  # of an attempt before
        loading.close()
    loadings.clear()
    # One rank reads it for all: a writer may add a delta between two looks.
    links = ranks.first(lambda: read_chain(path))
    wanted = {
        (where, name) for where, one in links[0].manifest.collections.items() for name in one.tables
    }
    chosen = [one for one in everything if (one.collection, one.table.name) in wanted]
    if not chosen:
        raise CheckpointError(f"the model has none of the tables of the chain in {path!r}")
    begin = min(ranks.together(lambda: min(_first_new(one.table, links) for one in chosen)))
    for link in links[begin:]:
        loading = Loading(link.path, ranks, _wishes(link, links), progress, link.id)
        loadings.append(loading)
        loading.plan(chosen, explicit=True)
    return links, chosen


def _wishes(link: ChainLink, links: Sequence[ChainLink]) -> Wishes:
    tables = [table for one in link.manifest.collections.values() for table in one.tables.values()]
    clocks = [
        shard.clock
        for one in links[-1].manifest.collections.values()
        for table in one.tables.values()
        for shard in table.shards
        if shard.clock is not None
    ]
    return Wishes(
        optim=any(table.state for table in tables),
        counter=any(shard.counter_rows is not None for t in tables for shard in t.shards),
        scores=True,
        clear=link.sequence == 0,
        clock_at_end=max(clocks, default=0),
    )


def _first_new(table: Table, links: Sequence[ChainLink]) -> int:
    """The number of the first checkpoint that the table does not have."""
    position = _positions.get(table, {}).get(links[0].id)
    if position is None:
        return 0
    if position.sequence >= len(links) or links[position.sequence].id != position.id:
        raise CheckpointError(
            f"table {table.name!r} stands at delta {position.sequence} of id {position.id}, which "
            "the chain does not have"
        )
    return position.sequence + 1


def _links(path: str) -> list[ChainLink]:
    """The chain in ``path``; empty if it has not begun."""
    with naming("writing a delta to", path), Directory.open(path, create=True) as folder:
        begun = folder.is_directory(BASE) and (_has_manifest(folder, BASE))
        if begun:
            return read_chain(path)
        strangers = [name for name in folder.list() if name != BASE]
        if strangers or (folder.exists(BASE) and not folder.is_directory(BASE)):
            raise CheckpointError(
                f"{path!r} is not empty (it has {(strangers or [BASE])[0]!r}) and no chain; "
                "allowed: an empty folder, or one that dump_delta wrote"
            )
    return []


def _has_manifest(folder: Directory, name: str) -> bool:
    with folder.directory(name) as inside:
        return inside.exists(MANIFEST_NAME)


def _tables(model: nn.Module, table_names: TableNames) -> list[Chosen]:
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module or a ServingTable")
    chosen = [
        Chosen(where, module, table)
        for where, tables in select_tables(find_collections(model), table_names).items()
        for module, table in tables.values()
    ]
    if not chosen:
        raise UsageError(f"{type(model).__name__} has no dynamic embedding tables")
    return chosen


def _at_end(path: str, everything: Sequence[Chosen], links: Sequence[ChainLink]) -> list[Chosen]:
    """The tables of the chain, if all of them stand at its end."""
    by_name = {(one.collection, one.table.name): one for one in everything}
    chosen = []
    base, last = links[0], links[-1]
    for where, collection in base.manifest.collections.items():
        for name in collection.tables:
            one = by_name.get((where, name))
            if one is None:
                raise UsageError(f"the model has no table {name!r} of {where!r}, as the chain has")
            position = _heard_of(_positions.get(one.table, {}).get(base.id), last)
            if position is None or (position.sequence, position.id) != (last.sequence, last.id):
                stands = "nowhere on it" if position is None else f"at delta {position.sequence}"
                raise UsageError(
                    f"table {name!r} stands {stands}, and the chain in {path!r} ends with delta "
                    f"{last.sequence}; allowed: a table that this process brought there, with "
                    "dump_delta or apply_delta, or a chain in another folder"
                )
            _stand(one.table, base.id, position)
            chosen.append(one)
    return chosen


def _heard_of(position: _Position | None, last: ChainLink) -> _Position | None:
    """A delta that was committed although its writer saw an error is adopted."""
    if position is None or position.coming is None or last.sequence != position.sequence + 1:
        return position
    return _Position(last.sequence, last.id, position.coming)


def _write(
    path: str,
    chosen: Sequence[Chosen],
    flags: DumpFlags,
    ranks: Ranks,
    links: Sequence[ChainLink] | None,
    removal_limit: int | None,
    progress: bool | None,
) -> Delta:
    marks: list[int] = []
    removed: list[torch.Tensor] = []

    def prepare() -> list[TableSource]:
        sources = []
        for one in chosen:
            since = None
            gone = None
            if links is not None:
                position = _positions[one.table][links[0].id]
                since, gone = position.mark, one.table.removed_since(position.mark)
                removed.append(gone)
            one.table.log_removals(removal_limit)
            # Before the rows: what changes meanwhile is in the next delta too.
            marks.append(one.table.mark_changes())
            sources.append(
                table_source(
                    one.collection,
                    one.module,
                    one.table,
                    flags,
                    changed_since=since,
                    removed=None if gone is None else gone.cpu(),
                )
            )
        return sources

    sources: list[TableSource] = []
    ranks.together(lambda: sources.extend(prepare()))
    if links is None:
        folder, extra = os.path.join(path, BASE), {}
    else:
        sequence = links[-1].sequence + 1
        if sequence > MAX_DELTAS:
            raise CheckpointError(f"the chain in {path!r} is full; begin a new one")
        folder = os.path.join(path, delta_name(sequence))
        extra = delta_extra(links[0].id, sequence, links[-1].id)
        ranks.first(lambda: _make_ready(path, delta_name(sequence), links[-1]))
        for one, mark in zip(chosen, marks, strict=True):
            at = _positions[one.table][links[0].id]
            _stand(one.table, links[0].id, _Position(at.sequence, at.id, at.mark, coming=mark))
    identity = write_checkpoint(folder, sources, ranks, extra=extra, progress=progress)
    base = identity if links is None else links[0].id
    sequence = 0 if links is None else links[-1].sequence + 1
    for one, mark in zip(chosen, marks, strict=True):
        _stand(one.table, base, _Position(sequence, identity, mark))
    written = ranks.first(lambda: read_chain(path)[sequence])
    rows = sum(t.rows for one in written.manifest.collections.values() for t in one.tables.values())
    return Delta(sequence, identity, folder, rows, sum(ranks.gather(sum(map(len, removed)))))


def _make_ready(path: str, name: str, before: ChainLink) -> None:
    """Tidy the last checkpoint, should its writer not have come to it, and look at the place of the
    next one."""
    with naming("writing a delta to", path), Directory.open(path) as folder:
        Target(before.path, allow_overwrite=True).close()
        if folder.exists(name) and not folder.is_directory(name):
            raise CheckpointError(
                f"{os.path.join(path, name)} is a file or a link; allowed: a folder, or nothing"
            )


def _stand(table: Table, base: str, position: _Position) -> None:
    _positions.setdefault(table, {})[base] = position
