"""The parts of a table that are on this rank, as rows that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dynamicemb.errors import UsageError, wrong_type, wrong_value
from dynamicemb.tiers.remote.rows import Part, RowFormat


@dataclass(frozen=True)
class LocalShard:
    """Rows [row_begin, row_begin + rows) and columns from ``column`` on of a table: the weight, and
    the optimizer's states of those rows, [rows, n] or [rows]."""

    row_begin: int
    column: int
    whole_rows: bool
    tensors: tuple[torch.Tensor, ...]

    @property
    def rows(self) -> int:
        return int(self.tensors[0].shape[0])

    @property
    def row_format(self) -> RowFormat:
        names = ["weight", *(f"momentum{i}" for i in range(1, len(self.tensors)))]
        return RowFormat(
            tuple(
                Part(name, one.dtype, one[0].numel() if one.dim() > 1 else 1)
                for name, one in zip(names, self.tensors, strict=True)
            )
        )

    def table_name(self, table: str) -> str:
        """The name of these columns' rows at a server."""
        return table if self.whole_rows else f"{table}@{self.column}"

    def here(self, slots: torch.Tensor) -> torch.Tensor:
        """bool [n]: which slots are in this shard."""
        return (slots >= self.row_begin) & (slots < self.row_begin + self.rows)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [n, bytes]: copies of the rows of slots in this shard."""
        at = slots - self.row_begin
        views = self._bytes()
        if views is None:
            at = at.to(self.tensors[0].device)
            return self.row_format.pack([one.data.index_select(0, at) for one in self.tensors])
        out = np.empty((len(at), self.row_format.nbytes), np.uint8)
        begin = 0
        for view in views:
            out[:, begin : begin + view.shape[1]] = view[at.numpy()]
            begin += view.shape[1]
        return torch.from_numpy(out)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows of slots in this shard."""
        at = slots - self.row_begin
        views = self._bytes()
        if views is None:
            at = at.to(self.tensors[0].device)
            for one, part in zip(self.tensors, self.row_format.unpack(rows), strict=True):
                # .data: autograd must not take rows of a later batch for a change of this one's.
                one.data.index_copy_(0, at, part.reshape(-1, *one.shape[1:]).to(one))
            return
        begin = 0
        for view in views:
            view[at.numpy()] = rows[:, begin : begin + view.shape[1]].numpy()
            begin += view.shape[1]

    def _bytes(self) -> list[Any] | None:
        """The tensors as NumPy's uint8 [rows, bytes], where they are in main memory. NumPy, because
        torch's own threads would take the processors from the training step."""
        if any(one.device.type != "cpu" or not one.is_contiguous() for one in self.tensors):
            return None
        return [one.data.view(self.rows, -1).view(torch.uint8).numpy() for one in self.tensors]


def local_shards(tensors: Sequence[Any]) -> tuple[list[LocalShard], bool]:
    """(the shards on this rank, whether other ranks hold copies of them)."""
    if not tensors:
        raise wrong_value("tensors", tensors, "the weight, then the optimizer's states")
    weight = tensors[0]
    if isinstance(weight, ShardedTensor):
        parts = [_shards_of(index, one) for index, one in enumerate(tensors)]
        if len({len(one) for one in parts}) != 1:
            counts = [len(one) for one in parts]
            raise UsageError(f"the weight and the states have {counts} shards on this rank")
        return [_join(list(group), weight.size(1)) for group in zip(*parts, strict=True)], False
    for index, one in enumerate(tensors):
        if not isinstance(one, torch.Tensor) or one.dim() not in (1, 2):
            raise wrong_type(f"tensors[{index}]", one, "a ShardedTensor, or a tensor [rows, n]")
        if one.shape[0] != weight.shape[0]:
            raise wrong_value(f"tensors[{index}].shape", tuple(one.shape), f"[{len(weight)}, ...]")
    copies = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return [LocalShard(0, 0, True, tuple(tensors))], copies


def _shards_of(index: int, tensor: Any) -> list[Any]:
    if not isinstance(tensor, ShardedTensor):
        raise wrong_type(f"tensors[{index}]", tensor, "a ShardedTensor, as the weight is")
    return list(tensor.local_shards())


def _join(shards: list[Any], columns: int) -> LocalShard:
    weight = shards[0].metadata
    begin, rows = weight.shard_offsets[0], weight.shard_sizes[0]
    for state in shards[1:]:
        offsets = state.metadata.shard_offsets
        # The columns' shards of a state with a number per row have offsets of their own.
        same = len(offsets) == 1 or offsets[0] == begin
        if state.tensor.shape[0] != rows or not same:
            raise UsageError(
                f"a state has {state.tensor.shape[0]} rows from {offsets[0]} on where the weight "
                f"has {rows} from {begin} on"
            )
    return LocalShard(
        int(weight.shard_offsets[0]),
        int(weight.shard_offsets[1]),
        int(weight.shard_sizes[1]) == columns,
        tuple(shard.tensor for shard in shards),
    )
