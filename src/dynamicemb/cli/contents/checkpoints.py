"""Checkpoints of this library and of older layouts, and chains of deltas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch

from dynamicemb.checkpoint.blocks import BlockReader
from dynamicemb.checkpoint.chain import ChainLink, read_chain
from dynamicemb.checkpoint.index import BUCKETS, HEADER_BYTES, REMOVED, decode_header
from dynamicemb.checkpoint.legacy import LegacyReader
from dynamicemb.checkpoint.manifest import FileEntry, Shard, TableEntry
from dynamicemb.checkpoint.names import opt_args_name
from dynamicemb.checkpoint.older import Older
from dynamicemb.checkpoint.reader import CheckpointReader, StoredRows
from dynamicemb.checkpoint.scores import from_file
from dynamicemb.cli.contents.base import (
    EVERYTHING,
    IDS,
    Batch,
    Columns,
    Content,
    Damage,
    Part,
    TableInfo,
    joined,
)
from dynamicemb.errors import CheckpointError, ReplacedCheckpointError

#: Roles that :meth:`CheckpointContent.batches` reads.
_ROWS = ("keys", "values", "scores", "opt_values")


class CheckpointContent(Content):
    """A checkpoint with a manifest, or of an older layout."""

    layout = "checkpoint"

    def __init__(self, path: str, reader: CheckpointReader) -> None:
        super().__init__(path)
        self.reader = reader
        self._entries: dict[tuple[str, str, int | None], tuple[TableEntry, tuple[Shard, ...]]] = {}
        manifest = reader.manifest
        if manifest.id:
            self.facts = {
                "id": manifest.id,
                "created": manifest.created,
                "library": manifest.library,
                "ranks": manifest.world_size,
            }
        for collection, name in reader.all_tables():
            entry = reader.table(collection, name)
            if entry.routing is None and len(entry.shards) > 1:
                for shard in entry.shards:
                    self._add(collection, entry, (shard,), shard.rank)
            else:
                self._add(collection, entry, entry.shards, None)

    @classmethod
    def held(cls, path: str, reader: CheckpointReader, *, without_missing: bool) -> Self:
        """The checkpoint of ``reader``, with its files open; one that is missing is an error,
        unless ``without_missing``."""
        try:
            reader.hold(without_missing=without_missing)
            return cls(path, reader)
        except BaseException:
            reader.close()
            raise

    @classmethod
    def of_older(cls, path: str, older: Older) -> Self:
        """What a folder without a manifest holds."""
        content = cls.held(path, older.open(), without_missing=False)
        content.layout = "upstream"
        content.checksums = False
        content.notes = list(older.notes)
        return content

    def _add(
        self, collection: str, entry: TableEntry, shards: tuple[Shard, ...], rank: int | None
    ) -> None:
        files = sum(one.bytes for shard in shards for one in shard.files.values())
        info = TableInfo(
            collection=collection,
            name=entry.name,
            dim=entry.dim,
            dtype=entry.dtype,
            value_dtype=entry.value_dtype,
            strategy=entry.strategy if entry.scores else None,
            optimizer=entry.optimizer,
            state_dim=entry.optimizer.state_dim(entry.dim) if entry.state else 0,
            routing=entry.routing,
            parts=tuple(
                Part(
                    rank=shard.rank,
                    rows=shard.rows,
                    clock=self._clock(collection, entry, shard),
                    progress=shard.progress,
                    counted=shard.counter_rows,
                )
                for shard in shards
            ),
            bytes=files + (0 if entry.opt_args is None else entry.opt_args.bytes),
            rank=rank,
            options=entry.options,
        )
        self.tables.append(info)
        self._entries[info.key] = (entry, shards)

    def _clock(self, collection: str, entry: TableEntry, shard: Shard) -> int | None:
        """The reading that ages are relative to. Older layouts do not say it: then the time at
        which the file was written stands for it, so that ages stay what they are."""
        if shard.clock is not None or not isinstance(self.reader, LegacyReader):
            return shard.clock
        with self.reader.open_file(collection, entry, shard, "keys") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def batches(
        self, table: TableInfo, part: int | None = None, columns: Columns = EVERYTHING
    ) -> Iterator[Batch]:
        entry, shards = self._entries[table.key]
        for place, shard in enumerate(shards):
            if part is not None and place != part:
                continue
            for stored in self.reader.rows(
                table.collection,
                entry,
                shard,
                values=columns.values,
                state=columns.state,
                scores=columns.scores,
            ):
                yield self._batch(table, place, stored, columns)

    def _batch(
        self, table: TableInfo, place: int, stored: StoredRows, columns: Columns = EVERYTHING
    ) -> Batch:
        words = stored.scores
        if words is not None:
            assert table.strategy is not None
            clock = table.parts[place].clock
            words = from_file(words, table.strategy, clock, clock or 0)
        return Batch(
            stored.ids,
            stored.embeddings if columns.values else None,
            stored.state if columns.state and table.state_dim else None,
            words,
        )

    def counter(self, table: TableInfo) -> tuple[torch.Tensor, torch.Tensor] | None:
        entry, shards = self._entries[table.key]
        if table.counted is None:
            return None
        found = [self.reader.counter(table.collection, entry, shard) for shard in shards]
        ids, counts = zip(*found, strict=True)
        return torch.cat(ids), torch.cat(counts)

    def buckets(self, table: TableInfo, part: int) -> int | None:
        """In how many buckets the rows of a part lie, if they lie in their order."""
        entry, shards = self._entries[table.key]
        if BUCKETS not in shards[part].files:
            return None
        with self.reader.open_file(table.collection, entry, shards[part], BUCKETS) as file:
            data = bytearray(min(file.size, HEADER_BYTES))
            file.read_at(0, data)
            return decode_header(bytes(data), BUCKETS, file.name).slots - 1

    def removed(self, table: TableInfo) -> torch.Tensor:
        """int64 [n]: of a delta, the ids that left."""
        entry, shards = self._entries[table.key]
        found = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for shard in shards:
            if REMOVED in shard.files:
                with self.reader.open_file(table.collection, entry, shard, REMOVED) as file:
                    said = shard.files[REMOVED]
                    reader = BlockReader(file, said, self.reader.manifest.block_bytes)
                    found.append(reader.read((said.bytes // 8,), torch.int64))
        return torch.cat(found)

    def removed_count(self, table: TableInfo) -> int:
        """How many those are."""
        shards = self._entries[table.key][1]
        return sum(one.files[REMOVED].bytes // 8 for one in shards if REMOVED in one.files)

    def find(self, table: TableInfo, ids: torch.Tensor) -> Batch:
        if isinstance(self.reader, LegacyReader):  # its rows may be of several files in one
            return super().find(table, ids)
        entry, shards = self._entries[table.key]
        found = []
        for place, shard in enumerate(shards):
            begin = 0
            for stored in self.reader.rows(
                table.collection, entry, shard, values=False, scores=False
            ):
                for row in torch.isin(stored.ids, ids).nonzero().squeeze(1).tolist():
                    one = self.reader.row(table.collection, entry, shard, begin + row)
                    found.append(self._batch(table, place, one))
                begin += len(stored)
        return joined(found, table)

    def damages(self, table: TableInfo, *, skip_rows: bool) -> Iterator[Damage | int]:
        entry, shards = self._entries[table.key]
        files: list[tuple[str, FileEntry]] = []
        if entry.opt_args is not None:
            files.append((opt_args_name(entry.stem), entry.opt_args))
        for shard in shards:
            for role, said in shard.files.items():
                if not (skip_rows and role in _ROWS):
                    files.append((entry.file(shard, role), said))
        if isinstance(self.reader, LegacyReader):  # lengths were compared when it was opened
            return
        for name, said in files:
            place = os.path.join(self.path, self._folder(table), name)
            try:
                for block in self.reader.check(table.collection, name, said):
                    if block.problem is not None:
                        yield Damage(block.problem, place, table.label, block.offset)
                    yield block.size
            except ReplacedCheckpointError:
                raise
            except CheckpointError as error:
                yield Damage(str(error), place, table.label)

    def entry(self, table: TableInfo) -> tuple[TableEntry, tuple[Shard, ...]]:
        """The table in the manifest, and the shards of it that ``table`` has."""
        return self._entries[table.key]

    def _folder(self, table: TableInfo) -> str:
        return self.reader.manifest.collections[table.collection].folder

    def close(self) -> None:
        self.reader.close()


class ChainContent(Content):
    """A base and its deltas, as the tables that they make together. Keeps 8 bytes for each id of
    the deltas in memory."""

    layout = "chain of deltas"

    def __init__(self, path: str, *, without_missing: bool) -> None:
        super().__init__(path)
        self.links = read_chain(path)
        self.contents: list[CheckpointContent] = []
        try:
            for link in self.links:
                reader = CheckpointReader.open_known(link.path, link.id)
                content = CheckpointContent.held(link.path, reader, without_missing=without_missing)
                self.contents.append(content)
        except BaseException:
            self.close()
            raise
        self._later: dict[tuple[str, str, int | None], list[torch.Tensor]] = {}
        last = self.links[-1].manifest
        self.facts = self.contents[0].facts | {
            "id": last.id,
            "created": last.created,
            "deltas": [
                _delta_facts(link, content)
                for link, content in zip(self.links[1:], self.contents[1:], strict=True)
            ],
        }
        for table in self.contents[0].tables:
            self.tables.append(self._merged(table))

    def _merged(self, table: TableInfo) -> TableInfo:
        """The table with the clock and progress of the chain's end, as one part: a delta may have
        been written by another number of ranks."""
        found = [_same(content, table) for content in self.contents]
        versions = [one for one in found if one is not None]
        end = versions[-1]
        progress = [part.progress for part in end.parts]
        merged = Part(
            rank=0,
            rows=sum(one.rows for one in versions),  # some of them more than once
            clock=end.clock,
            progress=max(progress, key=lambda one: one.step) if progress else Part(0, 0).progress,
            counted=end.counted,
        )
        return replace(
            table,
            parts=(merged,),
            optimizer=end.optimizer,
            routing=None,
            bytes=sum(one.bytes for one in versions),
        )

    def batches(
        self, table: TableInfo, part: int | None = None, columns: Columns = EVERYTHING
    ) -> Iterator[Batch]:
        later = self._ids_after(table)
        for number, content in enumerate(self.contents):
            here = _same(content, table)
            if here is None:
                continue
            for batch in content.batches(here, None, columns):
                if number + 1 < len(self.contents):
                    batch = batch.some(~_contains(later[number], batch.ids))
                if len(batch):
                    yield batch

    def _ids_after(self, table: TableInfo) -> list[torch.Tensor]:
        """For each link, the sorted ids that a later one has or removes."""
        known = self._later.get(table.key)
        if known is None:
            known = [torch.empty(0, dtype=torch.int64, device="cpu")]
            for content in reversed(self.contents[1:]):
                here = _same(content, table)
                some = [known[0]]
                if here is not None:
                    some.append(content.removed(here))
                    some += [batch.ids for batch in content.batches(here, None, IDS)]
                known.insert(0, torch.unique(torch.cat(some)))
            self._later[table.key] = known
        return known

    def count(self, table: TableInfo) -> int:
        return sum(len(batch) for batch in self.batches(table, None, IDS))

    def counter(self, table: TableInfo) -> tuple[torch.Tensor, torch.Tensor] | None:
        last = _same(self.contents[-1], table)
        return None if last is None else self.contents[-1].counter(last)

    def find(self, table: TableInfo, ids: torch.Tensor) -> Batch:
        found = []
        for content in reversed(self.contents):
            here = _same(content, table)
            if here is None:
                continue
            some = content.find(here, ids)
            found.append(some)
            ids = ids[~torch.isin(ids, torch.cat([some.ids, content.removed(here)]))]
        return joined(found, table)

    def damages(self, table: TableInfo, *, skip_rows: bool) -> Iterator[Damage | int]:
        for content in self.contents:
            here = _same(content, table)
            if here is not None:
                yield from content.damages(here, skip_rows=skip_rows)

    def close(self) -> None:
        for content in self.contents:
            content.close()


def _delta_facts(link: ChainLink, content: CheckpointContent) -> dict[str, object]:
    return {
        "sequence": link.sequence,
        "id": link.id,
        "created": link.manifest.created,
        "rows": sum(table.rows for table in content.tables),
        "removed": sum(content.removed_count(table) for table in content.tables),
        "bytes": sum(table.bytes for table in content.tables),
    }


def _same(content: CheckpointContent, table: TableInfo) -> TableInfo | None:
    return next((one for one in content.tables if one.key == table.key), None)


def _contains(known: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """bool [n]: which ids are among the sorted ones."""
    if not len(known):
        return torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    place = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
    return known[place] == ids
