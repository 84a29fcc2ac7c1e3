"""Embeddings for serving at a server: ``publish`` writes what changed, ``PublishedTable`` reads."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from dynamicemb.checkpoint.dump import TableNames
from dynamicemb.errors import UsageError, check_integer, wrong_type, wrong_value
from dynamicemb.nn.discovery import check_written, find_collections, select_tables
from dynamicemb.options import BATCH_SIZE_PER_DUMP
from dynamicemb.table import Table
from dynamicemb.tiers.remote.open import open_rows
from dynamicemb.tiers.remote.rows import Part, RowFormat


@dataclass(frozen=True)
class Published:
    """How many rows :func:`publish` wrote, and how many ids that left it erased, on this rank."""

    rows: int
    removed: int


# Per table, by URL: the mark of the last call.
_published: weakref.WeakKeyDictionary[Table, dict[str, int]] = weakref.WeakKeyDictionary()


def publish(url: str, model: nn.Module, table_names: TableNames = None) -> Published:
    """Bring the embeddings of ``model`` at the server ``url`` up to date: rows that were looked up,
    written or updated since the last call of this process with this URL, and the ids that left. The
    first call writes all rows. Readers are :class:`PublishedTable`.

    Rows are under ``PATH.TABLE`` (``model.words.rows``), without optimizer state and scores; ranks
    that share a table write their own rows under the same name. table_names: as for
    ``DynamicEmbDump``.

    Readers see rows change one by one, while this runs. If the server fails, a StoreError is raised
    and the next call writes the same rows again.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module")
    selected = select_tables(find_collections(model), table_names)
    check_written(module for tables in selected.values() for module, _ in tables.values())
    chosen = [
        (f"{path}.{name}", table)
        for path, tables in selected.items()
        for name, (_, table) in tables.items()
    ]
    if not chosen:
        raise UsageError(f"{type(model).__name__} has no dynamic embedding tables")
    total, removed = 0, 0
    for name, table in chosen:
        server = open_rows(url, name, _format(table.dtype, table.dim))
        since = _published.get(table, {}).get(url)
        gone = None if since is None else table.removed_since(since)
        table.log_removals()
        mark = table.mark_changes()  # before the rows: what changes meanwhile is in the next call
        for rows in table.export(batch_size=BATCH_SIZE_PER_DUMP, changed_since=since):
            server.push(rows.ids.cpu(), server.format.pack([rows.embeddings]))
            total += len(rows)
        if gone is not None and len(gone):
            removed += int(server.erase(gone.cpu()).sum())
        _published.setdefault(table, {})[url] = mark
    return Published(total, removed)


def _format(dtype: torch.dtype, dim: int) -> RowFormat:
    return RowFormat((Part("embedding", dtype, dim),))


class PublishedTable(nn.Module):
    """Embeddings that :func:`publish` wrote, for lookups only.

    ``table(ids)``: ids of any shape, int64, to embeddings [..., dim]; ids that are not there read
    0.0. Every call asks the server.

    Args:
        url: of the server.
        name: ``PATH.TABLE``, as :func:`publish` names it.
        dim, dtype: of the rows. Rows of another kind are an InvalidArgumentError.
    """

    def __init__(
        self, url: str, name: str, dim: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        check_integer("dim", dim, minimum=1)
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise wrong_value("dtype", dtype, "torch.float32, torch.float16, torch.bfloat16")
        self._rows = open_rows(url, name, _format(dtype, dim))

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(bool [n]: which ids are there, their embeddings [n, dim])."""
        distinct, places = torch.unique(ids, return_inverse=True)
        found, rows = self._rows.pull(distinct)
        embeddings = self._rows.format.unpack(rows)[0]
        embeddings[~found] = 0
        return found[places], embeddings[places]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of ``ids`` (int64, any shape): ``[*ids.shape, dim]``; unknown ids read 0.0."""
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64:
            raise wrong_type("ids", getattr(ids, "dtype", ids), "a tensor of int64")
        _, embeddings = self.find(ids.reshape(-1).cpu())
        return embeddings.view(*ids.shape, -1).to(ids.device)
