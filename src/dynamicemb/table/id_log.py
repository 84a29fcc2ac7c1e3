"""Which ids something happened to, since when."""

from __future__ import annotations

import torch


class IdLog:
    """Ids with the mark after which something happened to them, the newest first to be kept.

    ``limit``: ids that are remembered, 8 bytes each, at most. ``known_since``: the oldest mark that
    :meth:`after` can answer. The ids are on ``device``.
    """

    def __init__(self, limit: int, known_since: int, device: torch.device | str = "cpu") -> None:
        self._limit = limit
        self.known_since = known_since
        self._none = torch.empty(0, dtype=torch.int64, device=device)
        self._entries: list[tuple[int, torch.Tensor]] = []
        self._count = 0
        self._tidy_at = min(limit, 2**16)

    def add(self, mark: int, ids: torch.Tensor) -> None:
        """It happened to ``ids`` after ``mark``, the last one there is."""
        if not len(ids):
            return
        self._entries.append((mark, ids))
        self._count += len(ids)
        if self._count > self._tidy_at:
            self._tidy()

    def set_limit(self, limit: int) -> None:
        """Another limit, from now on and for what is known."""
        self._limit = limit
        self._tidy_at = min(self._tidy_at, limit)
        if self._count > limit:
            self._tidy()

    @property
    def bytes(self) -> int:
        """Memory for the ids."""
        return 8 * self._count

    def _tidy(self) -> None:
        """Keep the last mark of each id, and no more than the limit."""
        parts: dict[int, list[torch.Tensor]] = {}
        for mark, ids in self._entries:
            parts.setdefault(mark, []).append(ids)
        newer = self._none
        kept: list[tuple[int, torch.Tensor]] = []
        for mark in sorted(parts, reverse=True):
            ids = torch.unique(torch.cat(parts[mark]))
            ids = ids[~torch.isin(ids, newer)]
            if len(newer) + len(ids) > self._limit:
                self.known_since = mark + 1
                break
            kept.append((mark, ids))
            newer = torch.cat([newer, ids])
        self._entries = kept[::-1]
        self._count = len(newer)
        self._tidy_at = min(self._limit, max(2**16, 2 * self._count))

    def forget(self, mark: int) -> None:
        """What happened up to now, after ``mark`` too, is not known."""
        self._entries, self._count = [], 0
        self.known_since = mark + 1

    def after(self, mark: int) -> torch.Tensor:
        """The ids it happened to after ``mark``, each once, in ascending order."""
        parts = [ids for entry, ids in self._entries if entry >= mark]
        distinct: torch.Tensor = torch.unique(torch.cat([self._none, *parts]))
        return distinct
