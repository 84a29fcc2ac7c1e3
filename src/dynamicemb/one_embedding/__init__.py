"""Embeddings in the form of OneFlow's OneEmbedding: several tables over one store, in the memory of
the device, in main memory, on an SSD or at a server. See docs/one_embedding.md."""

from dynamicemb.one_embedding.embedding import (
    Embedding,
    MultiTableEmbedding,
    MultiTableMultiColumnEmbedding,
)
from dynamicemb.one_embedding.initializers import (
    make_constant_initializer,
    make_normal_initializer,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)
from dynamicemb.one_embedding.optim import (
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    Optimizer,
    SmartDecayAdam,
)
from dynamicemb.one_embedding.persistent import (
    make_persistent_table_reader,
    make_persistent_table_writer,
)
from dynamicemb.one_embedding.stores import (
    make_cached_host_mem_store_options,
    make_cached_remote_store_options,
    make_cached_ssd_store_options,
    make_device_mem_store_options,
)
from dynamicemb.one_embedding.tables import make_column_options, make_table, make_table_options

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Embedding",
    "Ftrl",
    "MultiTableEmbedding",
    "MultiTableMultiColumnEmbedding",
    "Optimizer",
    "SmartDecayAdam",
    "make_cached_host_mem_store_options",
    "make_cached_remote_store_options",
    "make_cached_ssd_store_options",
    "make_column_options",
    "make_constant_initializer",
    "make_device_mem_store_options",
    "make_normal_initializer",
    "make_persistent_table_reader",
    "make_persistent_table_writer",
    "make_table",
    "make_table_options",
    "make_trunc_normal_initializer",
    "make_uniform_initializer",
]
