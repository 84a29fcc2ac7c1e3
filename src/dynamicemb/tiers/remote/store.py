"""A remote store below a table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from dynamicemb.errors import InvalidArgumentError, UsageError, check_integer, wrong_value
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.table.rows import Found, Rows
from dynamicemb.tiers.base import RowLayout, Store, StoreStats
from dynamicemb.tiers.remote.open import check_url, open_rows
from dynamicemb.tiers.remote.rows import Part, RemoteRows, RowFormat
from dynamicemb.tiers.remote.url import RedisUrl


def format_of(layout: RowLayout) -> RowFormat:
    """The bytes of a table's row in a remote store: scores, embedding, optimizer state."""
    parts = [
        Part("embedding", layout.dtype, layout.dim),
        Part("state", torch.float32, layout.state_dim),
        Part("scores", torch.int64, layout.score_words),
    ]
    return RowFormat(tuple(part for part in parts if part.count))


class RemoteStore(Store):
    """Rows in Redis, in ``memory://``, or behind a native plug-in; see docs/parameter_server.md.

    A row that :meth:`insert` returned for is with the server; how safe it is there is the server's
    matter. :meth:`size`, :meth:`export` and :meth:`clear` go over all keys of its database.

    Args:
        options, optimizer: of the table above; they determine the row size.
        url: of the server. ``layout=upstream`` is refused: it has no place for scores.
        table: the name of the rows there. Tables need a name each. Where ranks share a table, each
            rank's rows are under ``TABLE@RANKofRANKS``.
    """

    persistent = True

    def __init__(
        self, options: DynamicEmbTableOptions, optimizer: Optimizer, *, url: str, table: str
    ) -> None:
        super().__init__(options, optimizer)
        self._url = url
        self._name = table
        self._rows = self._open()

    def __repr__(self) -> str:
        return f"RemoteStore({self._rows!r})"

    @classmethod
    def at(cls, url: str, *, table: str) -> RemoteStoreAt:
        """For ``external_storage``: a store at ``url``, under this name."""
        return RemoteStoreAt(url, table)

    def _open(self) -> RemoteRows:
        if not isinstance(self._name, str) or not self._name:
            raise wrong_value("table", self._name, "a name that is not empty")
        name = self._name
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            name = f"{name}@{dist.get_rank()}of{dist.get_world_size()}"
        return open_rows(self._url, name, format_of(self.layout))

    def find(self, ids: torch.Tensor) -> Found:
        found, rows = self._rows.pull(ids)
        parts = self._unpack(rows)
        return Found(found, parts.embeddings, parts.state, parts.scores)

    def _unpack(self, rows: torch.Tensor) -> Rows:
        out = self.layout.empty(0)
        by_name = {
            part.name: tensor
            for part, tensor in zip(
                self._rows.format.parts, self._rows.format.unpack(rows), strict=True
            )
        }
        state = by_name.get("state", torch.empty(len(rows), 0, device="cpu"))
        scores = by_name["scores"].view(len(rows), *out.scores.shape[1:])
        return Rows(out.ids, by_name["embedding"], state, scores)

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        return self._rows.contains(ids)

    def insert(self, rows: Rows) -> None:
        rows = self.layout.check(rows)
        parts = {"embedding": rows.embeddings, "state": rows.state, "scores": rows.scores}
        row_format = self._rows.format
        self._rows.push(rows.ids, row_format.pack([parts[p.name] for p in row_format.parts]))

    def insert_counting(self, rows: Rows) -> int | None:
        """:meth:`insert`. How many ids are new is not known: it would cost a question per row."""
        self.insert(rows)
        return None

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        return self._rows.erase(ids)

    def export(self, *, batch_size: int = 65536) -> Iterator[Rows]:
        return self._export(check_integer("batch_size", batch_size, minimum=1))

    def _export(self, batch_size: int) -> Iterator[Rows]:
        for ids, rows in self._rows.iterate(batch_size):
            parts = self._unpack(rows)
            yield Rows(ids, parts.embeddings, parts.state, parts.scores)

    def clear(self) -> None:
        self._rows.clear()

    def size(self) -> int:
        return self._rows.count()

    def set_layout(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> None:
        if self.size():
            raise UsageError(f"{self!r} has rows; its layout cannot change")
        super().set_layout(options, optimizer)
        self._rows.close()
        self._rows = self._open()

    def stats(self) -> StoreStats:
        return StoreStats(rows=self.size(), details={"server": repr(self._rows)})

    def close(self) -> None:
        self._rows.close()


class RemoteStoreAt:
    """Makes the :class:`RemoteStore` of a table. Its ``repr`` shows no credentials."""

    def __init__(self, url: str, table: str) -> None:
        parsed = check_url(url)
        if isinstance(parsed, RedisUrl) and parsed.layout == "upstream":
            raise InvalidArgumentError(
                "layout is 'upstream' for the store of a dynamic table; allowed: 'packed' (the "
                "other has no place for scores)"
            )
        self._url, self._shown, self.table = url, repr(parsed), table

    def __call__(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> RemoteStore:
        return RemoteStore(options, optimizer, url=self._url, table=self.table)

    def __repr__(self) -> str:
        return f"RemoteStore.at({self._shown}, table={self.table!r})"
