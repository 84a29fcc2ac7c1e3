"""Import path kept for existing code; see :mod:`dynamicemb.optimizers`."""

from typing import TYPE_CHECKING

from dynamicemb.optimizers import (
    OptimizerArgs,
    emb_optim_type_of,
    get_optimizer_ckpt_state_dim,
    get_optimizer_state_dim,
    get_required_arg,
    string_to_opt_type,
)

if TYPE_CHECKING:
    from dynamicemb.optimizers import EmbOptimType
else:
    __getattr__ = emb_optim_type_of(__name__)

__all__ = [
    "EmbOptimType",
    "OptimizerArgs",
    "get_optimizer_ckpt_state_dim",
    "get_optimizer_state_dim",
    "get_required_arg",
    "string_to_opt_type",
]
