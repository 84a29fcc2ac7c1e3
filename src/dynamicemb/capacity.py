"""How many rows a rank's share of a table has, and how many bytes they take."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from dynamicemb.admission import KVCounter
from dynamicemb.errors import check_integer
from dynamicemb.optimizers import get_optimizer_state_dim, has_scalar_state
from dynamicemb.options import (
    DEFAULT_BUCKET_CAPACITY,
    MAX_BUCKET_CAPACITY,
    DynamicEmbTableOptions,
    align_to_table_size,
    check_bucket_capacity,
)
from dynamicemb.types import data_type_to_dtype, dtype_to_bytes

#: Bytes of a slot besides its row: digest, id, and score with stamp.
_SLOT_BYTES = 1 + 8 + 16
_SECOND_SCORE_BYTES = 8
_ROW_ALIGNMENT = 16
_STATE_BYTES = 4


def get_sharded_table_capacity(
    embedding_config: Any, world_size: int, bucket_capacity: int = DEFAULT_BUCKET_CAPACITY
) -> int:
    """Rows of one rank for a TorchRec table config: at least ``num_embeddings / world_size``.

    The share is rounded up to a power of two and to whole buckets, at least one. So it is a power
    of two wherever ``bucket_capacity`` is one, as the default 128 is.
    """
    rows = check_integer("num_embeddings", embedding_config.num_embeddings, minimum=1)
    world_size = check_integer("world_size", world_size, minimum=1)
    bucket_capacity = check_bucket_capacity("bucket_capacity", bucket_capacity)
    share = -(-rows // world_size)
    power = 1 << (share - 1).bit_length()
    if bucket_capacity == MAX_BUCKET_CAPACITY:
        return align_to_table_size(power)
    return align_to_table_size(power, bucket_capacity)


def get_table_value_bytes(
    embedding_config: Any,
    optimizer_type: object,
    world_size: int,
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY,
) -> int:
    """Bytes of all rows of a table (embedding and optimizer state), over all ranks together."""
    capacity = get_sharded_table_capacity(embedding_config, world_size, bucket_capacity)
    dtype = data_type_to_dtype(embedding_config.data_type)
    value = _value_bytes(dtype, embedding_config.embedding_dim, optimizer_type)
    return world_size * capacity * value


def get_constraint_capacity(
    memory_bytes: int,
    dtype: torch.dtype,
    dim: int,
    optimizer_type: object,
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY,
) -> int:
    """Rows that fit into ``memory_bytes``, in whole buckets. At least one bucket, with a warning
    where that is more than the memory."""
    memory_bytes = check_integer("memory_bytes", memory_bytes, minimum=0)
    width = check_bucket_capacity("bucket_capacity", bucket_capacity)
    rows = memory_bytes // _value_bytes(dtype, dim, optimizer_type)
    if width == MAX_BUCKET_CAPACITY:
        width = align_to_table_size(1)
    if rows < width:
        warnings.warn(
            f"memory_bytes is {memory_bytes}, which holds {rows} rows: less than one bucket of "
            f"{width}, which is used",
            UserWarning,
            stacklevel=2,
        )
        return width
    return rows // width * width


def get_table_bytes(options: DynamicEmbTableOptions, optimizer_type: object) -> tuple[int, int]:
    """(bytes of the index, bytes of the rows) of a full table with these options in main memory.

    A number of state for a whole row is in the index, which has room for it.
    """
    assert options.dim is not None
    assert options.max_capacity is not None
    slot = _SLOT_BYTES
    if isinstance(options.score_strategy, tuple):
        slot += _SECOND_SCORE_BYTES
    index = options.max_capacity * slot
    if options.admission_counter is not None:
        index += counter_bytes(options.admission_counter)
    value = _value_bytes(options.embedding_dtype or torch.float32, options.dim, optimizer_type)
    if has_scalar_state(optimizer_type):
        value -= _STATE_BYTES
    return index, options.max_capacity * align_to_table_size(value, _ROW_ALIGNMENT)


def counter_bytes(counter: KVCounter) -> int:
    """Bytes of a full admission counter."""
    return counter.capacity * _SLOT_BYTES


def _value_bytes(dtype: torch.dtype, dim: int, optimizer_type: object) -> int:
    dim = check_integer("dim", dim, minimum=1)
    state = get_optimizer_state_dim(optimizer_type, dim) * _STATE_BYTES
    return dim * dtype_to_bytes(dtype) + state
