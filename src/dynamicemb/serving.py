"""Read-only tables: over the files of a checkpoint, and over a server that was published to."""

from dynamicemb.checkpoint.http_table import HttpTable
from dynamicemb.checkpoint.publish import PublishedTable
from dynamicemb.checkpoint.serving import ServingTable, build_serving_index

__all__ = ["HttpTable", "PublishedTable", "ServingTable", "build_serving_index"]
