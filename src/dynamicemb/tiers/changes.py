"""What changed in a table of two levels, since when."""

from __future__ import annotations

import torch

from dynamicemb.table.id_log import IdLog

#: Ids of written rows that are remembered; beyond them all rows of the store count as changed.
_MOST_WRITTEN = 2**22
#: Marks that are remembered; before them all rows count as changed.
_MOST_MARKS = 4096


class Changes:
    """The marks of a cached table, each with the cache's own mark of that moment; the ids whose
    rows were written to the store; the ids that left both."""

    def __init__(self) -> None:
        self._mark = 0  # the last one that was handed out
        self._cache_marks: dict[int, int] = {}
        self._written: IdLog | None = None
        self._removed: IdLog | None = None

    def mark(self, of_cache: int) -> int:
        """A new mark, at the cache's mark ``of_cache``."""
        self._mark += 1
        self._cache_marks[self._mark] = of_cache
        if len(self._cache_marks) > _MOST_MARKS:
            del self._cache_marks[min(self._cache_marks)]
        if self._written is None:
            self._written = IdLog(_MOST_WRITTEN, self._mark)
        return self._mark

    def of_cache(self, mark: int) -> int | None:
        """The cache's mark of that moment; ``None``: not known any more."""
        return self._cache_marks.get(mark)

    def forget(self) -> None:
        """The table has other rows than before."""
        for log in (self._written, self._removed):
            if log is not None:
                log.forget(self._mark)

    def forget_rows(self) -> None:
        """All rows changed; none left."""
        self._cache_marks.clear()
        if self._written is not None:
            self._written.forget(self._mark)

    # ---- rows that were written to the store ----

    @property
    def tracked(self) -> bool:
        """Whether there was a mark."""
        return self._written is not None

    def written(self, ids: torch.Tensor) -> None:
        if self._written is not None:
            self._written.add(self._mark, ids)

    def written_after(self, mark: int) -> torch.Tensor | None:
        """The ids whose rows were written after ``mark``; ``None``: not known."""
        if self._written is None or mark < self._written.known_since or self.of_cache(mark) is None:
            return None
        return self._written.after(mark)

    # ---- rows that left the whole ----

    def log_removals(self, limit: int) -> None:
        if self._removed is None:
            self._removed = IdLog(limit, self._mark)
        else:
            self._removed.set_limit(limit)

    @property
    def logs_removals(self) -> bool:
        return self._removed is not None

    def removed(self, ids: torch.Tensor) -> None:
        if self._removed is not None:
            self._removed.add(self._mark, ids)

    def removed_after(self, mark: int) -> tuple[int, torch.Tensor]:
        """(the oldest mark that can be answered, the ids that left after ``mark``)."""
        assert self._removed is not None
        return self._removed.known_since, self._removed.after(mark)
