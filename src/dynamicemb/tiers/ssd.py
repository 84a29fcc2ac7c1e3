"""A store on an SSD."""

from __future__ import annotations

import errno
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dynamicemb import _engine
from dynamicemb.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    StoreError,
    UsageError,
    check_bool,
    check_choice,
    check_integer,
    check_path,
    wrong_value,
)
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.rows import Found, Rows
from dynamicemb.tiers.base import BoundedStore, RowLayout, StoreStats
from dynamicemb.tiers.merge import select

_MOST_AT_ONCE = 2**18  # rows that are handed down together
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


class SsdStore(BoundedStore):
    """Rows in a folder, as a log of segments with an index in memory: at most 16 bytes per row,
    and 9 to 18 for each record of the segment that is being written.

    The folder belongs to one store of one process at a time; a forked child can read what was there
    at the fork, and change nothing. Opening the folder again finds what was flushed, and what the
    operating system still had of the rest. Every file has the id of its store and its own place,
    and every record a checksum: a corrupt, exchanged or missing file is a CorruptStoreError that
    names it, when the folder is opened or when the row is read. While the disk is full
    :meth:`insert` raises a StoreError that names the file; its rows stay in memory, are found, and
    are written by the next call that can. The same holds for any other error of the disk.

    Args:
        options, optimizer: of the table above; they say what a row is.
        path: the folder; made if it is not there.
        physical_block_size: 512 or 4096, the unit of reads and writes with ``direct_io``. Fixed
            when the folder is made.
        direct_io: go past the page cache (O_DIRECT), where the file system can; then reading costs
            the SSD's time whenever a row is not in the table above, and no memory.
        segment_mb: size of a segment. Each is one open file.
        io_threads: reads in flight.
        max_rows: the bound of the store. Beyond it, the rows that were written longest ago go down
            in a :class:`~dynamicemb.tiers.Stack`; without a store below it is as if the disk were
            full.
        snapshot: open this snapshot alone, for reading. The folder is neither locked nor changed:
            another store may have it open, and keeps the snapshot as long as it does not drop it.
    """

    persistent = True

    def __init__(
        self,
        options: DynamicEmbTableOptions,
        optimizer: Optimizer,
        *,
        path: str | os.PathLike[str],
        physical_block_size: int = 4096,
        direct_io: bool = False,
        segment_mb: int = 64,
        io_threads: int = 16,
        max_rows: int | None = None,
        snapshot: str | None = None,
        files: Any = None,
    ) -> None:
        super().__init__(options, optimizer)
        self.path = os.path.abspath(check_path("path", path))
        check_choice("physical_block_size", physical_block_size, (512, 4096))
        self._settings = {
            "block": physical_block_size,
            "direct": check_bool("direct_io", direct_io),
            "segment_bytes": check_integer("segment_mb", segment_mb, minimum=1, maximum=4096) << 20,
            "io_threads": check_integer("io_threads", io_threads, minimum=1, maximum=256),
            "files": files,  # of tests: operations that fail
            "snapshot": "" if snapshot is None else _checked_name(snapshot),
        }
        if max_rows is not None:
            max_rows = check_integer("max_rows", max_rows, minimum=1)
        self._max_rows = max_rows
        self._hands_down = False
        self._oldest = self._after_surplus = (0, 0)  # in the log: rows before were handed down
        self._open()

    @classmethod
    def at(
        cls, path: str | os.PathLike[str], **settings: Any
    ) -> Callable[[DynamicEmbTableOptions, Optimizer], SsdStore]:
        """For ``external_storage``: a store in this folder. Tables need a folder each."""
        check_path("path", path)
        return functools.partial(cls, path=path, **settings)

    def _open(self) -> None:
        with self._errors():
            if not self._settings["snapshot"]:
                os.makedirs(self.path, exist_ok=True)
            self._store = _engine.SsdStore(
                path=self.path, payload=self.layout.row_bytes, **self._settings
            )
        moved: Any = self._store.stats()["set_aside"]
        if moved:
            warnings.warn(
                f"files in {self.path} that are not part of the store were moved to "
                f"{', '.join(moved)}",
                UserWarning,
                stacklevel=3,
            )

    @contextmanager
    def _errors(self, *, kept: bool = False) -> Iterator[None]:
        """The engine's errors as the library's."""
        try:
            yield
        except _engine.CorruptStore as error:
            raise CorruptStoreError(None, str(error)) from None
        except OSError as error:
            message = str(error.strerror)
            if error.filename is not None and str(error.filename) not in message:
                message = f"{error.filename}: {message}"
            raise StoreError(error.errno, message, error.filename, kept=kept) from None
        except ValueError as error:  # rows of another size
            raise InvalidArgumentError(str(error)) from None
        except RuntimeError as error:  # closed
            raise UsageError(str(error)) from None

    def _columns(self, rows: Rows | Found) -> list[tuple[int, int]]:
        parts = (rows.scores, rows.embeddings, rows.state)
        widths = (
            8 * self.layout.score_words,
            self.layout.dim * self.layout.dtype.itemsize,
            4 * self.layout.state_dim,
        )
        return [(part.data_ptr(), width) for part, width in zip(parts, widths, strict=True)]

    def find(self, ids: torch.Tensor) -> Found:
        ids = ids.contiguous()
        rows = self.layout.empty(len(ids))
        found = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        with self._errors():
            self._store.find(ids.data_ptr(), len(ids), found.data_ptr(), self._columns(rows))
        return Found(found, rows.embeddings, rows.state, rows.scores)

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.contiguous()
        found = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        with self._errors():
            self._store.contains(ids.data_ptr(), len(ids), found.data_ptr())
        return found

    def insert(self, rows: Rows) -> None:
        rows = self.layout.check(rows)
        if self._max_rows is not None and not self._hands_down:
            self._check_room(rows)
        with self._errors(kept=True):
            self._store.insert(rows.ids.data_ptr(), len(rows), self._columns(rows))

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.contiguous()
        removed = torch.empty(len(ids), dtype=torch.bool, device="cpu")
        with self._errors(kept=True):
            self._store.erase(ids.data_ptr(), len(ids), removed.data_ptr())
        return removed

    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        batch_size = check_integer("batch_size", batch_size, minimum=1)
        return self._export(batch_size)

    def _export(self, batch_size: int) -> Iterator[Rows]:
        cursor = (0, 0)
        while True:
            rows, cursor = self._after(cursor, batch_size)
            if not len(rows):
                return
            yield rows

    def _after(self, cursor: tuple[int, int], limit: int) -> tuple[Rows, tuple[int, int]]:
        """At most ``limit`` rows of the log after a cursor, and the cursor after them."""
        rows = self.layout.empty(min(limit, self.size()))
        with self._errors():
            count, number, place = self._store.export_rows(
                cursor, len(rows), rows.ids.data_ptr(), self._columns(rows)
            )
        return select(rows, slice(0, count)), (number, place)

    # ---- the bound ----

    def _check_room(self, rows: Rows) -> None:
        assert self._max_rows is not None
        new = int((~self.contains(torch.unique(rows.ids))).sum())
        if self.size() + new > self._max_rows:
            raise StoreError(
                errno.ENOSPC,
                f"the store at {self.path} has {self.size()} rows and {new} new ones to take; "
                f"max_rows is {self._max_rows}",
                self.path,
            )

    def buckets(self) -> tuple[int, int] | None:
        return None if self._max_rows is None or self._hands_down else (1, self._max_rows)

    def hand_down(self) -> None:
        self._hands_down = True

    def surplus(self) -> Rows:
        """The rows that were written longest ago; a sixteenth of the store at least, for the store
        below is flushed each time."""
        excess = 0 if self._max_rows is None else self.size() - self._max_rows
        if self._max_rows is None or excess <= 0:
            return self.layout.empty(0)
        limit = min(excess + self._max_rows // 16, _MOST_AT_ONCE)
        rows, cursor = self._after(self._oldest, limit)
        if not len(rows):  # the log was rewritten; begin again
            rows, cursor = self._after((0, 0), limit)
        self._after_surplus = cursor
        return rows

    def release(self, ids: torch.Tensor) -> None:
        self.erase(ids)
        self._oldest = self._after_surplus

    def clear(self) -> None:
        with self._errors():
            self._store.clear()

    def size(self) -> int:
        with self._errors():
            return self._store.size

    def flush(self) -> None:
        """When it returns, everything inserted before survives a crash of the process or the
        machine."""
        with self._errors(kept=True):
            self._store.flush()

    def snapshot(self, name: str, note: bytes = b"") -> None:
        """Keep the content of now under ``name`` (letters, digits, ``_ . -``). Costs no copy: rows
        of a snapshot stay on the disk until it is dropped."""
        with self._errors(kept=True):
            self._store.snapshot(_checked_name(name), note)

    def load_snapshot(self, name: str) -> bytes:
        with self._errors():
            return self._store.load_snapshot(_checked_name(name))

    def drop_snapshot(self, name: str) -> None:
        with self._errors():
            self._store.drop_snapshot(_checked_name(name))

    def snapshots(self) -> list[str]:
        with self._errors():
            return self._store.snapshots()

    def set_layout(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        layout = RowLayout.of(options, optimizer)
        with self._errors():
            self._store.set_payload(layout.row_bytes)
        self.layout = layout

    def stats(self) -> StoreStats:
        with self._errors():
            details: dict[str, Any] = dict(self._store.stats())
        return StoreStats(
            rows=details.pop("rows"),
            bytes_in_memory=details["index_bytes"] + details["pending_bytes"],
            bytes_on_disk=details.pop("disk_bytes"),
            details=details,
        )

    def close(self) -> None:
        with self._errors(kept=True):
            self._store.close()


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong_value(
            "the name of a snapshot", name, "1 to 200 of letters, digits, '_', '.' and '-'"
        )
    return name
