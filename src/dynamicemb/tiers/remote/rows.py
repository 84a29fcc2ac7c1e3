"""What a remote store is to the rest of the library: rows of bytes, by table and id."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dynamicemb.errors import InvalidArgumentError, UsageError, wrong_type, wrong_value


@dataclass(frozen=True)
class Part:
    """One tensor's share of a row: ``count`` elements of ``dtype``."""

    name: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.count


@dataclass(frozen=True)
class RowFormat:
    """The bytes of a row: its parts, one after the other, little-endian."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def tag(self) -> bytes:
        """4 bytes that rows of the same format share: a checksum of :meth:`describe`."""
        return zlib.crc32(self.describe().encode()).to_bytes(4, "little")

    def describe(self) -> str:
        """Such as "embedding float32[16], momentum1 float32[1]"."""
        return ", ".join(
            f"{part.name} {str(part.dtype).removeprefix('torch.')}[{part.count}]"
            for part in self.parts
        )

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """uint8 [n, bytes] of one tensor per part, [n, count] or [n] for a count of 1."""
        out = torch.empty(len(tensors[0]), self.nbytes, dtype=torch.uint8, device="cpu")
        begin = 0
        for part, tensor in zip(self.parts, tensors, strict=True):
            flat = tensor.detach().reshape(len(out), part.count).to("cpu", part.dtype)
            out[:, begin : begin + part.nbytes] = flat.contiguous().view(torch.uint8)
            begin += part.nbytes
        return out

    def unpack(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Per part a tensor [n, count] of its dtype."""
        sizes = [part.nbytes for part in self.parts]
        return [
            piece.contiguous().view(part.dtype).view(len(rows), part.count)
            if part.count
            else torch.empty(len(rows), 0, dtype=part.dtype, device="cpu")
            for part, piece in zip(self.parts, rows.split(sizes, dim=1), strict=True)
        ]


class RemoteRows(ABC):
    """The rows of one table in a store outside the table: uint8 [n, format.nbytes], found by id.

    Ids are int64 tensors in main memory. Every method may be called from several threads. A store
    that fails raises a StoreError that names it; what :meth:`push` had to write can then be given
    again, since writing a row twice is writing it once. Rows that other options or another
    optimizer wrote are an InvalidArgumentError, when the table is opened or when they are read.
    """

    def __init__(self, table: str, row_format: RowFormat) -> None:
        if not isinstance(table, str) or not table:
            raise wrong_value("table", table, "a name that is not empty")
        self.table = table
        self.format = row_format

    @abstractmethod
    def pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(found bool [n], rows); rows that were not found are arbitrary."""

    @abstractmethod
    def push(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows, overwriting those that exist; of equal ids the last one counts."""

    def contains(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [n]."""
        return self.pull(ids)[0]

    def erase(self, ids: torch.Tensor) -> torch.Tensor:
        """Remove rows; bool [n], True at the first occurrence of an id that was there."""
        raise self._cannot("erase rows")

    def ids(self) -> torch.Tensor:
        """int64 [n]: every id that has a row, once, in any order."""
        raise self._cannot("list its ids")

    def count(self) -> int:
        """Rows there are."""
        return len(self.ids())

    def clear(self) -> None:
        """Remove every row of the table."""
        self.erase(self.ids())

    def iterate(self, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(ids, rows) of every row."""
        for ids in self.ids().split(batch_size):
            found, rows = self.pull(ids)
            yield ids[found], rows[found]

    def close(self) -> None:  # noqa: B027  not every store holds something
        """Give back what the store holds in this process."""

    def _other_rows(self, found: str) -> InvalidArgumentError:
        """The error for rows that other options or another optimizer wrote; ``found``: what they
        are."""
        return InvalidArgumentError(
            f"{self!r} has rows of {found}; asked for: {self.format.describe()}. Use another name, "
            "or the options and optimizer that wrote them"
        )

    def _cannot(self, what: str) -> UsageError:
        return UsageError(f"{self!r} cannot {what}")

    def _checked(self, ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """``ids``, contiguous; the shapes and dtypes are as they must be."""
        if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device.type != "cpu":
            raise wrong_type("ids", ids, "an int64 tensor [n] in main memory")
        if rows is not None and (
            rows.dtype != torch.uint8 or rows.shape != (len(ids), self.format.nbytes)
        ):
            allowed = f"uint8 [{len(ids)}, {self.format.nbytes}]"
            raise wrong_value("rows", f"{rows.dtype} {list(rows.shape)}", allowed)
        return ids.contiguous()


def first_of_each(ids: torch.Tensor) -> torch.Tensor:
    """bool [n]: the first occurrence of every id."""
    distinct, places = torch.unique(ids, return_inverse=True)
    first = torch.full((len(distinct),), len(ids), dtype=torch.int64, device="cpu")
    first.scatter_reduce_(0, places, torch.arange(len(ids), device="cpu"), "amin")
    mask = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    mask[first] = True
    return mask
