"""Import path kept for existing code; see :mod:`dynamicemb.optimizers`."""

from dynamicemb.optimizers import (
    EmbOptimType,
    OptimizerArgs,
    get_optimizer_ckpt_state_dim,
    get_optimizer_state_dim,
    get_required_arg,
    string_to_opt_type,
)

__all__ = [
    "EmbOptimType",
    "OptimizerArgs",
    "get_optimizer_ckpt_state_dim",
    "get_optimizer_state_dim",
    "get_required_arg",
    "string_to_opt_type",
]
