"""What a user says about a table before planning, and what the plan says about it after."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from dynamicemb.capacity import get_sharded_table_capacity
from dynamicemb.errors import (
    InvalidArgumentError,
    check_bool,
    check_choice,
    wrong_type,
    wrong_value,
)
from dynamicemb.options import (
    DEFAULT_INDEX_TYPE,
    SUPPORTED_DIST_TYPES,
    SUPPORTED_EMBEDDING_DTYPES,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbKernel,
    DynamicEmbTableOptions,
    align_to_table_size,
    complete_initializer_args,
)
from dynamicemb.types import data_type_to_dtype

_ROW_WISE = ShardingType.ROW_WISE.value
#: Kernels a user may name for a dynamic table: the planner's stand-in and the real one.
_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value)


@dataclass
class DynamicEmbParameterConstraints(ParameterConstraints):  # type: ignore[misc]
    """TorchRec's constraints of a table, and whether it is dynamic.

    use_dynamicemb: True makes the table dynamic, with ``dynamicemb_options``. Such a table is
        sharded row-wise: ``sharding_types`` is ``None`` or contains "row_wise".
    dynamicemb_options: of the whole table; the planner makes each rank's from it and leaves this
        object as it is. Not read if the table is not dynamic.
    """

    use_dynamicemb: bool | None = False
    dynamicemb_options: DynamicEmbTableOptions | None = field(
        default_factory=DynamicEmbTableOptions
    )

    __hash__ = ParameterConstraints.__hash__


@dataclass
class DynamicEmbParameterSharding(ParameterSharding):  # type: ignore[misc]
    """A dynamic table in a sharding plan: row-wise over all ranks, its options complete.

    num_embeddings: of the whole table, over which "continuous" routing spreads ids; 0: as the
        table's config says.
    dist_type: how ids are spread over ranks; ``None``: as ``dynamicemb_options`` says. The other
        one follows the one that is given.
    """

    sharding_type: str = _ROW_WISE
    compute_kernel: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
    customized_compute_kernel: str = DynamicEmbKernel
    num_embeddings: int = 0
    dynamicemb_options: DynamicEmbTableOptions = field(default_factory=DynamicEmbTableOptions)
    dist_type: str | None = None

    def __post_init__(self) -> None:
        named = self.dynamicemb_options.dist_type
        if self.dist_type is None:
            self.dist_type = named
            return
        check_choice("dist_type", self.dist_type, SUPPORTED_DIST_TYPES)
        if named not in (self.dist_type, DynamicEmbTableOptions.dist_type):
            raise wrong_value("dist_type", self.dist_type, f"{named!r}, as dynamicemb_options says")
        self.dynamicemb_options = replace(self.dynamicemb_options, dist_type=self.dist_type)

    @classmethod
    def _additional(cls) -> list[str]:
        torchrec = {one.name for one in fields(ParameterSharding)}
        return [one.name for one in fields(cls) if one.name not in torchrec]

    def get_additional_fused_params(self) -> dict[str, Any]:
        """The fields that TorchRec's ``ParameterSharding`` does not have. TorchRec adds them to the
        fused parameters of the table."""
        return {name: getattr(self, name) for name in self._additional()}

    @classmethod
    def pop_additional_fused_params(cls, fused_params: dict[str, Any]) -> None:
        """Remove :meth:`get_additional_fused_params` from fused parameters: they are no numbers of
        an optimizer."""
        for name in cls._additional():
            fused_params.pop(name, None)


def is_dynamic(constraints: Mapping[str, ParameterConstraints] | None, table: str) -> bool:
    """Whether ``constraints`` make ``table`` dynamic."""
    found = constraints.get(table) if constraints else None
    return isinstance(found, DynamicEmbParameterConstraints) and bool(found.use_dynamicemb)


def check_constraints(
    configs: Any, constraints: Any
) -> tuple[dict[str, BaseEmbeddingConfig], dict[str, DynamicEmbParameterConstraints]]:
    """The configs and the constraints by table name; raises unless they fit each other."""
    if not isinstance(configs, Sequence) or not configs:
        raise wrong_type("eb_configs", configs, "a list of the model's table configs")
    by_name: dict[str, BaseEmbeddingConfig] = {}
    for config in configs:
        if not isinstance(config, BaseEmbeddingConfig):
            raise wrong_type("eb_configs", config, "EmbeddingConfig or EmbeddingBagConfig")
        if config.name in by_name:
            raise wrong_value("eb_configs", config.name, "tables with different names")
        by_name[config.name] = config
    if not isinstance(constraints, Mapping):
        raise wrong_type(
            "constraints",
            constraints,
            "a dictionary from every table's name to DynamicEmbParameterConstraints",
        )
    missing = sorted(set(by_name) - set(constraints))
    if missing:
        raise InvalidArgumentError(
            f"constraints has no entry for {', '.join(missing)}; every table of eb_configs needs "
            "one: DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=...) "
            "for a dynamic table, DynamicEmbParameterConstraints() for a static one"
        )
    unknown = sorted(set(constraints) - set(by_name))
    if unknown:
        raise InvalidArgumentError(
            f"constraints has {', '.join(unknown)}, which eb_configs does not have; allowed: "
            f"{', '.join(by_name)}"
        )
    for name, constraint in constraints.items():
        _check_constraint(name, constraint)
    return by_name, dict(constraints)


def _check_constraint(name: str, constraint: Any) -> None:
    what = f"constraints[{name!r}]"
    if not isinstance(constraint, DynamicEmbParameterConstraints):
        raise wrong_type(
            what,
            constraint,
            "DynamicEmbParameterConstraints, also for a static table: it takes the arguments of "
            "ParameterConstraints, and use_dynamicemb=False is its default",
        )
    if constraint.use_dynamicemb is not None:
        check_bool(f"{what}.use_dynamicemb", constraint.use_dynamicemb)
    options = constraint.dynamicemb_options
    if options is not None and not isinstance(options, DynamicEmbTableOptions):
        raise wrong_type(f"{what}.dynamicemb_options", options, "DynamicEmbTableOptions")
    if not constraint.use_dynamicemb:
        return
    if options is None:
        raise wrong_value(
            f"{what}.dynamicemb_options", options, "DynamicEmbTableOptions(...) with use_dynamicemb"
        )
    options.validate()
    if constraint.sharding_types is not None and _ROW_WISE not in constraint.sharding_types:
        raise wrong_value(
            f"{what}.sharding_types",
            constraint.sharding_types,
            f"None or [{_ROW_WISE!r}] for a dynamic table",
        )
    kernels = constraint.compute_kernels
    if kernels is not None and not set(kernels) & set(_KERNELS):
        raise wrong_value(
            f"{what}.compute_kernels", kernels, f"None or one of {list(_KERNELS)} if dynamic"
        )
    if constraint.use_virtual_table:
        raise wrong_value(f"{what}.use_virtual_table", True, "False for a dynamic table")


def complete_options(
    config: BaseEmbeddingConfig, options: DynamicEmbTableOptions, world_size: int
) -> DynamicEmbTableOptions:
    """The options of one rank's share of a table; ``config`` and ``options`` stay as they are.

    Fills what is ``None``: ``dim``, ``embedding_dtype``, ``index_type``, ``max_capacity`` (see
    :func:`~dynamicemb.get_sharded_table_capacity`) and the initialiser's bounds. ``max_capacity``
    that is given counts rows of a rank. ``global_hbm_for_values`` is divided among the ranks.
    """
    if options.dim is not None and options.dim != config.embedding_dim:
        raise wrong_value(
            f"dim of table {config.name!r}", options.dim, f"None or {config.embedding_dim}"
        )
    capacity = options.max_capacity
    if capacity is None:
        capacity = get_sharded_table_capacity(config, world_size, options.bucket_capacity)
    start = options.init_capacity
    if start is not None and start > capacity:
        warnings.warn(
            f"init_capacity of table {config.name!r} is {start}; a rank has {capacity} rows, which "
            "is used",
            UserWarning,
            stacklevel=2,
        )
        start = capacity
    budget = options.local_hbm_for_values
    if options.global_hbm_for_values:
        budget = align_to_table_size(options.global_hbm_for_values, world_size) // world_size
    return replace(
        options,
        dim=config.embedding_dim,
        embedding_dtype=options.embedding_dtype or _dtype(config),
        index_type=options.index_type or DEFAULT_INDEX_TYPE,
        max_capacity=capacity,
        init_capacity=start,
        local_hbm_for_values=budget,
        initializer_args=_initializer(config, options.initializer_args),
    )


def _dtype(config: BaseEmbeddingConfig) -> torch.dtype:
    dtype = data_type_to_dtype(config.data_type)
    if dtype not in SUPPORTED_EMBEDDING_DTYPES:
        raise wrong_value(
            f"data_type of table {config.name!r}",
            config.data_type,
            "FP32, FP16 or BF16 for a dynamic table",
        )
    return dtype


def _initializer(
    config: BaseEmbeddingConfig, args: DynamicEmbInitializerArgs
) -> DynamicEmbInitializerArgs:
    if args.mode is DynamicEmbInitializerMode.UNIFORM:
        args = replace(
            args,
            lower=config.weight_init_min if args.lower is None else args.lower,
            upper=config.weight_init_max if args.upper is None else args.upper,
        )
    return complete_initializer_args(args, embedding_config=config)
