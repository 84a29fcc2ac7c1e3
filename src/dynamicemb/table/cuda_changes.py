"""What changed in a table on a GPU since a moment, for incremental dumps."""

from __future__ import annotations

import torch

from dynamicemb.table.id_log import IdLog

#: Marks before the numbers of a table's stamps are used up.
LAST_MARK = 2**31 - 2


class Changes:
    """When each row changed last, and which ids left.

    Time is counted in marks: ``now`` is the number of marks so far plus one, and what happens until
    the next mark happens at ``now``. Nothing is written down before the first mark.
    """

    def __init__(self) -> None:
        self.now = 1
        self.stamps: torch.Tensor | None = None  # int32 per slot: when its row changed last
        self.removals: IdLog | None = None

    @property
    def last_mark(self) -> int:
        return self.now - 1

    def mark(self) -> int:
        """A mark for this moment."""
        if self.now >= LAST_MARK:
            raise OverflowError("a table has no more marks of changes")
        self.now += 1
        return self.last_mark
