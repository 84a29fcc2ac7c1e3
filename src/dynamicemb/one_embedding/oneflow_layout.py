"""Tables that OneFlow wrote, read.

A folder has, as decimal text, KEY_SIZE, VALUE_SIZE, PHYSICAL_BLOCK_SIZE and
NUM_LOGICAL_BLOCKS_PER_CHUNK, and

    keys/key-000000000000, ...       keys by row, unsigned, little-endian
    values/value-000000000000, ...   values in blocks, none over the end of a block
    snapshots/<name>/LIST            names of index files, one per line
    snapshots/<name>/index-000000000000, ...   uint64 row numbers, of one chunk each

A logical block is the physical one, or the value rounded up to whole physical ones if that is
larger. Row = block * values per block + place in the block; chunk = block / blocks per chunk.
There are no checksums: sizes are checked, and everything must lie inside its file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dynamicemb.errors import CorruptStoreError, StoreError, wrong_value

_INDEX = re.compile(r"index-(\d{12})")
_LARGEST_TEXT = 1 << 20


def has_table(folder: str) -> bool:
    """Whether a folder is such a table."""
    return os.path.isfile(os.path.join(folder, "KEY_SIZE"))


def has_snapshot(folder: str, name: str) -> bool:
    return has_table(folder) and os.path.isfile(os.path.join(folder, "snapshots", name, "LIST"))


def snapshots(folder: str) -> list[str]:
    """The names in a folder that may be snapshots, oldest first."""
    place = os.path.join(folder, "snapshots")
    try:
        names = os.listdir(place) if has_table(folder) else []
    except FileNotFoundError:
        return []
    return sorted(names, key=lambda name: os.stat(os.path.join(place, name)).st_mtime_ns)


@dataclass(frozen=True)
class OneFlowTable:
    """An open table; nothing in it is changed."""

    folder: str
    key_size: int
    value_size: int
    block: int  # bytes of a logical block
    per_block: int  # values in it
    blocks_per_chunk: int

    @staticmethod
    def open(folder: str, *, key_size: int, value_size: int, physical_block: int) -> OneFlowTable:
        """Check that a folder holds keys and values of these bytes."""
        said = {
            "KEY_SIZE": key_size,
            "VALUE_SIZE": value_size,
            "PHYSICAL_BLOCK_SIZE": physical_block,
        }
        for name, expected in said.items():
            found = read_number(os.path.join(folder, name))
            if found != expected:
                raise wrong_value(f"{name} of the table at {folder}", found, str(expected))
        block = -(-value_size // physical_block) * physical_block
        file = os.path.join(folder, "NUM_LOGICAL_BLOCKS_PER_CHUNK")
        blocks_per_chunk = read_number(file)
        if blocks_per_chunk < 1:
            raise CorruptStoreError(None, f"{file} says {blocks_per_chunk}; expected at least 1")
        return OneFlowTable(folder, key_size, value_size, block, block // value_size,
                            blocks_per_chunk)  # fmt: skip

    def rows(self, name: str, *, limit: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(keys, values) of a snapshot as unsigned integers [n] and bytes [n, value_size], at most
        ``limit`` at a time, none over the end of a chunk."""
        snapshot = os.path.join(self.folder, "snapshots", name)
        for index in _lines(os.path.join(snapshot, "LIST")):
            found = _INDEX.fullmatch(index)
            if found is None:
                raise CorruptStoreError(
                    None, f"LIST of {snapshot} names {index!r}; expected index-<12 digits>"
                )
            yield from self._chunk(os.path.join(snapshot, index), int(found[1]), limit)

    def count(self, name: str) -> int:
        """Rows of a snapshot, by the lengths of its index files."""
        snapshot = os.path.join(self.folder, "snapshots", name)
        return sum(
            len(_mapped(os.path.join(snapshot, index), np.dtype("<u8")))
            for index in _lines(os.path.join(snapshot, "LIST"))
        )

    def _chunk(self, file: str, chunk: int, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        numbers = _mapped(file, np.dtype("<u8"))
        keys = _mapped(
            os.path.join(self.folder, "keys", f"key-{chunk:012d}"), np.dtype(f"<u{self.key_size}")
        )
        values = _mapped(
            os.path.join(self.folder, "values", f"value-{chunk:012d}"), np.dtype(np.uint8)
        )
        blocks = len(values) // self.block
        # A view [blocks, values in one, bytes]: the rest of each block is left out.
        used = values[: blocks * self.block].reshape(blocks, self.block)
        places = used[:, : self.per_block * self.value_size].reshape(
            blocks, self.per_block, self.value_size
        )
        first = chunk * self.blocks_per_chunk * self.per_block
        for begin in range(0, len(numbers), limit):
            inside = numbers[begin : begin + limit].astype(np.int64) - first
            outside = (inside < 0) | (inside >= min(len(keys), blocks * self.per_block))
            if outside.any():
                row = int(inside[outside][0]) + first
                raise CorruptStoreError(
                    None, f"{file} names row {row}, which is not in chunk {chunk} of {self.folder}"
                )
            yield keys[inside], places[inside // self.per_block, inside % self.per_block]


def _mapped(file: str, dtype: np.dtype) -> np.ndarray:
    try:
        size = os.path.getsize(file)
    except OSError as error:
        raise StoreError(error.errno, f"{error.strerror}: {file}", file) from error
    if size % dtype.itemsize:
        raise CorruptStoreError(None, f"{file} has {size} bytes; expected whole {dtype.itemsize}s")
    if size == 0:
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r")


def read_number(file: str) -> int:
    """The decimal number that a file holds."""
    text = _text(file).strip()
    if not re.fullmatch(r"\d{1,18}", text):
        raise CorruptStoreError(None, f"{file} holds {text[:40]!r}; expected a number")
    return int(text)


def _lines(file: str) -> list[str]:
    return [line for line in _text(file).splitlines() if line]


def _text(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(_LARGEST_TEXT).decode("ascii", "replace")
    except OSError as error:
        raise StoreError(error.errno, f"{error.strerror}: {file}", file) from error
