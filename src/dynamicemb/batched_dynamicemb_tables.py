"""Import path of existing code: re-exports only."""

from dynamicemb.nn.batched import BatchedDynamicEmbeddingTables, BatchedDynamicEmbeddingTablesV2

__all__ = ["BatchedDynamicEmbeddingTables", "BatchedDynamicEmbeddingTablesV2"]
