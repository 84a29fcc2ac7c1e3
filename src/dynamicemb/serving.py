"""Read-only tables: over the files of a checkpoint, and over a server that was published to."""

from dynamicemb.checkpoint.publish import PublishedTable
from dynamicemb.checkpoint.serving import ServingTable, build_serving_index

__all__ = ["PublishedTable", "ServingTable", "build_serving_index"]
