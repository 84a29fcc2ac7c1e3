"""A list of tensors, as torchrec_dynamic_embedding passes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


class TensorList:
    """Tensors without their autograd history; ``len``, ``[i]``, and iteration."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensor_list = [tensor.detach() for tensor in tensors]

    def __len__(self) -> int:
        return len(self.tensor_list)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor_list[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensor_list)
