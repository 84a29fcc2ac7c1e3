"""A store as a user would write it, from the documentation of ``dynamicemb.tiers.Store`` alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dynamicemb.table import Found, Rows
from dynamicemb.tiers import Store


class DictStore(Store):
    """Rows in a Python dictionary."""

    def __init__(self, options, optimizer) -> None:  # type: ignore[no-untyped-def]
        super().__init__(options, optimizer)
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def find(self, ids: torch.Tensor) -> Found:
        out = self.layout.empty(len(ids))
        found = torch.zeros(len(ids), dtype=torch.bool)
        for i, id_ in enumerate(ids.tolist()):
            if id_ in self.rows:
                found[i] = True
                out.embeddings[i], out.state[i], out.scores[i] = self.rows[id_]
        return Found(found, out.embeddings, out.state, out.scores)

    def insert(self, rows: Rows) -> None:
        for i, id_ in enumerate(rows.ids.tolist()):
            self.rows[id_] = (
                rows.embeddings[i].clone(),
                rows.state[i].clone(),
                rows.scores[i].clone(),
            )

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.rows.pop(id_, None) is not None for id_ in ids.tolist()]).bool()

    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        ids = list(self.rows)
        for begin in range(0, len(ids), batch_size):
            part = torch.tensor(ids[begin : begin + batch_size], dtype=torch.int64)
            found = self.find(part)
            yield Rows(part, found.embeddings, found.state, found.scores)

    def clear(self) -> None:
        self.rows.clear()

    def size(self) -> int:
        return len(self.rows)
