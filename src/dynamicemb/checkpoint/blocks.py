"""Files as sequences of blocks, each with its checksum, written and read in one pass."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import torch

from dynamicemb import _engine
from dynamicemb.checkpoint.files import ReadFile, WriteFile
from dynamicemb.checkpoint.manifest import BLOCK_BYTES, FileEntry
from dynamicemb.errors import CheckpointError, CorruptCheckpointError

# Bytes are moved by NumPy: torch would wake all its threads for a copy of a few megabytes.
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor on the CPU; shared where the tensor is contiguous."""
    if sys.byteorder != "little":  # pragma: no cover
        raise CheckpointError("checkpoints are little-endian; this machine is not")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _checksum(block: Bytes) -> int:
    return _engine.xxh64(block.ctypes.data, len(block))


#: Bytes after which a long file is sent to the device, while more of it is written.
_SYNC_BYTES = 64 * 2**20


class BlockWriter:
    """Appends tensors to a new file in writes of whole blocks. With ``syncer``, what was written
    goes to the device there meanwhile, instead of all at the end."""

    def __init__(
        self,
        file: WriteFile,
        block_bytes: int = BLOCK_BYTES,
        *,
        syncer: Executor | None = None,
    ) -> None:
        self._file = file
        self._syncer = syncer
        self._syncing: Future[None] | None = None
        self._synced = 0
        self._block_bytes = block_bytes
        self._pending = np.empty(block_bytes, dtype=np.uint8)
        self._filled = 0
        self._bytes = 0
        self._checksums: list[int] = []

    def write(self, tensor: torch.Tensor) -> None:
        """Append the numbers of ``tensor``, which is on the CPU."""
        data = as_bytes(tensor)
        while len(data):
            if self._filled == 0 and len(data) >= self._block_bytes:
                self._put(data[: self._block_bytes])  # without a copy
                data = data[self._block_bytes :]
                continue
            count = min(self._block_bytes - self._filled, len(data))
            self._pending[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == self._block_bytes:
                self._flush()

    def finish(self) -> FileEntry:
        """Write what is left and wait until all is on the device; the file's entry."""
        self._flush()
        self._end_sync()
        self._file.sync()
        self._file.close()
        return FileEntry(self._bytes, tuple(self._checksums))

    def close(self) -> None:
        """Give up, if it is not finished."""
        if self._syncing is not None:
            self._syncing.exception()  # no call may use the descriptor that is closed now
        self._file.close()

    def _flush(self) -> None:
        if self._filled:
            self._put(self._pending[: self._filled])
            self._filled = 0

    def _put(self, block: Bytes) -> None:
        self._checksums.append(_checksum(block))
        self._bytes += len(block)
        self._file.write(block.data)
        if self._syncer is not None and self._bytes - self._synced >= _SYNC_BYTES:
            self._end_sync()
            self._synced = self._bytes
            self._syncing = self._syncer.submit(self._file.sync)

    def _end_sync(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing.result()


@dataclass(frozen=True)
class CheckedBlock:
    """A block of a file. ``problem``: what is wrong with it, if anything."""

    offset: int
    size: int
    problem: str | None


class BlockReader:
    """Reads a file, whose length is its entry's, from start to end, and checks every block before
    it is handed out."""

    def __init__(self, file: ReadFile, entry: FileEntry, block_bytes: int = BLOCK_BYTES) -> None:
        self._file = file
        self._entry = entry
        self._block_bytes = block_bytes
        self._block = np.empty(0, dtype=np.uint8)
        self._rest = self._block  # what of the present block was not handed out
        self._next = 0  # number of the next block
        file.expect_in_order()

    @property
    def size(self) -> int:
        return self._entry.bytes

    def read(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next numbers of the file."""
        return self.fill(torch.empty(shape, dtype=dtype, device="cpu"))

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same into a tensor that is there, contiguous and on the CPU; returns it."""
        out = as_bytes(tensor)
        while len(out):
            if len(self._rest) == 0:
                size = self._size_of_next()
                if len(out) >= size > 0:
                    self._load(out[:size])
                    out = out[size:]
                    continue
                if len(self._block) < size:
                    self._block = np.empty(size, dtype=np.uint8)
                self._load(self._block[:size])
                self._rest = self._block[:size]
            count = min(len(out), len(self._rest))
            out[:count] = self._rest[:count]
            out, self._rest = out[count:], self._rest[count:]
        return tensor

    def seek(self, offset: int) -> None:
        """Go on from the byte ``offset``."""
        self._next, inside = divmod(offset, self._block_bytes)
        self._rest = self._block[:0]
        if inside:
            size = self._size_of_next()
            self._block = np.empty(size, dtype=np.uint8)
            self._load(self._block)
            self._rest = self._block[inside:]

    def blocks(self) -> Iterator[CheckedBlock]:
        """Read what is left, block by block, and say of each whether it is as it was written."""
        while self._next * self._block_bytes < self._entry.bytes:
            size = self._size_of_next()
            if len(self._block) < size:
                self._block = np.empty(size, dtype=np.uint8)
            offset = self._next * self._block_bytes
            yield CheckedBlock(offset, size, self._read(self._block[:size]))

    def verify(self) -> int:
        """Read what is left and check it; the number of bytes."""
        total = 0
        for block in self.blocks():
            if block.problem is not None:
                raise CorruptCheckpointError(block.problem)
            total += block.size
        return total

    def close(self) -> None:
        self._file.close()

    def _size_of_next(self) -> int:
        left = self._entry.bytes - self._next * self._block_bytes
        if left <= 0:
            raise CorruptCheckpointError(f"{self._file.name} has no more than {self.size} bytes")
        return min(self._block_bytes, left)

    def _load(self, block: Bytes) -> None:
        problem = self._read(block)
        if problem is not None:
            raise CorruptCheckpointError(problem)

    def _read(self, block: Bytes) -> str | None:
        """Fill ``block`` with the next one; what is wrong with it."""
        number = self._next
        offset = number * self._block_bytes
        self._file.read_at(offset, block.data)
        self._next += 1
        if self._entry.checksums is None:
            return None
        found = _checksum(block)
        if found == self._entry.checksums[number]:
            return None
        return (
            f"{self._file.name} is corrupt in the bytes {offset} to {offset + len(block)}: their "
            f"checksum is {found:016x}, not {self._entry.checksums[number]:016x}"
        )
