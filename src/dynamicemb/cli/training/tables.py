"""Dynamic tables, and how many rows tables of another kind have in the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from dynamicemb.admission import (
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)
from dynamicemb.capacity import get_table_bytes
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.nn import discovery
from dynamicemb.nn.discovery import find_collections
from dynamicemb.optimizers import Optimizer, get_optimizer_state_dim
from dynamicemb.options import (
    DEFAULT_BUCKET_CAPACITY,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    ScoreStrategy,
    align_to_table_size,
)
from dynamicemb.table import Table
from dynamicemb.tiers import RemoteStore, SsdStore

OPTIMIZERS: Mapping[str, str] = {
    "adagrad": "exact_adagrad",
    "rowwise_adagrad": "exact_row_wise_adagrad",
    "sgd": "sgd",
    "adam": "adam",
}

SCORES: Mapping[str, ScoreStrategy] = {
    "step": DynamicEmbScoreStrategy.STEP,
    "timestamp": DynamicEmbScoreStrategy.TIMESTAMP,
    "lfu": DynamicEmbScoreStrategy.LFU,
    "timestamp_lfu": (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU),
    "no_eviction": DynamicEmbScoreStrategy.NO_EVICTION,
}

#: Rows of a table at the start; it doubles as ids come.
START = 1024
#: Ids without a row that are counted, for each row.
COUNTED_PER_ROW = 2


def table_options(options: TrainOptions, start: int | None = None) -> DynamicEmbTableOptions:
    """The options of a table in memory, or of a process's share of one; ``start``: rows at the
    start, of a run that goes on."""
    kind, _, number = options.admission.partition(":")
    share = -(-options.capacity // options.nproc)
    admission: dict[str, Any] = {}
    if kind == "frequency":
        admission = {
            "admit_strategy": FrequencyAdmissionStrategy(threshold=int(number)),
            "admission_counter": KVCounter(capacity=COUNTED_PER_ROW * share),
        }
    elif kind == "probability":
        admission = {"admit_strategy": ProbabilityAdmissionStrategy(float(number))}
    capacity = align_to_table_size(share, DEFAULT_BUCKET_CAPACITY)
    return DynamicEmbTableOptions(
        dim=options.dim,
        max_capacity=capacity,
        init_capacity=min(capacity, start or START),
        score_strategy=SCORES[options.score],
        initializer_args=DynamicEmbInitializerArgs(
            mode=DynamicEmbInitializerMode.NORMAL, std_dev=options.init_std
        ),
        **admission,
    )


@dataclass(frozen=True)
class SsdOfRank:
    """For ``external_storage``: a store in this folder; each process has a folder of its own."""

    folder: Path

    def __call__(self, options: DynamicEmbTableOptions, optimizer: Optimizer) -> SsdStore:
        folder = self.folder
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            folder = folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}"
        return SsdStore(options, optimizer, path=folder)


def stored_options(options: TrainOptions, name: str, start: int | None) -> DynamicEmbTableOptions:
    """The options of a table: in memory, or with all rows in a store and in memory what
    ``--capacity`` rows take."""
    in_memory = table_options(options, start)
    if options.store == "memory":
        return in_memory
    kind, _, folder = options.store.partition(":")
    store: Any
    if kind == "ssd":
        store = SsdOfRank(Path(folder) / name)
    else:
        store = RemoteStore.at(options.store, table=name)
    budget = sum(get_table_bytes(in_memory, OPTIMIZERS[options.optimizer]))
    return replace(in_memory, external_storage=store, local_hbm_for_values=budget)


def row_bytes(options: TrainOptions) -> int:
    """Bytes of a row of a static table with its optimizer state."""
    state = get_optimizer_state_dim(OPTIMIZERS[options.optimizer], options.dim)
    return 4 * (options.dim + state)


def full_bytes(options: TrainOptions) -> int:
    """Bytes of a full dynamic table, its index included, over all processes."""
    return options.nproc * sum(
        get_table_bytes(table_options(options), OPTIMIZERS[options.optimizer])
    )


def hashed_capacity(options: TrainOptions) -> int:
    """Rows of a static table with as many bytes as a full dynamic one."""
    return full_bytes(options) // row_bytes(options)


def tables_of(model: nn.Module) -> list[Table]:
    """The dynamic tables of a model, sharded or not."""
    return [
        table
        for modules in find_collections(model).values()
        for _, table in discovery.tables_of(modules).values()
    ]
