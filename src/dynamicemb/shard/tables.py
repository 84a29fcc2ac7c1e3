"""One rank's share of a collection's dynamic tables, made from TorchRec's description of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D

from dynamicemb.errors import UsageError, wrong_value
from dynamicemb.nn import BatchedDynamicEmbeddingTables
from dynamicemb.options import (
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    get_physical_score_order,
)
from dynamicemb.planner.constraints import DynamicEmbParameterSharding
from dynamicemb.routing import Routing

#: Fused parameters of fbgemm that are about its memory and checks, and have no meaning here.
_WITHOUT_MEANING = frozenset(
    {
        "bounds_check_mode",
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "cache_sets",
        "enforce_hbm",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "record_cache_metrics",
        "uvm_host_mapped",
        "weights_precision",
    }
)


@dataclass(frozen=True)
class TableShard:
    """What this rank has of one table. ``seed`` is the same on every rank: so is a new row."""

    options: DynamicEmbTableOptions
    routing: Routing
    seed: int

    @property
    def reads_counts(self) -> bool:
        """Whether it matters how often an id occurred."""
        frequency = DynamicEmbScoreStrategy.LFU in get_physical_score_order(
            self.options.score_strategy
        )
        return frequency or self.options.admit_strategy is not None


def is_dynamic_info(info: EmbeddingShardingInfo) -> bool:
    """Whether the plan made this table dynamic."""
    return isinstance(info.param_sharding, DynamicEmbParameterSharding)


def shards_of(
    infos: Iterable[EmbeddingShardingInfo], env: ShardingEnv, device: torch.device | None
) -> dict[str, TableShard]:
    """This rank's share of every table; all ranks of ``env`` must call it together."""
    if isinstance(env, ShardingEnv2D):
        raise UsageError(
            "dynamic tables in a ShardingEnv2D (DMPCollection): replicas would have to exchange "
            "rows, which nothing does; use DistributedModelParallel"
        )
    seed = agreed_seed(env.process_group, device)
    shards = {}
    for info in infos:
        sharding: DynamicEmbParameterSharding = info.param_sharding
        ranks = len(sharding.ranks or ())
        if ranks != env.world_size:
            raise wrong_value(
                f"ranks in the plan of table {info.embedding_config.name!r}",
                ranks,
                f"{env.world_size}, the ranks it is sharded over",
            )
        assert sharding.dist_type is not None  # set when it was made
        rows = sharding.num_embeddings or info.embedding_config.num_embeddings
        shards[info.embedding_config.name] = TableShard(
            sharding.dynamicemb_options,
            Routing.of_table(sharding.dist_type, rows, env.world_size, env.rank),
            table_seed(seed, info.embedding_config.name),
        )
    return shards


def agreed_seed(pg: dist.ProcessGroup | None, device: torch.device | None) -> int:
    """A seed from torch's generator, the first rank's on all ranks of ``pg``."""
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_()
    if pg is not None and dist.get_world_size(pg) > 1:
        seed = seed.to(device)
        dist.broadcast(seed, src=dist.get_global_rank(pg, 0), group=pg)
    return int(seed.item())


def table_seed(seed: int, name: str) -> int:
    """The seed of a table: its name tells it apart, wherever it is in its collection."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (seed + int.from_bytes(digest, "little")) % 2**64


def create_tables(
    config: GroupedEmbeddingConfig,
    shards: Mapping[str, TableShard],
    *,
    pooled: bool,
    pg: dist.ProcessGroup | None,
    device: torch.device | None,
) -> BatchedDynamicEmbeddingTables:
    """The module of one group: tables with the same optimizer, element type and pooling."""
    tables = config.embedding_tables
    features = [t for t, table in enumerate(tables) for _ in range(table.num_features())]
    optimizer, output_dtype, numbers = translate_fused_params(config.fused_params or {})
    own = [shards[table.name] for table in tables]
    module = BatchedDynamicEmbeddingTables(
        [shard.options for shard in own],
        [table.name for table in tables],
        features,
        # Bags are spread over ranks: TorchRec divides by their length after adding them up.
        pooling_mode=DynamicEmbPoolingMode.SUM if pooled else DynamicEmbPoolingMode.NONE,
        output_dtype=output_dtype,
        device=device,
        optimizer=optimizer,
        seed=[shard.seed for shard in own],
        **numbers,
    )
    module.routings = {table.name: shards[table.name].routing for table in tables}
    module.process_group = pg
    return module


def translate_fused_params(
    fused_params: Mapping[str, Any],
) -> tuple[object, torch.dtype, dict[str, Any]]:
    """(optimizer type, output dtype, numbers of the optimizer) of TorchRec's fused parameters.

    Besides fbgemm's names, ``lr`` and ``betas`` are understood. A name that is unknown is refused
    by the module that gets the numbers.
    """
    numbers = {name: value for name, value in fused_params.items() if name not in _WITHOUT_MEANING}
    optimizer = numbers.pop("optimizer", None) or "sgd"
    output_dtype = numbers.pop("output_dtype", torch.float32)
    if not isinstance(output_dtype, torch.dtype):
        output_dtype = output_dtype.as_dtype()
    if "lr" in numbers:
        numbers["learning_rate"] = numbers.pop("lr")
    if "betas" in numbers:
        numbers["beta1"], numbers["beta2"] = numbers.pop("betas")
    if "weight_decay_mode" in numbers:
        mode = numbers["weight_decay_mode"]
        numbers["weight_decay_mode"] = int(getattr(mode, "value", mode))
    return optimizer, output_dtype, numbers
