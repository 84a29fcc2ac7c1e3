"""Shard TorchRec collections with dynamic tables over ranks. Needs torchrec."""

from dynamicemb.errors import missing_package

try:
    import torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb.shard", "torchrec", "torchrec") from error

from dynamicemb.shard.embedding import (
    DynamicEmbeddingCollectionContext,
    DynamicEmbeddingCollectionSharder,
    ShardedDynamicEmbeddingCollection,
)
from dynamicemb.shard.embeddingbag import (
    DynamicEmbeddingBagCollectionSharder,
    ShardedDynamicEmbeddingBagCollection,
)

__all__ = [
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionContext",
    "DynamicEmbeddingCollectionSharder",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
]
