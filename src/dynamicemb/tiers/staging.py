"""Rows between a table's device and main memory, where stores are."""

from __future__ import annotations

import torch

from dynamicemb.table.rows import Rows

_PARTS = ("ids", "embeddings", "state", "scores")


def to_device(rows: Rows, device: torch.device) -> Rows:
    """The rows on a table's device, copied on its current stream; the host does not wait."""
    if device == rows.ids.device:
        return rows
    pinned = (getattr(rows, part).contiguous().pin_memory() for part in _PARTS)
    return Rows(*(tensor.to(device, non_blocking=True) for tensor in pinned))


def to_host(rows: Rows) -> Rows:
    """The rows in main memory."""
    device = rows.ids.device
    if device.type == "cpu":
        return rows
    copies = []
    for part in _PARTS:
        tensor = getattr(rows, part)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        copies.append(copy.copy_(tensor, non_blocking=True))
    torch.cuda.current_stream(device).synchronize()
    return Rows(*copies)
