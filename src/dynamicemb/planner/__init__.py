"""Plan how a TorchRec model with dynamic tables is spread over ranks. Needs torchrec."""

from dynamicemb.errors import missing_package

try:
    import torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb.planner", "torchrec", "torchrec") from error

from dynamicemb.planner.constraints import (
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from dynamicemb.planner.enumerator import DynamicEmbeddingEnumerator
from dynamicemb.planner.planner import DynamicEmbeddingShardingPlanner

__all__ = [
    "DynamicEmbParameterConstraints",
    "DynamicEmbParameterSharding",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
]
