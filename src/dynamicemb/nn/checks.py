"""Checks of what a caller passes to a module."""

from __future__ import annotations

import torch

from dynamicemb import _engine
from dynamicemb.errors import InvalidArgumentError, wrong_type, wrong_value

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` can be read as it is."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def check_ids(name: str, ids: object) -> torch.Tensor:
    """``ids`` as a contiguous int64 tensor (uint64 by its bits)."""
    if not isinstance(ids, torch.Tensor):
        raise wrong_type(name, ids, "a tensor of integers")
    if ids.dtype is torch.int64 and _is_plain(ids):
        return ids
    if ids.dtype is torch.uint64:
        return check_cpu(name, ids).contiguous().view(torch.int64)
    if ids.dtype not in _INTEGERS:
        raise wrong_type(f"{name}.dtype", ids.dtype, "an integer type, such as torch.int64")
    return check_cpu(name, ids).to(torch.int64).contiguous()


def check_cpu(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is where the tables are."""
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(
            f"{name}.device is {str(tensor.device)!r}; allowed: 'cpu', where the tables are"
        )
    if tensor.layout != torch.strided:
        raise wrong_value(f"{name}.layout", tensor.layout, "torch.strided")
    return tensor.resolve_neg()


def check_one_dimension(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1:
        raise wrong_value(f"{name}.shape", tuple(tensor.shape), "one dimension")
    return tensor


def check_offsets(offsets: object, count: int) -> torch.Tensor:
    """``offsets`` as contiguous int64: from 0 up to ``count``, never decreasing."""
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int64, torch.int32):
        raise wrong_type(
            "offsets", getattr(offsets, "dtype", offsets), "a tensor of int64 or int32"
        )
    check_one_dimension("offsets", offsets)
    if offsets.dtype is not torch.int64 or not _is_plain(offsets):
        offsets = check_cpu("offsets", offsets).to(torch.int64).contiguous()
    if len(offsets) == 0:
        raise wrong_value("offsets", "empty", "at least one number")
    if _engine.valid_offsets(offsets.data_ptr(), len(offsets), count):
        return offsets
    if int(offsets[0]) != 0:
        raise wrong_value("offsets[0]", int(offsets[0]), "0")
    if int(offsets[-1]) != count:
        raise wrong_value("offsets[-1]", int(offsets[-1]), f"{count}, the number of ids")
    bad = int((offsets[1:] < offsets[:-1]).nonzero()[0]) + 1
    before = f"at least offsets[{bad - 1}], which is {int(offsets[bad - 1])}"
    raise wrong_value(f"offsets[{bad}]", int(offsets[bad]), before)


def check_weights(weights: object, count: int) -> torch.Tensor:
    """``weights`` as contiguous float32, one per id."""
    if not isinstance(weights, torch.Tensor) or not weights.dtype.is_floating_point:
        raise wrong_type(
            "per_sample_weights", getattr(weights, "dtype", weights), "a tensor of floats"
        )
    weights = check_cpu("per_sample_weights", weights)
    if weights.shape != (count,):
        raise wrong_value("per_sample_weights.shape", tuple(weights.shape), str((count,)))
    return weights.detach().to(torch.float32).contiguous()


def check_output_dtype(dtype: object) -> torch.dtype:
    allowed = (torch.float32, torch.float16, torch.bfloat16)
    if dtype not in allowed:
        raise wrong_value("output_dtype", dtype, ", ".join(map(str, allowed)))
    assert isinstance(dtype, torch.dtype)
    return dtype
