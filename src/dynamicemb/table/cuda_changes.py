"""What changed in a table on a GPU since a moment, for incremental dumps."""

from __future__ import annotations

import torch

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
        self.removals: Removals | None = None

    def mark(self) -> int:
        """A mark for this moment."""
        if self.now >= LAST_MARK:
            raise OverflowError("a table has no more marks of changes")
        self.now += 1
        return self.now - 1


class Removals:
    """The ids that left, oldest first; of more than ``limit``, the oldest are forgotten."""

    def __init__(self, mark: int, limit: int) -> None:
        self.known_since = mark
        self.limit = limit
        self._groups: list[tuple[int, torch.Tensor]] = []  # (when, ids int64)
        self._count = 0

    def add(self, now: int, ids: torch.Tensor) -> None:
        if len(ids):
            self._groups.append((now, ids))
            self._count += len(ids)
            if self._count > 2 * self.limit:
                self.shrink()

    def since(self, mark: int) -> torch.Tensor | None:
        """The ids that left after ``mark``; ``None``: none."""
        self.shrink()
        parts = [ids for now, ids in self._groups if now > mark]
        return torch.cat(parts) if parts else None

    def bytes(self) -> int:
        return 8 * self._count

    def shrink(self) -> None:
        """Each id once, when it left last, and not more than the limit."""
        if self._count <= self.limit:
            return
        ids = torch.cat([part for _, part in self._groups])
        times = torch.cat([torch.full_like(part, now) for now, part in self._groups])
        order = torch.sort(ids, stable=True).indices  # of equal ones the last is the latest
        last = torch.ones_like(ids, dtype=torch.bool)
        last[:-1] = ids[order][1:] != ids[order][:-1]
        kept = order[last].sort().values
        forgotten = kept[: max(len(kept) - self.limit, 0)]
        if len(forgotten):
            self.known_since = max(self.known_since, int(times[forgotten].max()))
        kept = kept[len(forgotten) :]
        ids, times = ids[kept], times[kept]
        nows, counts = torch.unique_consecutive(times, return_counts=True)
        parts = ids.split(counts.tolist())
        self._groups = [(now, part.clone()) for now, part in zip(nows.tolist(), parts, strict=True)]
        self._count = len(ids)
