"""Read-only tables over the files of a checkpoint."""

from dynamicemb.checkpoint.serving import ServingTable, build_serving_index

__all__ = ["ServingTable", "build_serving_index"]
