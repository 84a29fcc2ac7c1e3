"""Element types by the names that existing code uses, memory kinds, and the admission ABCs."""

from __future__ import annotations

import enum
from typing import Any

import torch

from dynamicemb.admission import AdmissionStrategy, Counter
from dynamicemb.errors import check_choice, check_enum, wrong_type, wrong_value

__all__ = [
    "COUNTER_TYPE",
    "EMBEDDING_TYPE",
    "KEY_TYPE",
    "OPT_STATE_TYPE",
    "SCORE_TYPE",
    "AdmissionStrategy",
    "CopyMode",
    "Counter",
    "DynamicEmbDataType",
    "MemoryType",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dtype_to_bytes",
    "dyn_emb_to_torch",
    "torch_to_dyn_emb",
]

KEY_TYPE = torch.int64
EMBEDDING_TYPE = torch.float32
SCORE_TYPE = torch.int64
OPT_STATE_TYPE = torch.float32
COUNTER_TYPE = torch.int64


class MemoryType(enum.Enum):
    """Where bytes lie."""

    DEVICE = "device"
    MANAGED = "managed"
    PINNED_HOST = "pinned_host"
    HOST = "host"


class CopyMode(enum.Enum):
    """What of a row is copied: the embedding, or the embedding followed by optimizer state."""

    EMBEDDING = "embedding"
    VALUE = "value"


class DynamicEmbDataType(enum.IntEnum):
    """The element types a table or a file can hold."""

    Float32 = 0
    BFloat16 = 1
    Float16 = 2
    Int64 = 3
    UInt64 = 4
    Int32 = 5
    UInt32 = 6


_TORCH_TO_DYN_EMB = {
    torch.float32: DynamicEmbDataType.Float32,
    torch.bfloat16: DynamicEmbDataType.BFloat16,
    torch.float16: DynamicEmbDataType.Float16,
    torch.int64: DynamicEmbDataType.Int64,
    torch.uint64: DynamicEmbDataType.UInt64,
    torch.int32: DynamicEmbDataType.Int32,
    torch.uint32: DynamicEmbDataType.UInt32,
}
_DYN_EMB_TO_TORCH = {value: key for key, value in _TORCH_TO_DYN_EMB.items()}

# TorchRec's DataType is matched by its name, so that TorchRec is not needed here.
_DATA_TYPE_TO_TORCH = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
}


def torch_to_dyn_emb(torch_dtype: torch.dtype) -> DynamicEmbDataType:
    """The library's name of a torch dtype; an unknown one is an ``InvalidArgumentError``."""
    check_choice("torch_dtype", torch_dtype, _TORCH_TO_DYN_EMB)
    return _TORCH_TO_DYN_EMB[torch_dtype]


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """The torch dtype of a :class:`DynamicEmbDataType`."""
    return _DYN_EMB_TO_TORCH[check_enum("data_type", data_type, DynamicEmbDataType)]


def data_type_to_dtype(data_type: Any) -> torch.dtype:
    """The torch dtype of a TorchRec ``DataType``; an unknown one is an ``InvalidArgumentError``."""
    name = getattr(data_type, "name", data_type)
    if not isinstance(name, str) or name not in _DATA_TYPE_TO_TORCH:
        raise wrong_value("data_type", data_type, f"DataType.{{{', '.join(_DATA_TYPE_TO_TORCH)}}}")
    return _DATA_TYPE_TO_TORCH[name]


def data_type_to_dyn_emb(data_type: Any) -> DynamicEmbDataType:
    """The library's name of a TorchRec ``DataType``."""
    return _TORCH_TO_DYN_EMB[data_type_to_dtype(data_type)]


def dtype_to_bytes(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    if not isinstance(dtype, torch.dtype):
        raise wrong_type("dtype", dtype, "a torch.dtype")
    return dtype.itemsize
