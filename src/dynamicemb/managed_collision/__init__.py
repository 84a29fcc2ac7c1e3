"""Managed collision for TorchRec on the engine's index. Needs torchrec. See
docs/managed_collision.md."""

from dynamicemb.errors import missing_package

try:
    import torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb.managed_collision", "torchrec", "torchrec") from error

from dynamicemb.managed_collision.migration import (
    DynamicInPlaceOfManagedCollision,
    dynamic_to_zch,
    zch_to_dynamic,
)
from dynamicemb.managed_collision.module import ManagedCollisionModule, TTL_EvictionPolicy
from dynamicemb.managed_collision.rows import reset_evicted_rows
from dynamicemb.managed_collision.sharding import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
)

__all__ = [
    "DynamicInPlaceOfManagedCollision",
    "ManagedCollisionEmbeddingBagCollectionSharder",
    "ManagedCollisionEmbeddingCollectionSharder",
    "ManagedCollisionModule",
    "ShardedManagedCollisionEmbeddingBagCollection",
    "ShardedManagedCollisionEmbeddingCollection",
    "TTL_EvictionPolicy",
    "dynamic_to_zch",
    "reset_evicted_rows",
    "zch_to_dynamic",
]
