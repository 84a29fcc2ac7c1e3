"""Modules: dynamic tables inside a PyTorch model."""

from dynamicemb.nn.batched import BatchedDynamicEmbeddingTables, BatchedDynamicEmbeddingTablesV2
from dynamicemb.nn.embedding import DynamicEmbedding, DynamicEmbeddingBag

__all__ = [
    "BatchedDynamicEmbeddingTables",
    "BatchedDynamicEmbeddingTablesV2",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
]
