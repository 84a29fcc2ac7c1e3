"""A planner from a few lists, for scripts. Needs torchrec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dynamicemb.errors import check_choice, missing_package, wrong_type, wrong_value

try:
    import torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb.get_planner", "torchrec", "torchrec") from error

from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import CacheParams, ShardingType

from dynamicemb.options import DynamicEmbTableOptions
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints

__all__ = ["get_planner"]

_PIPELINES = ("none", "native", "prefetch")
_RESERVED = 0.05  # of the memory, for what is not an embedding


def get_planner(
    eb_configs: Sequence[Any],
    data_parallel_embedding_table_names: Sequence[str],
    dynamicemb_options_dict: Mapping[str, DynamicEmbTableOptions],
    device: torch.device,
    pipeline_type: str = "none",
    ddr_cap: int = 512 * 1024**3,
    intra_host_bw: float = 450e9,
    inter_host_bw: float = 25e9,
) -> DynamicEmbeddingShardingPlanner:
    """A planner for the ranks of the default process group (one rank without it).

    Args:
        eb_configs: of every table of the model.
        data_parallel_embedding_table_names: small static tables, copied to every rank.
        dynamicemb_options_dict: the dynamic tables and their options. All other tables are static
            and spread over the ranks.
        device: of this rank; on CUDA its memory is the limit for device memory.
        pipeline_type: "none", "native" or "prefetch": the train pipeline that will run. With
            "prefetch", static tables on CUDA are cached and prefetched.
        ddr_cap: bytes of main memory per rank.
        intra_host_bw, inter_host_bw: bytes per second, within and between hosts.
    """
    check_choice("pipeline_type", pipeline_type, _PIPELINES)
    if not isinstance(device, torch.device):
        raise wrong_type("device", device, "a torch.device")
    known = {config.name for config in eb_configs}
    for what, names in (
        ("data_parallel_embedding_table_names", data_parallel_embedding_table_names),
        ("dynamicemb_options_dict", dynamicemb_options_dict),
    ):
        for name in names:
            if name not in known:
                raise wrong_value(f"a table in {what}", name, ", ".join(sorted(known)))
    constraints = {}
    for config in eb_configs:
        data_parallel = config.name in data_parallel_embedding_table_names
        options = dynamicemb_options_dict.get(config.name)
        if data_parallel and options is not None:
            raise wrong_value(
                "a table in dynamicemb_options_dict",
                config.name,
                "one that is not in data_parallel_embedding_table_names",
            )
        if options is not None:
            constraints[config.name] = DynamicEmbParameterConstraints(
                sharding_types=[ShardingType.ROW_WISE.value],
                use_dynamicemb=True,
                dynamicemb_options=options,
            )
        elif data_parallel:
            constraints[config.name] = DynamicEmbParameterConstraints(
                sharding_types=[ShardingType.DATA_PARALLEL.value],
                compute_kernels=[EmbeddingComputeKernel.DENSE.value],
            )
        else:
            constraints[config.name] = _static(device, pipeline_type)
    second = 1000  # a topology counts bytes per millisecond
    limits = {"ddr_cap": ddr_cap}
    if device.type == "cuda":
        limits["hbm_cap"] = torch.cuda.get_device_properties(device).total_memory
    topology = Topology(
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        local_world_size=get_local_size() if dist.is_initialized() else 1,
        compute_device=device.type,
        intra_host_bw=intra_host_bw / second,
        inter_host_bw=inter_host_bw / second,
        **limits,
    )
    return DynamicEmbeddingShardingPlanner(
        eb_configs,
        topology=topology,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED),
    )


def _static(device: torch.device, pipeline_type: str) -> DynamicEmbParameterConstraints:
    if device.type == "cpu" or pipeline_type != "prefetch":
        return DynamicEmbParameterConstraints()
    return DynamicEmbParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED_UVM_CACHING.value],
        cache_params=CacheParams(load_factor=0.1, prefetch_pipeline=True),
    )
