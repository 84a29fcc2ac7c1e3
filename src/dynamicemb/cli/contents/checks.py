"""All that can be checked of the tables of a path: checksums, and what must be true of rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from dynamicemb import _engine
from dynamicemb.checkpoint.index import BUCKETS, INDEX
from dynamicemb.checkpoint.manifest import MANIFEST_NAME, STAGING_PREFIX
from dynamicemb.checkpoint.mapped import Layer
from dynamicemb.cli.contents.base import IDS, Columns, Content, Damage, TableInfo
from dynamicemb.cli.contents.checkpoints import CheckpointContent
from dynamicemb.cli.contents.partition import ids_of, shares
from dynamicemb.errors import DynamicEmbError, ReplacedCheckpointError

Advance = Callable[[int], object]


def check_table(
    content: Content, table: TableInfo, memory: int, advance: Advance
) -> Iterator[Damage]:
    """What is wrong with a table. Rows are looked at only where all checksums are right."""
    damaged = False
    for found in content.damages(table, skip_rows=False):
        if isinstance(found, Damage):
            damaged = True
            yield found
        else:
            advance(found)
    if damaged:
        return
    try:
        yield from _check_ids(content, table, memory)
        yield from _check_owners(content, table)
        yield from _check_counter(content, table)
        if isinstance(content, CheckpointContent) and content.checksums:
            yield from _check_removed(content, table)
            yield from _check_index(content, table)
    except ReplacedCheckpointError:
        raise
    except DynamicEmbError as error:
        yield Damage(str(error), table=table.label)


def _check_ids(content: Content, table: TableInfo, memory: int) -> Iterator[Damage]:
    """No id has two rows."""
    for share in shares(table.rows, 24, memory):  # ids, and a sorted copy with its numbers
        ids = torch.cat(
            [torch.empty(0, dtype=torch.int64, device="cpu"), *ids_of(content, table, share)]
        )
        ordered = ids.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            yield Damage(
                f"{len(twice)} ids have more than one row, such as {int(twice[0])}",
                table=table.label,
            )


def _check_owners(content: Content, table: TableInfo) -> Iterator[Damage]:
    """Rows are in the part of the rank that their ids belong to."""
    if table.routing is None or len(table.parts) == 1:
        return
    for place, part in enumerate(table.parts):
        wrong = 0
        first = None
        for batch in content.batches(table, place, IDS):
            strange = batch.ids[table.routing.owner(batch.ids) != part.rank]
            wrong += len(strange)
            if first is None and len(strange):
                first = int(strange[0])
        if wrong:
            yield Damage(
                f"{wrong} rows of rank {part.rank} belong to other ranks by their ids, such as "
                f"{first}",
                table=table.label,
            )


def _check_counter(content: Content, table: TableInfo) -> Iterator[Damage]:
    counter = content.counter(table)
    if counter is None:
        return
    ids, counts = counter
    if len(torch.unique(ids)) != len(ids):
        yield Damage("an id is counted twice in the admission counter", table=table.label)
    if bool((counts < 0).any()):
        yield Damage("a count of the admission counter is below 0", table=table.label)


def _check_removed(content: CheckpointContent, table: TableInfo) -> Iterator[Damage]:
    removed = content.removed(table)
    if not len(removed):
        return
    for batch in content.batches(table, None, IDS):
        both = batch.ids[torch.isin(batch.ids, removed)]
        if len(both):
            yield Damage(f"id {int(both[0])} has a row and is removed", table=table.label)
            return


def _check_index(content: CheckpointContent, table: TableInfo) -> Iterator[Damage]:
    """Lookups through the index, or the buckets, find every row where it is."""
    entry, shards = content.entry(table)
    if not all(INDEX in shard.files or BUCKETS in shard.files for shard in shards):
        return
    settings = {"verify": False, "preload": False, "rank": table.rank}
    layer = Layer(content.reader, table.collection, table.name, settings)
    width = entry.dim * entry.value_dtype.itemsize
    mapped = _engine.MappedTable(row_bytes=width, layers=[layer.mapped])
    missing = torch.zeros(entry.dim, dtype=entry.value_dtype, device="cpu")
    wrong = 0
    for batch in content.batches(table, None, Columns(state=False, scores=False)):
        assert batch.embeddings is not None
        found = torch.empty(len(batch), dtype=torch.bool, device="cpu")
        rows = torch.empty_like(batch.embeddings)
        ids = batch.ids.contiguous()
        mapped.find(
            ids.data_ptr(), len(ids), 1, missing.data_ptr(), found.data_ptr(), rows.data_ptr()
        )
        same = (rows.view(torch.uint8) == batch.embeddings.view(torch.uint8)).all(1)
        wrong += int((~(found & same)).sum())
    if wrong:
        yield Damage(f"{wrong} rows are not found by the index for serving", table=table.label)


def stray_files(content: Content) -> list[str]:
    """Files in a checkpoint's folders that do not belong to it."""
    if not isinstance(content, CheckpointContent) or not content.checksums:
        return []
    known = content.reader.manifest.files()
    stray = []
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(content.path)):
            if name in known:
                inside = sorted(os.listdir(os.path.join(content.path, name)))
                stray += [f"{name}/{one}" for one in inside if not _belongs(one, known[name])]
            elif name != MANIFEST_NAME and name != STAGING_PREFIX + content.reader.manifest.id:
                stray.append(name)
    return stray if content.reader.in_force() else []  # else it is the folder of another one


def _belongs(name: str, known: object) -> bool:
    assert isinstance(known, dict)
    return name in known or "_emb_index.rank_" in name  # one that build_serving_index added
