"""Checkpoints: all or nothing, checksummed, for any number of ranks."""

from dynamicemb.checkpoint.dump import DumpHandle, DynamicEmbDump, dump_async
from dynamicemb.checkpoint.load import DynamicEmbLoad, LoadReport, TableLoad
from dynamicemb.checkpoint.reader import CheckpointReader

__all__ = [
    "CheckpointReader",
    "DumpHandle",
    "DynamicEmbDump",
    "DynamicEmbLoad",
    "LoadReport",
    "TableLoad",
    "dump_async",
]
