"""Import path of existing code: re-exports only."""

from dynamicemb.checkpoint.names import (
    encode_checkpoint_file_path,
    encode_counter_checkpoint_file_path,
    encode_meta_json_file_path,
)
from dynamicemb.nn.batched import BatchedDynamicEmbeddingTables, BatchedDynamicEmbeddingTablesV2

__all__ = [
    "BatchedDynamicEmbeddingTables",
    "BatchedDynamicEmbeddingTablesV2",
    "encode_checkpoint_file_path",
    "encode_counter_checkpoint_file_path",
    "encode_meta_json_file_path",
]
