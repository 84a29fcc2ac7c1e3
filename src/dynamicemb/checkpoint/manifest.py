"""What a checkpoint says about itself, and the limits of what it may say.

``manifest_json.py`` has its bytes, docs/checkpoint_format.md the grammar. Nothing here reads or
writes the tables' files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dynamicemb.checkpoint.names import file_name, opt_args_name
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import ScoreStrategy
from dynamicemb.routing import Routing
from dynamicemb.table.rows import Progress

FORMAT = "dynamicemb checkpoint"
VERSION = 1
MANIFEST_NAME = "dynamicemb_manifest.json"
#: Folders that a dump fills, inside the target; they are followed by the checkpoint's id.
STAGING_PREFIX = ".dynamicemb-"
#: Bytes of a block: what one checksum covers. The last of a file may be shorter.
BLOCK_BYTES = 4 * 2**20

#: How long a manifest may be: FREE_BYTES, and more for each file beside it and for each 4 MiB of
#: these, since reading one takes many times its length in memory. An empty file, or a sparse one,
#: is cheap to make: it counts little, and bytes count up to COMPRESSION times those on the device.
FREE_BYTES = 2**20
BYTES_PER_FILE = 2**10
BYTES_PER_EMPTY_FILE = 192
BYTES_PER_BLOCK = 64
COMPRESSION = 64
MAX_MANIFEST_BYTES = 2**30
#: Bytes of a manifest longer than FREE_BYTES for each of its JSON values; a dump writes 27.
BYTES_PER_VALUE = 12
#: What a manifest may claim.
MAX_BLOCK_BYTES = 2**26
MAX_ROWS = 2**40
MAX_RANKS = 2**20

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileEntry:
    """One file: its length, and the checksum of each block (``None``: none was kept)."""

    bytes: int
    checksums: tuple[int, ...] | None


@dataclass(frozen=True)
class Shard:
    """One rank's rows of a table.

    checkpoint: the id of the checkpoint it was written for. clock: the table's, where its scores
    are readings of it. owner: the rank its routing gives it. counter_rows: ids in the admission
    counter, ``None`` if that was not saved. files: by role (see ``names.ROLES``); further roles
    are checked like the others and left to those who know them.
    """

    checkpoint: str
    rank: int
    owner: int | None
    rows: int
    counter_rows: int | None
    clock: int | None
    progress: Progress
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class TableEntry:
    """A table and its shards, in rank order.

    stem: what its file names begin with. dtype: of the table; value_dtype: of the file of values.
    scores, state: whether scores and optimizer state were saved. routing: how ids were spread
    (its rank is 0; ``None``: every rank had a table of its own). options: for the reader's eye.
    """

    name: str
    stem: str
    dim: int
    dtype: torch.dtype
    value_dtype: torch.dtype
    strategy: ScoreStrategy
    scores: bool
    state: bool
    routing: Routing | None
    optimizer: Optimizer
    options: Mapping[str, Any]
    opt_args: FileEntry | None
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def score_words(self) -> int:
        return 2 if isinstance(self.strategy, tuple) else 1

    def row_bytes(self, role: str) -> int:
        """Bytes of one row (or one counted id) in the file of ``role``."""
        return {
            "keys": 8,
            "values": self.dim * self.value_dtype.itemsize,
            "scores": 8 * self.score_words,
            "opt_values": 4 * self.optimizer.state_dim(self.dim),
            "counter_keys": 8,
            "counter_frequencies": 8,
        }[role]

    def file(self, shard: Shard, role: str) -> str:
        """The name of a shard's file."""
        return file_name(self.stem, role, shard.rank, len(self.shards))

    def file_entries(self) -> dict[str, FileEntry]:
        """Every file of the table, by name."""
        entries = {
            self.file(shard, role): entry
            for shard in self.shards
            for role, entry in shard.files.items()
        }
        if self.opt_args is not None:
            entries[opt_args_name(self.stem)] = self.opt_args
        return entries


@dataclass(frozen=True)
class CollectionEntry:
    """The tables of one collection; ``folder`` holds their files."""

    path: str
    folder: str
    tables: dict[str, TableEntry]


@dataclass(frozen=True)
class Manifest:
    """The whole checkpoint, by collection path. ``extra``: what the writer adds, any JSON."""

    id: str
    created: str
    library: str
    world_size: int
    block_bytes: int
    collections: dict[str, CollectionEntry]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def files(self) -> dict[str, dict[str, FileEntry]]:
        """Every file, by folder and name."""
        found: dict[str, dict[str, FileEntry]] = {}
        for collection in self.collections.values():
            names = found.setdefault(collection.folder, {})
            for table in collection.tables.values():
                names.update(table.file_entries())
        return found
