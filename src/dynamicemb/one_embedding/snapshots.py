"""Snapshots of an embedding: all ranks have them, or they are not there."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.errors import InvalidArgumentError, StoreError, UsageError
from dynamicemb.one_embedding import folders
from dynamicemb.one_embedding.room import Room
from dynamicemb.one_embedding.routed import exchange
from dynamicemb.one_embedding.row_size import NAMES, names_of_size
from dynamicemb.one_embedding.sources import ONEFLOW_ORDER, Batch, Source, note_of
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.routing import Routing
from dynamicemb.table import Progress, Table
from dynamicemb.tiers import CachedTable, SsdStore, Store

logger = logging.getLogger("dynamicemb.one_embedding")


class Snapshots:
    """The snapshots of a table that is spread over ``ranks``, in ``path``.

    ``store``: where rows of this rank are on the disk; it is the table's own, or only holds what
    snapshots need. ``about``: what must be equal to load a snapshot, by name. ``room``: the
    table's, for the rows that come. ``at_a_server``: the table's rows are where others may have put
    them.
    """

    def __init__(
        self,
        table: Table,
        store: SsdStore | None,
        path: str | Sequence[str],
        ranks: Ranks,
        routing: Routing,
        *,
        key_type: torch.dtype,
        physical_block_size: int,
        about: dict[str, Any],
        room: Room,
        at_a_server: bool = False,
    ) -> None:
        self.table = table
        self._own_store = store
        self.path = path
        self.folder = folders.rank_folder(path, ranks.rank, ranks.size)
        self._ranks = ranks
        self._routing = routing
        self._key_type = key_type
        self._physical_block_size = physical_block_size
        self._about = about
        self._room = room
        self._at_a_server = at_a_server
        # Of the table, when the store had all its rows, with their state's optimizer.
        self._mark: tuple[int, OptimizerKind] | None = None
        self._passed_by: folders.Source | None = None  # a snapshot that nobody loaded, yet
        self.changed = True  # since the last snapshot that was taken or loaded
        self.last: str | None = None
        # Whether the optimizer of the state is certain: one stepped, or the snapshot named it.
        self._kind_known = False
        # The snapshot that was loaded without naming it: its name, and its note on the order.
        self._assumed: tuple[str, dict[str, Any]] | None = None

    @property
    def store(self) -> Store:
        """Where the rows of snapshots are."""
        if self._own_store is not None:
            return self._own_store
        assert isinstance(self.table, CachedTable)
        return self.table.store

    def use(self, table: Table) -> None:
        """Another table with the same rows."""
        self.table = table
        self._mark = None

    def names(self) -> list[str]:
        """The snapshots that all of these ranks have, oldest first."""
        known = self._complete()
        return sorted(known, key=lambda name: known[name])

    def _complete(self) -> dict[str, int]:
        return folders.complete(self._ranks.gather(dict(folders.saved_in(self.folder))))

    # ---- taking ----

    def save(self, name: str) -> None:
        """Take a snapshot, in place of one of the same name."""
        name = folders.check_name(name)
        saved = folders.saved_in(self.folder)
        newest = max((stamp for stamps in saved.values() for stamp in stamps), default=0)
        stamps = self._ranks.gather(max(newest + 1, time.time_ns()))
        stamp = max(stamps)
        self._ranks.together(lambda: self._save(folders.stored_name(name, stamp)))
        for old in saved[name]:  # every rank has the new one
            self.store.drop_snapshot(folders.stored_name(name, old))
        self.changed, self.last = False, name

    def _save(self, stored: str) -> None:
        if self._own_store is None or self._at_a_server:
            self.table.flush()
        if self._own_store is not None:
            self._write_rows(self._own_store)
        kind = self.table.optimizer.kind.name
        note = {
            **({"optimizer": kind} if self._assumed is None else self._assumed[1]),
            "progress": asdict(self.table.progress()),
            "rank": self._ranks.rank,
            "ranks": self._ranks.size,
            **self._about,
        }
        self.store.snapshot(stored, json.dumps(note).encode())

    def _write_rows(self, store: SsdStore) -> None:
        """Bring the store up to the table."""
        before, mark = self._mark, self._mark_of_now()
        self._mark = None  # until the store has all
        if before is None or before[1] is not mark[1]:
            store.clear()
            batches = self.table.export()
        else:
            batches = self.table.export(changed_since=before[0])
        for rows in batches:
            store.insert(type(rows)(*(part.cpu() for part in vars(rows).values())))
        self._mark = mark

    def _mark_of_now(self) -> tuple[int, OptimizerKind]:
        return self.table.mark_changes(), self.table.optimizer.kind

    def drop(self, name: str) -> None:
        """Forget a snapshot."""
        name = folders.check_name(name)
        saved = folders.saved_in(self.folder)[name]
        self._require(name, all(self._ranks.gather(bool(saved))))
        for stamp in saved:
            self.store.drop_snapshot(folders.stored_name(name, stamp))
        if self.last == name:
            self.last, self.changed = None, True

    def _require(self, name: str, there: bool) -> None:
        if not there:
            known = ", ".join(self.names()) or "none"
            raise StoreError(
                None, f"there is no snapshot {name!r} in {self.path}; there is: {known}"
            )

    # ---- loading ----

    def start(self, resume: bool | None) -> None:
        """Before the first lookup: continue (see ``resume`` of the modules), or begin without rows.

        Snapshots stay in any case. ``None`` keeps rows at a server, by raising.
        """
        newest = self._newest()
        if resume and newest is not None and newest.stamp is not None:
            self.load(newest.name)
            logger.info("%s continues from snapshot %r", self._about["name"], newest.name)
            return
        if self._at_a_server and resume:
            return
        rows = sum(self._ranks.gather(len(self.table)))
        if rows and resume is None:
            if self._at_a_server:
                raise UsageError(
                    f"the server has {rows} rows of embedding {self._about['name']!r}; allowed: "
                    "resume=True to start with them (or from the newest snapshot), or resume=False "
                    "to delete them"
                )
            if newest is None:
                self._warn(
                    f"{rows} rows that an earlier run left in {self.path} are in no snapshot and "
                    "are dropped; save_snapshot keeps rows"
                )
        if rows:  # of no moment in particular, on the SSD, or not wanted
            self.table.clear()
        if newest is not None and resume is not False:
            self._passed_by = newest

    def _newest(self) -> folders.Source | None:
        """The newest snapshot there is. Of these ranks each looks into its own folder, which may be
        on a disk that no other sees."""
        found: folders.Source | None
        found = self._ranks.first(lambda: folders.newest_source(self.path))
        own = self._complete()
        if own:
            name = max(own, key=lambda one: own[one])
            if found is None or (found.stamp or 0) <= own[name]:
                return folders.Source(self._folders(), name, own[name])
        return found

    def used(self) -> None:
        """Before a lookup: warn, once, if there are snapshots and none was loaded."""
        newest, self._passed_by = self._passed_by, None
        if newest is not None:
            self._warn(
                f"embedding {self._about['name']!r} starts without rows, and {self.path} has "
                f"snapshots; the newest is {newest.name!r}. Continue with load_snapshot"
                f"({newest.name!r}){'' if newest.stamp is None else ' or resume=True'}, or say "
                "resume=False. A snapshot that is saved under the same name replaces it"
            )

    def _warn(self, message: str) -> None:
        if self._ranks.rank == 0:
            warnings.warn(message, UserWarning, stacklevel=3)

    def load(
        self,
        name: str,
        *,
        path: str | Sequence[str] | None = None,
        optimizer: Optimizer | None = None,
        step: int | None = None,
    ) -> None:
        """Return to a snapshot, of any number of ranks."""
        name = folders.check_name(name)
        own = self._complete().get(name) if path is None else None
        skip = self._folders() if path is None else None
        found = self._ranks.first(lambda: folders.find_source(path or self.path, name, skip))
        if found is not None and (own is None or (found.stamp or 0) > own):
            note = self._load_from(found, optimizer, step)
        else:
            self._require(name, own is not None)
            assert own is not None
            note = self._load_own(name, own, optimizer, step)
        self._passed_by = None
        whole = note.get("optimizer") is not None
        self._kind_known = self._kind_known or whole or optimizer is not None
        self._assumed = None
        if not self._kind_known:
            self._assumed = name, {"optimizer": None, "order": note.get("order")}
        # By its name alone, the snapshot gives these rows again if it is here and says all.
        self.changed, self.last = path is not None or not whole, name

    def steps(self, kind: OptimizerKind) -> None:
        """An optimizer of this kind is about to update rows."""
        before = self.table.optimizer.kind
        if self._assumed is not None and kind is not before:
            raise UsageError(
                f"snapshot {self._assumed[0]!r} does not say which optimizer its state belongs to, "
                f"it was taken as that of {NAMES[before]!r}, and now {NAMES[kind]!r} updates the "
                f"rows; allowed: load_snapshot({self._assumed[0]!r}, optimizer={NAMES[kind]!r}), "
                f"which keeps the state, or optimizer={NAMES[before]!r}, and the state starts again"
            )
        self._kind_known, self._assumed, self.changed = True, None, True

    def _folders(self) -> tuple[str, ...]:
        """Those of all of these ranks."""
        size = self._ranks.size
        return tuple(folders.rank_folder(self.path, rank, size) for rank in range(size))

    def _check_note(self, note: dict[str, Any], where: str) -> None:
        """Raise unless the rows of a snapshot mean what this table's do."""
        for what, here in self._about.items():
            if what != "name" and note.get(what, here) != here:
                raise InvalidArgumentError(
                    f"{what} of snapshot {where} is {note[what]!r}; allowed: {here!r}, this "
                    "embedding's"
                )

    def _load_own(
        self, name: str, stamp: int, optimizer: Optimizer | None, step: int | None
    ) -> dict[str, Any]:
        """Load a snapshot of these ranks; returns its note."""
        stored = folders.stored_name(name, stamp)
        note = self._ranks.together(lambda: self._checked_own(stored))[self._ranks.rank]
        used = note
        if note["optimizer"] is None:
            if self._kind_of(optimizer) is OptimizerKind.FTRL:  # rows in another order
                here = folders.Source(self._folders(), name, stamp)
                return self._load_from(here, optimizer, step)
            used = self._completed(note, name, self.folder, optimizer, step)
        if self._own_store is None:
            assert isinstance(self.table, CachedTable)
            self.table.return_to(stored)
            self._take_note(used, self.table.cache)  # the rows below have their state already
            return note
        self.table.clear()
        self._take_note(used, self.table)
        row_bytes = 4 * self.storage_dim
        with ProgressBar(f"loading {name}", row_bytes * len(self._own_store)) as bar:
            for rows in self._own_store.export():
                self._room.insert(rows.ids, rows.embeddings, rows.state, rows.scores)
                bar.add(row_bytes * len(rows))
        self._take_progress(used)
        self._mark = self._mark_of_now()
        return note

    def _checked_own(self, stored: str) -> dict[str, Any]:
        note = note_of(self.folder, stored)
        self._check_note(note, stored)
        place = note["rank"], note["ranks"]
        if place != (self._ranks.rank, self._ranks.size):
            raise InvalidArgumentError(
                f"snapshot {stored} in {self.folder} is that of rank {place[0]} of {place[1]}; "
                f"allowed: rank {self._ranks.rank} of {self._ranks.size}, whose folder this is"
            )
        if self._own_store is not None:
            self._mark = None  # the store leaves the table
            self._own_store.load_snapshot(stored)
            self._room.check_snapshot(len(self._own_store))
            for _ in self._own_store.export():  # all checksums, before the first row goes
                pass
        return note

    def _load_from(
        self, found: folders.Source, optimizer: Optimizer | None, step: int | None
    ) -> dict[str, Any]:
        """Load a snapshot of other ranks: each of these reads some folders and sends the rows to
        their owners. Returns its note."""
        with ExitStack() as stack:
            kind = self._kind_of(optimizer)
            opened = self._ranks.together(lambda: self._open(found, kind, stack))
            counts, notes = zip(*opened, strict=True)
            note: dict[str, Any] = next((one for one in notes if one is not None), {})
            self._room.check_snapshot(sum(counts), self._ranks.size)
            self._mark = None
            self.table.clear()
            used = note
            if note.get("optimizer") is None:
                used = self._completed(note, found.name, found.folders[0], optimizer, step)
            self._take_note(used, self.table)
            label = f"loading {found.name}"
            with ProgressBar(label, 4 * counts[self._ranks.rank] * self.storage_dim) as bar:
                self._receive_all(self._sources, bar)
            self._take_progress(used)
        return ONEFLOW_ORDER if found.stamp is None else note

    def _open(
        self, found: folders.Source, kind: OptimizerKind, stack: ExitStack
    ) -> tuple[int, dict[str, Any] | None]:
        """Open this rank's part of the folders; returns (rows in them, a note). ``kind``: the
        optimizer of the state, if the note does not name it."""
        self._sources = []
        for folder in found.folders[self._ranks.rank :: self._ranks.size]:
            source = stack.enter_context(
                Source(
                    folder,
                    found.name,
                    found.stamp,
                    key_type=self._key_type,
                    storage_dim=self.storage_dim,
                    physical_block_size=self._physical_block_size,
                    kind=kind,
                )
            )
            self._check_note(source.note, f"{found.name!r} in {folder}")
            self._sources.append(source)
        if found.stamp is None and self._about["tables_in_keys"]:
            raise InvalidArgumentError(
                f"the table at {found.folders[0]} does not say which table its ids belong to; "
                "allowed: share_ids=True"
            )
        count = sum(source.count() for source in self._sources)
        return count, self._sources[0].note if self._sources else None

    @property
    def storage_dim(self) -> int:
        return self.table.dim + self.table.state_dim

    def _receive_all(self, sources: list[Source], bar: ProgressBar) -> None:
        batches = (batch for source in sources for batch in source.batches())
        while True:
            batch = next(batches, None)
            if not any(self._ranks.gather(batch is not None)):
                return
            if batch is not None:
                bar.add(4 * batch[1].numel())
            ids, values, scores = self._receive(batch)
            embeddings, state = values.split([self.table.dim, self.table.state_dim], 1)
            self._room.insert(ids, embeddings, state, scores)

    def _receive(self, batch: Batch | None) -> Batch:
        """Send this rank's rows to their owners; the rows that it is given."""
        if batch is None:
            empty = torch.empty(0, dtype=torch.int64, device="cpu")
            batch = empty, torch.empty(0, self.storage_dim, device="cpu"), empty
        if self._ranks.size == 1:
            return batch
        ids, values, scores = batch
        owner = self._routing.owner(ids)
        order = torch.argsort(owner, stable=True)
        # As words of 32 bits: id, score, floats by their bits.
        words = torch.cat(
            [
                ids[:, None].contiguous().view(torch.int32),
                scores[:, None].contiguous().view(torch.int32),
                values.contiguous().view(torch.int32),
            ],
            1,
        )
        sent = torch.bincount(owner, minlength=self._ranks.size)
        device = _device_of(self._ranks.group)
        received = exchange(words[order].to(device), sent.to(device), self._ranks.group)[0].cpu()
        head = received[:, :4].contiguous().view(torch.int64)
        return head[:, 0].contiguous(), received[:, 4:].view(torch.float32), head[:, 1].contiguous()

    # ---- what else a snapshot has ----

    def _kind_of(self, optimizer: Optimizer | None) -> OptimizerKind:
        """The optimizer of state whose note does not name it."""
        return self.table.optimizer.kind if optimizer is None else optimizer.kind

    def _completed(
        self,
        note: dict[str, Any],
        name: str,
        folder: str,
        optimizer: Optimizer | None,
        step: int | None,
    ) -> dict[str, Any]:
        """``note``, which names no optimizer, with the optimizer and the progress to assume. Warns
        if that may be wrong."""
        kind = self._kind_of(optimizer)
        progress = {**asdict(self.table.progress()), "iteration": 0, **(note.get("progress") or {})}
        if step is not None:
            progress["iteration"] = step
        fitting = names_of_size(self.storage_dim, self.table.dim)
        begun = f"{folder} does not say which optimizer its state belongs to"
        taken = f"taken as that of {NAMES[kind]!r} after {progress['iteration']} steps"
        if optimizer is None and not self._kind_known and len(fitting) > 1:
            self._warn(
                f"{begun}, and rows of this size fit {' and '.join(map(repr, fitting))}; {taken}. "
                f"Name it: load_snapshot({name!r}, optimizer=..., step=...)"
            )
        elif self.table.state_dim and (optimizer is None or step is None):
            logger.warning("%s; %s (load_snapshot(optimizer=..., step=...))", begun, taken)
        return {"optimizer": kind.name, "progress": progress}

    def _take_note(self, note: dict[str, Any], empty: Table) -> None:
        """Before rows come into a table that has none: the optimizer of their state."""
        kind = OptimizerKind[note["optimizer"]]
        if kind is not empty.optimizer.kind:
            empty.set_optimizer(Optimizer(kind, OptimizerArgs()))
        self._take_progress(note)

    def _take_progress(self, note: dict[str, Any]) -> None:
        """Before and after the rows: inserting counts on."""
        seed = self.table.seed  # rows that come later are this embedding's
        self.table.restore_progress(Progress(**{**note["progress"], "seed": seed}))


def _device_of(group: Any) -> torch.device:
    """Where the messages of a group must be."""
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
