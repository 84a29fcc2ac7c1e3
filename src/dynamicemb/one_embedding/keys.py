"""Ids and tables as the 64-bit keys of one store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynamicemb.errors import check_integer, wrong_type, wrong_value
from dynamicemb.tracing import check_tensor

KEY_TYPES = (torch.int64, torch.int32, torch.uint64, torch.uint32)
#: Bits of an id where the table's number is in the upper ones.
FOLDED_BITS = 56
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Keys:
    """How ids of ``key_type`` and the number of their table become keys.

    ``folded``: the table's number is the upper 8 bits of the key, so equal ids of two tables are
    two rows; ids must fit the lower 56. Otherwise the id is the key, whatever its table.
    """

    key_type: torch.dtype
    num_tables: int
    folded: bool

    def flat(self, ids: object, table_ids: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(ids, numbers of their tables or ``None`` with one table), int64 and 1-D. Looks at shapes
        and types alone, so it may be part of a compiled graph."""
        ids = check_tensor("ids", ids, f"a tensor of {self.key_type}")
        if ids.dtype != self.key_type:
            raise wrong_type("ids.dtype", ids.dtype, f"{self.key_type}, the embedding's key_type")
        numbers = self._numbers(ids, table_ids)
        one_axis = ids.reshape(-1)
        if ids.dtype is torch.uint64:
            return one_axis.view(torch.int64), numbers
        return one_axis.to(torch.int64), numbers

    def fold(self, ids: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
        """The keys of ids and tables of :meth:`flat`, if all are in range."""
        if numbers is None or not numbers.numel():
            return ids
        low, high = (int(x) for x in torch.aminmax(numbers))
        if low < 0 or high >= self.num_tables:
            bad = low if low < 0 else high
            raise wrong_value("table_ids", bad, f"from 0 to {self.num_tables - 1}")
        if not self.folded:
            return ids
        low, high = (int(x) for x in torch.aminmax(ids))
        unsigned = self.key_type is torch.uint64
        least = 0 if unsigned else -(2 ** (FOLDED_BITS - 1))
        most = least + 2**FOLDED_BITS - 1
        if low < least or high > most:
            bad = low if low < least else high
            raise wrong_value(
                "an id",
                bad % 2**64 if unsigned else bad,
                f"from {least} to {most} with share_ids=False, which keeps the number of the table "
                "in the upper 8 bits",
            )
        keys: torch.Tensor = (ids & (2**FOLDED_BITS - 1)) | (numbers << FOLDED_BITS)
        return keys

    def _numbers(self, ids: torch.Tensor, table_ids: object) -> torch.Tensor | None:
        if self.num_tables == 1:
            return None
        shape = tuple(ids.shape)
        if table_ids is None:
            if not shape or shape[-1] != self.num_tables:
                raise wrong_value(
                    "ids.shape",
                    shape,
                    f"{self.num_tables} in the last place, one id per table; or give table_ids",
                )
            numbers = torch.arange(self.num_tables, device=ids.device)
        else:
            if not isinstance(table_ids, torch.Tensor) or table_ids.dtype not in _INTEGERS:
                raise wrong_type(
                    "table_ids", getattr(table_ids, "dtype", table_ids), "a tensor of integers"
                )
            given = tuple(table_ids.shape)
            if len(given) > len(shape) or shape[len(shape) - len(given) :] != given:
                raise wrong_value(
                    "table_ids.shape", given, f"{shape}, that of ids, or its last places"
                )
            numbers = table_ids.to(device=ids.device, dtype=torch.int64)
        return numbers.expand(shape).reshape(-1)

    def padding(self, keys: torch.Tensor, padding_idx: int) -> torch.Tensor:
        """bool [n]: which keys are of the id ``padding_idx``, in any table."""
        if self.folded and self.num_tables > 1:  # the table's bits are shifted out
            return (keys << (64 - FOLDED_BITS)) == _wrapped(padding_idx << (64 - FOLDED_BITS))
        return keys == _wrapped(padding_idx)


def check_padding_idx(padding_idx: object, key_type: torch.dtype) -> int | None:
    """``padding_idx`` if it is an id of ``key_type``."""
    if padding_idx is None:
        return None
    limits = torch.iinfo(key_type)
    return check_integer("padding_idx", padding_idx, minimum=limits.min, maximum=limits.max)


def _wrapped(value: int) -> int:
    """The int64 with the same lower 64 bits."""
    return (value + 2**63) % 2**64 - 2**63
