"""Going through the rows of a table in several passes, each over a share of the ids that fits the
memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dynamicemb.cli.contents.base import IDS, Batch, Content, TableInfo
from dynamicemb.routing import Routing


def default_memory() -> int:
    """Bytes that rows may take: a quarter of what is free, 64 MiB to 16 GiB."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # pragma: no cover
        free = 2**30
    return min(max(free // 4, 2**26), 2**34)


@dataclass(frozen=True)
class Share:
    """The ids of one pass: those whose hash, modulo ``passes``, is ``number``."""

    number: int
    passes: int

    def of(self, batch: Batch) -> Batch:
        """Those of a batch."""
        if self.passes == 1:
            return batch
        return batch.some(Routing("hash_roundrobin", self.passes, self.number).owned(batch.ids))


def shares(rows: int, row_bytes: int, memory: int) -> list[Share]:
    """Shares of the ids of a table, each of which takes about ``memory`` bytes at most."""
    passes = max(1, -(-rows * row_bytes // memory))
    return [Share(number, passes) for number in range(passes)]


def ids_of(
    content: Content, table: TableInfo, share: Share, part: int | None = None
) -> Iterator[torch.Tensor]:
    """The ids of a share."""
    for batch in content.batches(table, part, IDS):
        yield share.of(batch).ids
