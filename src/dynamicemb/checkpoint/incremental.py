"""What changed in a model's dynamic tables since a score, and the scores themselves.

Collections are named by their path ("model", "model.embeddings", ...) or the last part of it, and
come back under their path.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn

from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError, wrong_type, wrong_value
from dynamicemb.nn.discovery import (
    check_written,
    find_collections,
    resolve_collection,
    tables_of,
)
from dynamicemb.nn.incremental import current_scores, dump_increment
from dynamicemb.nn.module import DynamicModule
from dynamicemb.table import Table
from dynamicemb.table.incremental import hand_out

#: ``{collection path: {table name: score}}``.
Scores = dict[str, dict[str, int]]
#: ``{collection path: {table name: (ids, rows)}}``.
DumpedRows = dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]
#: ``{collection path: {table name: ids}}``.
RemovedIds = dict[str, dict[str, torch.Tensor]]
#: ``{collection path: {table name: (its module, the table)}}``.
Tables = dict[str, dict[str, tuple[DynamicModule, Table]]]


def incremental_dump(
    model: nn.Module,
    score_threshold: int | Mapping[str, Mapping[str, int]],
    pg: Any = None,
    *,
    removed: bool = False,
) -> tuple[DumpedRows, Scores] | tuple[DumpedRows, Scores, RemovedIds] | None:
    """The rows whose score is not less than a threshold, and the next thresholds.

    Args:
        model: holds the dynamic tables.
        score_threshold: one for all tables, or ``{collection: {table: threshold}}`` for the tables
            named there. A name that does not exist warns.
        pg: the ranks to collect from. None: all ranks that share a sharded table, and this process
            alone for a table that is not sharded. All of them must call.
        removed: also return the ids that left the tables since the threshold and are not stored
            now; see :func:`track_removals`.

    Returns:
        ``{path: {table: (ids int64 [n], rows [n, dim])}}`` on the host in the table's dtype,
        ``{path: {table: score}}``, which are the next thresholds, and with ``removed``
        ``{path: {table: ids int64 [n]}}``. None, with a warning, if the model has no dynamic table.

    With TIMESTAMP, STEP and (TIMESTAMP, LFU), calling again with the returned scores gives every
    row that was looked up or changed since, and no other, also a row that was looked up before a
    dump and updated after it, and on ranks whose clocks differ. Rows that a prefetch holds for a
    later forward may come twice. With CUSTOMIZED and LFU the score alone decides; so a dump
    between a forward and its backward would miss the update: dump between steps.

    Raises:
        InvalidArgumentError, ArgumentTypeError: a threshold that is no integer from 0 to 2**64 - 1.
        UsageError: with ``removed``, where the ids are not known.
    """
    if not is_valid_score_threshold(score_threshold):
        raise _wrong_scores("score_threshold", score_threshold)
    collections = _collections(model)
    if collections is None:
        return None
    chosen, thresholds = _chosen(collections, score_threshold, strict=False)
    rows: DumpedRows = {}
    scores: Scores = {}
    gone: RemovedIds = {}
    for path, tables in chosen.items():
        check_written(module for module, _ in tables.values())
        rows[path], scores[path], gone[path] = {}, {}, {}
        for group, part in _by_group(tables, pg):
            increment = dump_increment(part, thresholds[path], group=group, removed=removed)
            rows[path].update(increment.rows)
            scores[path].update(increment.scores)
            gone[path].update(increment.removed)
    return (rows, scores, gone) if removed else (rows, scores)


def get_score(model: nn.Module) -> Scores | None:
    """``{path: {table: the score that the next training forward will write}}``.

    TIMESTAMP and (TIMESTAMP, LFU): the clock now. STEP: the next step. CUSTOMIZED: what
    ``set_score`` was given. LFU 1, NO_EVICTION 0. A threshold for a later :func:`incremental_dump`
    of this rank's rows. None, with a warning, if the model has no dynamic table.
    """
    collections = _collections(model)
    if collections is None:
        return None
    return {
        path: current_scores({name: table for name, (_, table) in tables.items()})
        for path, tables in collections.items()
    }


def set_score(model: nn.Module, table_score: int | Mapping[str, Mapping[str, int]]) -> None:
    """The score of the training forwards from now on: one for all tables, or ``{collection:
    {table: score}}``. All are set, or none.

    Raises:
        InvalidArgumentError, ArgumentTypeError: a score that is no integer from 1 to 2**64 - 1, or
            a collection or table that does not exist.
        UsageError: a table whose ``score_strategy`` is not CUSTOMIZED.
    """
    if not is_valid_score_threshold(table_score):
        raise _wrong_scores("table_score", table_score)
    collections = _collections(model)
    if collections is None:
        return
    chosen, scores = _chosen(collections, table_score, strict=True)
    pairs = [
        (table, scores[path][name])
        for path, tables in chosen.items()
        for name, (_, table) in tables.items()
    ]
    for table, score in pairs:
        table.check_score(score)
    for table, score in pairs:
        table.set_score(score)


def track_removals(model: nn.Module, *, limit: int | None = None) -> Scores | None:
    """From now on remember which ids leave the tables, for ``incremental_dump(removed=True)``;
    returns :func:`get_score`, the first threshold for which they are known.

    ``limit``: ids to remember per table, 8 bytes each; see ``Table.log_removals``.
    """
    collections = _collections(model)
    if collections is None:
        return None
    for tables in collections.values():
        for _, table in tables.values():
            table.log_removals(limit)
            if len(table) == 0:  # nothing can have left before
                hand_out(table, 0, table.mark_changes())
    return get_score(model)


def is_valid_score_threshold(score_threshold: object) -> bool:
    """Whether it is an integer, or ``{collection: {table: integer}}``."""
    if isinstance(score_threshold, Mapping):
        return all(
            isinstance(collection, str)
            and isinstance(tables, Mapping)
            and all(isinstance(name, str) and _is_integer(one) for name, one in tables.items())
            for collection, tables in score_threshold.items()
        )
    return _is_integer(score_threshold)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _wrong_scores(name: str, value: object) -> ArgumentTypeError | InvalidArgumentError:
    allowed = "an integer, or {collection: {table: integer}}"
    if isinstance(value, (int, Mapping)) and not isinstance(value, bool):
        return wrong_value(name, value, allowed)
    return wrong_type(name, value, allowed)


def _collections(model: nn.Module) -> Tables | None:
    collections = {path: tables_of(modules) for path, modules in find_collections(model).items()}
    if not collections:
        warnings.warn("the model has no dynamic embedding table", UserWarning, stacklevel=3)
        return None
    return collections


def _chosen(
    collections: Tables, scores: int | Mapping[str, Mapping[str, int]], *, strict: bool
) -> tuple[Tables, Scores]:
    """The tables that ``scores`` names, and their scores by path."""
    if not isinstance(scores, Mapping):
        everywhere = {
            path: dict.fromkeys(tables, int(scores)) for path, tables in collections.items()
        }
        return collections, everywhere
    chosen: Tables = {}
    values: Scores = {}
    for collection, tables in scores.items():
        try:
            paths = resolve_collection(collections, collection)
        except InvalidArgumentError as error:
            _leave_out(error, strict)
            continue
        for path, (name, value) in itertools.product(paths, tables.items()):
            if name in collections[path]:
                chosen.setdefault(path, {})[name] = collections[path][name]
                values.setdefault(path, {})[name] = int(value)
            else:
                known = ", ".join(collections[path])
                _leave_out(wrong_value(f"a table of {path!r}", name, known), strict)
    return chosen, values


def _leave_out(error: InvalidArgumentError, strict: bool) -> None:
    if strict:
        raise error
    warnings.warn(f"{error}; left out", UserWarning, stacklevel=4)


def _by_group(
    tables: Mapping[str, tuple[DynamicModule, Table]], pg: Any
) -> list[tuple[Any, dict[str, Table]]]:
    """The tables by the ranks that hold parts of them."""
    import torch.distributed as dist

    found: list[tuple[Any, dict[str, Table]]] = []
    for name, (module, table) in tables.items():
        group = pg
        if pg is None and module.routings is not None and dist.is_initialized():
            group = module.process_group or dist.group.WORLD
        for known, part in found:
            if known is group:
                part[name] = table
                break
        else:
            found.append((group, {name: table}))
    return found
