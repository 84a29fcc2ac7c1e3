"""Embeddings for tests: every kind of store, small."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from dynamicemb import one_embedding

STORES = ("device_mem", "cached_host_mem", "cached_ssd")
DIM = 8

_numbers = itertools.count()


def store_options(store: str, path: str | Path | list[str], **options: Any) -> dict[str, Any]:
    """Options of a store of a kind (those of ``STORES``, and "host_and_ssd"); caches of 1 MiB."""
    where: Any = path if isinstance(path, list) else str(path)
    if store == "device_mem":
        options = {"capacity": 100_000} | options
        return one_embedding.make_device_mem_store_options(where, **options)
    if store == "cached_host_mem":
        options = {"capacity": 100_000} | options
        return one_embedding.make_cached_host_mem_store_options(1, where, **options)
    if store == "host_and_ssd":  # a second cache, in main memory
        options = {"host_cache_budget_mb": 3} | options
    return one_embedding.make_cached_ssd_store_options(1, where, **options)


def uniform_tables(*bounds: float) -> list[dict[str, Any]]:
    """Tables whose new rows are uniform in +- a bound each."""
    return [
        one_embedding.make_table_options(
            one_embedding.make_uniform_initializer(low=-bound, high=bound)
        )
        for bound in bounds
    ]


def make(
    path: str | Path | list[str],
    store: str = "device_mem",
    *,
    dim: Any = DIM,
    tables: list[dict[str, Any]] | None = None,
    key_type: torch.dtype = torch.int64,
    module: type[one_embedding.Embedding] = one_embedding.MultiTableEmbedding,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> one_embedding.Embedding:
    """An embedding with a name of its own."""
    return module(
        arguments.pop("name", f"embedding {next(_numbers)}"),
        dim,
        torch.float,
        key_type,
        tables,
        options or store_options(store, path, size_factor=arguments.pop("size_factor", 1)),
        **arguments,
    )


def rows_of(embedding: one_embedding.Embedding, ids: Any) -> torch.Tensor:
    """The rows of ids that have one, as they are stored."""
    found = embedding.tables[0].find(torch.as_tensor(ids))
    assert found.found.all()
    return found.embeddings


def train(
    embedding: one_embedding.Embedding,
    optimizer: Any,
    *,
    steps: int,
    ids: int = 2000,
    batch: int = 200,
    seed: int = 0,
) -> list[float]:
    """Losses of training on random ids."""
    draw = torch.Generator().manual_seed(seed)
    tables = embedding.num_tables
    target = torch.randn(ids, embedding.embedding_dim, generator=draw)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(0, ids, (batch, tables), generator=draw)
        optimizer.zero_grad()
        loss = ((embedding(chosen) - target[chosen]) ** 2).sum() / batch
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
