"""What our sharded collections share: tables beside TorchRec's own, found, switched and loaded."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.errors import wrong_value
from dynamicemb.nn.module import DynamicModule
from dynamicemb.optimizers import optim_name
from dynamicemb.planner.constraints import DynamicEmbParameterSharding
from dynamicemb.shard.tables import is_dynamic_info

Infos = dict[str, list[EmbeddingShardingInfo]]


def separate(infos: Infos) -> Infos:
    """Dynamic tables under keys of their own, one for each ``dist_type``, so that TorchRec's
    row-wise tables and ours are sharded side by side."""
    separated: Infos = {}
    for sharding_type, tables in infos.items():
        for info in tables:
            key = sharding_type
            if is_dynamic_info(info):
                key = f"dynamic_{sharding_type}_{info.param_sharding.dist_type}"
                # Else tables with other options would be groups of their own.
                DynamicEmbParameterSharding.pop_additional_fused_params(info.fused_params)
                _keep_momentum(info)
            else:
                _name_for_fbgemm(info)
            separated.setdefault(key, []).append(info)
    return separated


def _keep_momentum(info: EmbeddingShardingInfo) -> None:
    """``torch.optim.SGD`` with momentum, applied in backward: TorchRec's name for it drops it."""
    classes = getattr(info.param, "_optimizer_classes", [])
    if torch.optim.SGD in classes and info.fused_params.get("momentum"):
        info.fused_params["optimizer"] = "momentum_sgd"


def _name_for_fbgemm(info: EmbeddingShardingInfo) -> None:
    """The optimizer of a static table by fbgemm's enum, if a string named it."""
    given = (info.fused_params or {}).get("optimizer")
    if isinstance(given, str):
        name = optim_name(given)
        allowed = [one.name for one in EmbOptimType]
        if name not in allowed:
            raise wrong_value(
                f"optimizer of the static table {info.embedding_config.name!r}",
                name,
                f"{', '.join(allowed)} (or make the table dynamic)",
            )
        info.fused_params["optimizer"] = EmbOptimType[name]


def with_signed_ids(features: Any) -> Any:
    """uint64 ids by their bits: TorchRec's operators take none."""
    if isinstance(features, KeyedJaggedTensor) and features.values().dtype is torch.uint64:
        variable = features.variable_stride_per_key()
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values().view(torch.int64),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
            inverse_indices=features.inverse_indices_or_none(),
        )
    return features


class DynamicCollection(nn.Module):
    """A mixin for TorchRec's sharded collections."""

    is_dynamic_collection = True

    #: The name under which the collection keeps a table's parameter.
    _weight_name: str
    _constructed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._constructed = True

    @classmethod
    def create_grouped_sharding_infos(cls, *args: Any, **kwargs: Any) -> Infos:
        torchrec: Any = super()
        return separate(torchrec.create_grouped_sharding_infos(*args, **kwargs))

    def dynamic_modules(self) -> list[DynamicModule]:
        """The dynamic tables on this rank. They are no children, as TorchRec's are not."""
        found: list[DynamicModule] = []
        for lookup in getattr(self, "_lookups", ()):
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            found.extend(one for one in inner.modules() if isinstance(one, DynamicModule))
        return found

    def train(self, mode: bool = True) -> DynamicCollection:
        super().train(mode)
        for module in self.dynamic_modules():
            module.train(mode)
        return self

    @staticmethod
    def _pre_load_state_dict_hook(
        self: Any, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        torchrec: Any = super()
        torchrec._pre_load_state_dict_hook(self, state_dict, prefix, *args)
        for module in self.dynamic_modules():
            for table in module.tables:
                key = prefix + self._weight_name.format(table.name)
                if key in state_dict and len(state_dict[key]) == 0:
                    continue
                # It is empty, and libraries leave empty tensors out.
                if self._constructed and key in state_dict:
                    warnings.warn(
                        f"{key} has rows; table {table.name!r} is dynamic and does not take them. "
                        "Use DynamicEmbLoad, or insert them into the table",
                        UserWarning,
                        stacklevel=2,
                    )
                state_dict[key] = torch.empty(0, table.dim, dtype=table.dtype, device="cpu")
