"""The table of rows that store options ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from dynamicemb.errors import InvalidArgumentError, wrong_value
from dynamicemb.one_embedding.folders import rows_folder
from dynamicemb.one_embedding.stores import StoreOptions
from dynamicemb.optimizers import Optimizer
from dynamicemb.options import (
    DEFAULT_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from dynamicemb.table import Table, create_table
from dynamicemb.table.base import MAX_SLOTS
from dynamicemb.tiers import HostStore, RemoteStore, SsdStore, Stack, Store

#: A table grows before it is fuller than this.
LOAD_FACTOR = 0.7
_MIB = 2**20
MakeStore = Callable[[DynamicEmbTableOptions, Optimizer], Store]


def rank_capacity(capacity: int, ranks: int) -> int:
    """Rows that one of ``ranks`` may have: its share, and a little more where ids are spread by
    their hash."""
    if ranks == 1:
        return capacity
    share = -(-capacity // ranks)
    return share + max(share // 20, 4096)


@dataclass(frozen=True)
class StoreTable:
    """What the table of one rank is made of; ``folder`` is the rank's."""

    store: StoreOptions
    dim: int
    initializer: DynamicEmbInitializerArgs
    name: str
    seed: int
    ranks: int
    folder: str

    def make(self, optimizer: Optimizer, device: torch.device | str) -> Table:
        """A table on ``device``; on an SSD or at a server, with the rows that are there."""
        store = self.store
        rows = MAX_SLOTS // 4
        if store.capacity is not None:
            rows = rank_capacity(store.capacity, self.ranks)
        first, most = _slots(rows)
        options = DynamicEmbTableOptions(
            dim=self.dim,
            initializer_args=self.initializer,
            init_capacity=first,
            max_capacity=most,
            max_load_factor=LOAD_FACTOR,
            safe_check_mode=DynamicEmbCheckMode.ERROR,
        )
        if store.in_device_memory:
            options = replace(options, score_strategy=DynamicEmbScoreStrategy.NO_EVICTION)
        else:
            first_cache, *others = (mb * _MIB for mb in store.caches_mb)
            below: list[MakeStore] = [HostStore.within(size) for size in others]
            below.append(self._last_store())
            options = replace(
                options,
                caching=True,
                local_hbm_for_values=first_cache,
                external_storage=Stack.of(*below),
            )
        with _row_size_named():
            return create_table(
                options, optimizer=optimizer, name=self.name, seed=self.seed, device=device
            )

    def _last_store(self) -> MakeStore:
        if self.store.url is not None:
            return RemoteStore.at(self.store.url, table=self.name)
        return self._make_ssd_store if self.store.on_ssd else _full_host_store

    def make_snapshot_store(self, table: Table) -> SsdStore:
        """What keeps the snapshots of a table that is in memory."""
        with _row_size_named():
            return self._make_ssd_store(table.options, table.optimizer)

    def _make_ssd_store(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> SsdStore:
        return SsdStore(
            options,
            optimizer,
            path=rows_folder(self.folder),
            physical_block_size=self.store.physical_block_size,
        )


@contextmanager
def _row_size_named() -> Iterator[None]:
    """A folder whose rows have another size: say what that comes from."""
    try:
        yield
    except InvalidArgumentError as error:
        if "bytes; expected" not in str(error):
            raise
        raise InvalidArgumentError(
            f"{error}: embedding_dim, size_factor or storage_dim are not those it was made with"
        ) from None


def _slots(rows: int) -> tuple[int, int]:
    """(slots at the start, slots at most): the first hold ``rows`` ids at the load factor; more
    are needed if a bucket is full before the table is, or if the table may grow."""
    first = -(-int(rows / LOAD_FACTOR + 1) // DEFAULT_BUCKET_CAPACITY) * DEFAULT_BUCKET_CAPACITY
    if first > MAX_SLOTS:
        raise wrong_value(
            "capacity", rows, f"at most {int(MAX_SLOTS * LOAD_FACTOR)} rows on each rank"
        )
    most = first
    while 2 * most <= MAX_SLOTS:
        most *= 2
    return first, most


def _full_host_store(options: DynamicEmbTableOptions, optimizer: Optimizer) -> Store:
    """All rows in main memory, none evicted."""
    return HostStore(
        replace(options, score_strategy=DynamicEmbScoreStrategy.NO_EVICTION, max_load_factor=0.5),
        optimizer,
    )
