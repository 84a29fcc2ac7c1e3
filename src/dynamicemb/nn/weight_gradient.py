"""The gradient of weights of bags whose rows were only read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynamicemb.options import DynamicEmbPoolingMode
from dynamicemb.table import Pooling, Table


def weight_gradient(
    tables: Sequence[Table], ids: torch.Tensor, pooling: Pooling, gradient: torch.Tensor
) -> torch.Tensor:
    """float32 [n]: the gradient of ``pooling.weights``, computed from the rows that evaluation
    reads now. ``gradient`` is the gradient of the bags."""
    offsets, batch = pooling.offsets, pooling.batch_size
    assert offsets is not None
    lengths = offsets.diff()
    gradient = gradient.to(torch.float32)
    bag = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)
    out = torch.zeros(len(ids), dtype=torch.float32, device=ids.device)
    first = column = 0
    for table, features in zip(tables, pooling.features, strict=True):
        for _ in range(features):
            part = slice(int(offsets[first]), int(offsets[first + batch]))
            rows = table.find(ids[part]).embeddings.to(torch.float32)
            of_bags = gradient[:, column : column + table.dim]
            out[part] = (rows * of_bags[bag[part] - first]).sum(1)
            first, column = first + batch, column + table.dim
    if pooling.mode is DynamicEmbPoolingMode.MEAN:
        out /= lengths[bag]
    return out
