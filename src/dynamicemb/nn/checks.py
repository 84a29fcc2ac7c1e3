"""Checks of what a caller passes to a module."""

from __future__ import annotations

import torch

from dynamicemb import _engine
from dynamicemb.errors import InvalidArgumentError, wrong_type, wrong_value
from dynamicemb.tracing import check_memory, check_tensor, refuse_tracers

_INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint32, torch.uint16, torch.uint8),
)
OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the memory of ``tensor`` can be read as it is."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device == device
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not torch._is_functional_tensor(tensor)
    )


def check_ids(name: str, ids: object, device: torch.device) -> torch.Tensor:
    """``ids`` as a contiguous int64 tensor (uint64 by its bits)."""
    ids = check_tensor(name, ids, "a tensor of integers")
    refuse_tracers()
    if ids.dtype is torch.int64 and _is_plain(ids, device):
        return ids
    if ids.dtype is torch.uint64:
        return check_device(name, ids, device).contiguous().view(torch.int64)
    if ids.dtype not in _INTEGERS:
        raise wrong_type(f"{name}.dtype", ids.dtype, "an integer type, such as torch.int64")
    return check_device(name, ids, device).to(torch.int64).contiguous()


def flat_ids(name: str, ids: object) -> torch.Tensor:
    """The numbers of a dense tensor of any shape, in one dimension."""
    ids = check_tensor(name, ids, "a tensor of integers")
    if ids.is_nested or ids.layout is not torch.strided:
        layout = "nested" if ids.is_nested else ids.layout
        raise wrong_value(f"{name}.layout", layout, "torch.strided, of one size in all rows")
    return ids.reshape(-1)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` if it is where the tables are."""
    if tensor.device != device:
        raise InvalidArgumentError(
            f"{name}.device is {str(tensor.device)!r}; allowed: {str(device)!r}, where the tables "
            "are"
        )
    if tensor.layout != torch.strided:
        raise wrong_value(f"{name}.layout", tensor.layout, "torch.strided")
    check_memory(name, tensor)
    return tensor.resolve_neg()


def check_one_dimension(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1:
        raise wrong_value(f"{name}.shape", tuple(tensor.shape), "one dimension")
    return tensor


def check_offsets(offsets: object, count: int, device: torch.device) -> torch.Tensor:
    """``offsets`` as contiguous int64: from 0 up to ``count``, never decreasing.

    The numbers of a tensor on a GPU are not looked at: that would wait for it. There the kernels
    keep every bag inside the ids, whatever its offsets say.
    """
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int64, torch.int32):
        raise wrong_type(
            "offsets", getattr(offsets, "dtype", offsets), "a tensor of int64 or int32"
        )
    check_one_dimension("offsets", offsets)
    if offsets.dtype is not torch.int64 or not _is_plain(offsets, device):
        offsets = check_device("offsets", offsets, device).to(torch.int64).contiguous()
    if offsets.numel() == 0:  # len(tensor) runs Python code of torch
        raise wrong_value("offsets", "empty", "at least one number")
    if device.type != "cpu" or _valid_offsets(offsets, count):
        return offsets
    if int(offsets[0]) != 0:
        raise wrong_value("offsets[0]", int(offsets[0]), "0")
    if int(offsets[-1]) != count:
        raise wrong_value("offsets[-1]", int(offsets[-1]), f"{count}, the number of ids")
    bad = int((offsets[1:] < offsets[:-1]).nonzero()[0]) + 1
    if int(offsets[bad - 1]) > count:
        raise wrong_value(
            f"offsets[{bad - 1}]", int(offsets[bad - 1]), f"at most {count}, the number of ids"
        )
    before = f"at least offsets[{bad - 1}], which is {int(offsets[bad - 1])}"
    raise wrong_value(f"offsets[{bad}]", int(offsets[bad]), before)


def _valid_offsets(offsets: torch.Tensor, count: int) -> bool:
    return _engine.valid_offsets(offsets.data_ptr(), offsets.numel(), count)


def check_weights(weights: object, count: int, device: torch.device) -> torch.Tensor:
    """``weights`` as contiguous float32, one per id."""
    if not isinstance(weights, torch.Tensor) or not weights.dtype.is_floating_point:
        raise wrong_type(
            "per_sample_weights", getattr(weights, "dtype", weights), "a tensor of floats"
        )
    weights = check_device("per_sample_weights", weights, device)
    if weights.shape != (count,):
        raise wrong_value("per_sample_weights.shape", tuple(weights.shape), str((count,)))
    return weights.detach().to(torch.float32).contiguous()


def check_output_dtype(dtype: object) -> torch.dtype:
    if dtype not in OUTPUT_DTYPES:
        raise wrong_value("output_dtype", dtype, ", ".join(map(str, OUTPUT_DTYPES)))
    assert isinstance(dtype, torch.dtype)
    return dtype
