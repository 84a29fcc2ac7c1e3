"""A sharding plan for a model in which some tables are dynamic."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    Stats,
    StorageReservation,
)
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ModuleSharder,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from dynamicemb.capacity import get_table_bytes
from dynamicemb.errors import InvalidArgumentError, wrong_type, wrong_value
from dynamicemb.planner.constraints import (
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
    check_constraints,
    complete_options,
    is_dynamic,
)
from dynamicemb.planner.enumerator import DynamicEmbeddingEnumerator

logger = logging.getLogger(__name__)


class DynamicEmbeddingShardingPlanner:
    """TorchRec's ``EmbeddingShardingPlanner`` for models with dynamic tables.

    Args:
        eb_configs: the configs of every table of the model, dynamic or not. They are not changed.
        topology: of the ranks. ``None``: one with TorchRec's default memory is made, with a
            warning, and the memory of dynamic tables is not counted against it.
        constraints: a ``DynamicEmbParameterConstraints`` for every table.
        enumerator: default, a :class:`DynamicEmbeddingEnumerator`.
        debug: log a summary of the dynamic tables (logger "dynamicemb.planner.planner", INFO) and
            TorchRec's own.

    The rest is TorchRec's. Needs no process group: without one and without a topology it plans for
    one rank.
    """

    def __init__(
        self,
        eb_configs: Sequence[BaseEmbeddingConfig],
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, DynamicEmbParameterConstraints] | None = None,
        debug: bool = True,
    ) -> None:
        configs, checked = check_constraints(eb_configs, constraints)
        given = topology is not None
        if topology is None:
            topology = _default_topology()
        elif not isinstance(topology, Topology):
            raise wrong_type("topology", topology, "None or a torchrec Topology")
        self._configs = configs
        self._topology = topology
        self._debug = debug
        self._dynamic = {
            name: _parameter_sharding(configs[name], constraint, topology)
            for name, constraint in checked.items()
            if is_dynamic(checked, name)
        }
        if enumerator is None:
            enumerator = DynamicEmbeddingEnumerator(
                topology, batch_size, checked, charge_memory=given
            )
        self._planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints=checked,
            debug=debug,
        )

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan, made on this rank alone."""
        return self._with_dynamic_tables(self._planner.plan(module, sharders))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The plan that the first rank of ``pg`` (default: all ranks) makes, on every rank.

        Without an initialised process group, the plan of this process.
        """
        if sharders is None:
            sharders = get_default_sharders()
        if pg is None and not dist.is_initialized():
            _check_world(self._topology, 1)
            return self.plan(module, sharders)
        _check_world(self._topology, dist.get_world_size(pg))
        return self._with_dynamic_tables(self._planner.collective_plan(module, sharders, pg))

    def _with_dynamic_tables(self, plan: ShardingPlan) -> ShardingPlan:
        found: set[str] = set()
        for module_plan in plan.plan.values():
            for name in module_plan:
                if name not in self._configs:
                    raise InvalidArgumentError(
                        f"the model has a table {name!r} that eb_configs does not have; give the "
                        "configs of all its tables"
                    )
                found.add(name)
                if name in self._dynamic:
                    module_plan[name] = self._dynamic[name]
        missing = sorted(set(self._dynamic) - found)
        if missing:
            raise InvalidArgumentError(
                f"eb_configs has {', '.join(missing)}, which the sharders found in no collection "
                "of the model; give its collection a sharder: DynamicEmbeddingCollectionSharder or "
                "DynamicEmbeddingBagCollectionSharder"
            )
        if self._debug:
            logger.info("%s", self._summary())
        return plan

    def _summary(self) -> str:
        rows = [("table", "dim", "dtype", "rows asked", "rows per rank", "MiB per rank", "routing")]
        for name, sharding in self._dynamic.items():
            options = sharding.dynamicemb_options
            size = sum(get_table_bytes(options, "sgd")) / 2**20
            rows.append(
                (
                    name,
                    str(options.dim),
                    str(options.embedding_dtype).removeprefix("torch."),
                    f"{sharding.num_embeddings:,}",
                    f"{options.max_capacity:,}",
                    f"{size:,.1f}",
                    options.dist_type,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        static = sorted(set(self._configs) - set(self._dynamic))
        return "\n".join(
            [
                f"dynamic tables over {self._topology.world_size} rank(s), "
                f"{self._topology.compute_device}; MiB without optimizer state:",
                *(line.rstrip() for line in lines),
                f"static tables: {', '.join(static) or 'none'}",
            ]
        )


def _default_topology() -> Topology:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.warn(
        f"topology is None: planning for {ranks} rank(s) of {device} with TorchRec's default "
        "memory, without counting the memory of dynamic tables",
        RuntimeWarning,
        stacklevel=3,
    )
    return Topology(world_size=ranks, compute_device=device)


def _check_world(topology: Topology, ranks: int) -> None:
    if topology.world_size != ranks:
        raise wrong_value(
            "topology.world_size", topology.world_size, f"{ranks}, the ranks of the process group"
        )


def _parameter_sharding(
    config: BaseEmbeddingConfig, constraint: DynamicEmbParameterConstraints, topology: Topology
) -> DynamicEmbParameterSharding:
    assert constraint.dynamicemb_options is not None
    ranks = topology.world_size
    options = complete_options(config, constraint.dynamicemb_options, ranks)
    assert options.max_capacity is not None
    shards = [
        ShardMetadata(
            shard_sizes=[options.max_capacity, config.embedding_dim],
            shard_offsets=[rank * options.max_capacity, 0],
            placement=placement(topology.compute_device, rank, topology.intra_group_size),
        )
        for rank in range(ranks)
    ]
    return DynamicEmbParameterSharding(
        ranks=list(range(ranks)),
        sharding_spec=EnumerableShardingSpec(shards),
        output_dtype=constraint.output_dtype,
        stochastic_rounding=constraint.stochastic_rounding,
        num_embeddings=config.num_embeddings,
        dynamicemb_options=options,
    )
