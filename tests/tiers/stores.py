"""Helpers of the store tests: rows, stores, and their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import Rows
from dynamicemb.tiers import RowLayout, SsdStore, Store

OPTIONS = DynamicEmbTableOptions(dim=6, max_capacity=2**20)
ADAM = Optimizer(OptimizerKind.ADAM, OptimizerArgs())

#: Bits of ``FailingFiles(kinds=...)``: csrc/store_files.h.
OPEN, READ, WRITE, SYNC, RENAME, REMOVE = (1 << kind for kind in range(6))


def make_ssd(path: Path | str, **settings: Any) -> SsdStore:
    return SsdStore(OPTIONS, ADAM, path=path, **{"segment_mb": 1, **settings})


def make_rows(ids: Any, version: int = 0, layout: RowLayout | None = None) -> Rows:
    """Rows that are a function of (id, version)."""
    layout = layout or RowLayout.of(OPTIONS, ADAM)
    ids = torch.as_tensor(ids, dtype=torch.int64)
    base = (ids * 31 + version * 7919) % 1000003
    columns = torch.arange(layout.dim + layout.state_dim)
    values = (base[:, None] + columns).to(torch.float32)
    scores = base if layout.score_words == 1 else torch.stack([base, base + 1], 1)
    embeddings = values[:, : layout.dim].to(layout.dtype).contiguous()
    return Rows(ids, embeddings, values[:, layout.dim :].contiguous(), scores)


def assert_holds(store: Store, ids: Any, version: int = 0) -> None:
    """The store has these ids with the rows of ``make_rows``."""
    expected = make_rows(ids, version, store.layout)
    found = store.find(expected.ids)
    assert bool(found.found.all())
    assert torch.equal(found.embeddings, expected.embeddings)
    assert torch.equal(found.state, expected.state)
    assert torch.equal(found.scores, expected.scores)


def ids_in(store: Store) -> list[int]:
    return sorted(int(i) for rows in store.export(batch_size=100) for i in rows.ids)
