"""Columns of numbers in safetensors, Parquet and NumPy files, a batch of rows at a time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamicemb.errors import InvalidArgumentError, UsageError

#: How long the description of a file's columns may be, since reading one takes up to thirty times
#: its length in memory: LONGEST_HEADER, and one byte more for each BYTES_PER_HEADER_BYTE that the
#: file takes on the device (a sparse file is cheap to make).
LONGEST_HEADER = 2 * 2**20
BYTES_PER_HEADER_BYTE = 256
#: Bytes of the header of an array in a NumPy file, and of the headers of all of them, each with
#: NPY_MEMBER bytes more; what has a longer one is no column.
LONGEST_NPY_HEADER = 1000
LONGEST_NPY_HEADERS = 2**19
NPY_MEMBER = 64
#: Bytes of rows that a writer of Parquet puts in one row group, at least: each costs a description.
ROW_GROUP_BYTES = 4 * 2**20
#: The metadata entry that holds ours.
META_KEY = "dynamicemb"


@dataclass(frozen=True)
class Array:
    """Shape and type of a column over all rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


Layout = Mapping[str, Array]
Batches = Callable[[], Iterator[dict[str, torch.Tensor]]]


class Reader(ABC):
    """An open file: its columns, and its metadata ("" if there are none of ours)."""

    arrays: dict[str, Array]
    meta: str = ""

    @abstractmethod
    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, torch.Tensor]]:
        """The columns ``names``, at most ``size`` rows at a time."""


class Format(ABC):
    """One kind of file."""

    @abstractmethod
    def write(self, path: Path, layout: Layout, meta: str, batches: Batches) -> None:
        """Write ``batches``, which may be asked for more than once."""

    @abstractmethod
    def open(self, path: Path) -> contextlib.AbstractContextManager[Reader]: ...


def _needs(package: str, extra: str) -> UsageError:
    return UsageError(
        f"this format needs the package {package}: pip install {package}, or dynamicemb[{extra}]"
    )


def _damaged(path: Path, error: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} cannot be read: {error}")


def _check_header(path: Path, size: int) -> None:
    status = os.stat(path)
    on_device = min(status.st_size, 512 * status.st_blocks)
    longest = LONGEST_HEADER + on_device // BYTES_PER_HEADER_BYTE
    if size > longest:
        raise _damaged(path, f"its header has {size} bytes; allowed: at most {longest}")


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


# ---- safetensors ----

_SAFETENSORS_NAMES = {
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_SAFETENSORS_TYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


class _Safetensors(Format):
    def write(self, path: Path, layout: Layout, meta: str, batches: Batches) -> None:
        # The library wants whole tensors in memory; the format is simple enough to stream.
        header: dict[str, Any] = {"__metadata__": {META_KEY: meta}}
        offsets: dict[str, int] = {}
        end = 0
        for name, array in layout.items():
            offsets[name] = end
            begin, end = end, end + _size_of(array)
            header[name] = {
                "dtype": _SAFETENSORS_NAMES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            start = file.tell()
            file.truncate(start + end)
            for batch in batches():
                for name, column in batch.items():
                    data = _bytes(column)
                    file.seek(start + offsets[name])
                    file.write(data)
                    offsets[name] += len(data)

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[Reader]:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise _needs("safetensors", "safetensors") from error
        with open(path, "rb") as start:
            _check_header(path, int.from_bytes(start.read(8), "little"))
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise _damaged(path, error) from error
        with opened as file:
            yield _SafetensorsReader(file)


class _SafetensorsReader(Reader):
    def __init__(self, file: Any) -> None:
        self._file = file
        self.arrays = {}
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            one = file.get_slice(name)
            dtype = _SAFETENSORS_TYPES.get(one.get_dtype())
            if dtype is not None:
                self.arrays[name] = Array(tuple(one.get_shape()), dtype)
        self.meta = (file.metadata() or {}).get(META_KEY, "")

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, torch.Tensor]]:
        slices = {name: self._file.get_slice(name) for name in names}
        count = self.arrays[names[0]].shape[0]
        for begin in range(0, count, size):
            yield {name: one[begin : min(count, begin + size)] for name, one in slices.items()}


def _size_of(array: Array) -> int:
    size = array.dtype.itemsize
    for one in array.shape:
        size *= one
    return size


# ---- NumPy ----


def _in_numpy(dtype: torch.dtype) -> torch.dtype:
    """NumPy and Arrow have no bfloat16; float32 has all its numbers."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=_in_numpy(dtype), device="cpu").numpy().dtype.newbyteorder("<")


class _Numpy(Format):
    def write(self, path: Path, layout: Layout, meta: str, batches: Batches) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            text = np.frombuffer(meta.encode(), dtype=np.uint8)
            with archive.open(f"{META_KEY}.npy", "w") as file:
                np.lib.format.write_array(file, text, allow_pickle=False)
            for name, array in layout.items():  # one pass per member: a zip file is a sequence
                header = {
                    "descr": np.lib.format.dtype_to_descr(_numpy_type(array.dtype)),
                    "fortran_order": False,
                    "shape": array.shape,
                }
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array_header_1_0(file, header)
                    for batch in batches():
                        file.write(_bytes(batch[name].to(_in_numpy(array.dtype))))

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[Reader]:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_ZipBytes(path))
            try:
                archive = stack.enter_context(zipfile.ZipFile(file))
            except zipfile.BadZipFile as error:
                raise _damaged(path, error) from error
            file.opened = True
            try:
                reader = _NumpyReader(archive, path)
            except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
                raise _damaged(path, error) from error
            yield reader


class _ZipBytes(io.BufferedReader):
    """The bytes of a zip file. Until it is ``opened``, the list of its members is what is read at
    once, and must not be too long."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._path = path
        self.opened = False

    def read(self, size: int | None = -1, /) -> bytes:
        if not self.opened and size is not None:
            _check_header(self._path, size)
        return super().read(size)


class _NumpyReader(Reader):
    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self._archive = archive
        self._path = path
        self._headers = 0  # bytes that were read of them
        self.arrays = {}
        for member in archive.namelist():
            if not member.endswith(".npy"):
                continue
            with archive.open(member) as file:
                array = self._header(file)
                if member == f"{META_KEY}.npy" and array is None:
                    self.meta = file.read(2**20).decode("utf-8", "replace")
                elif array is not None:
                    self.arrays[member.removesuffix(".npy")] = array

    def _header(self, file: Any) -> Array | None:
        """Shape and type of a member; ``None`` for what is no column."""
        try:
            version = np.lib.format.read_magic(file)
            digits = 2 if version == (1, 0) else 4
            size = int.from_bytes(file.peek(digits)[:digits], "little")
            self._headers += NPY_MEMBER + min(size, LONGEST_NPY_HEADER)
            if self._headers > LONGEST_NPY_HEADERS:
                raise _damaged(
                    self._path,
                    f"the headers of its arrays have more than {LONGEST_NPY_HEADERS} bytes",
                )
            if size > LONGEST_NPY_HEADER:
                return None
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(file, max_header_size=LONGEST_NPY_HEADER)
        except InvalidArgumentError:
            raise
        except (ValueError, RecursionError, MemoryError) as error:
            raise _damaged(self._path, error) from error
        types = {_numpy_type(one): one for one in _SAFETENSORS_NAMES if one != torch.bfloat16}
        if fortran or dtype.newbyteorder("<") not in types or dtype.byteorder == ">":
            return None
        return Array(shape, types[dtype.newbyteorder("<")])

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, torch.Tensor]]:
        with contextlib.ExitStack() as stack:
            files = {}
            for name in names:
                files[name] = stack.enter_context(self._archive.open(f"{name}.npy"))
                self._headers = 0
                self._header(files[name])
            count = self.arrays[names[0]].shape[0]
            for begin in range(0, count, size):
                rows = min(size, count - begin)
                yield {name: self._read(file, name, rows) for name, file in files.items()}

    def _read(self, file: Any, name: str, rows: int) -> torch.Tensor:
        array = self.arrays[name]
        tensor = torch.empty((rows, *array.shape[1:]), dtype=array.dtype, device="cpu")
        data = _bytes(tensor)
        done = 0
        while done < len(data):
            try:
                piece = file.read(len(data) - done)
            except (zipfile.BadZipFile, EOFError) as error:
                raise _damaged(self._path, error) from error
            if not piece:
                raise _damaged(self._path, f"{name} ends too early")
            data[done : done + len(piece)] = piece
            done += len(piece)
        return tensor


# ---- Parquet ----


class _Parquet(Format):
    """One column each; two-dimensional ones are lists of a fixed size."""

    @staticmethod
    def _arrow() -> tuple[Any, Any]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise _needs("pyarrow", "parquet") from error
        return pyarrow, pyarrow.parquet

    def write(self, path: Path, layout: Layout, meta: str, batches: Batches) -> None:
        arrow, parquet = self._arrow()
        schema = arrow.schema(
            [arrow.field(name, _arrow_type(arrow, one), False) for name, one in layout.items()],
            metadata={META_KEY: meta},
        )
        # Dictionaries and statistics cost time and find nothing in ids and floats.
        with parquet.ParquetWriter(
            path, schema, use_dictionary=False, write_statistics=False, compression="none"
        ) as writer:
            for group in _grouped(batches(), ROW_GROUP_BYTES):
                columns = [
                    _to_arrow(arrow, group[name], one, schema.field(name).type)
                    for name, one in layout.items()
                ]
                writer.write_table(arrow.Table.from_arrays(columns, schema=schema))

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[Reader]:
        arrow, parquet = self._arrow()
        with open(path, "rb") as end:
            end.seek(max(0, os.path.getsize(path) - 8))
            _check_header(path, int.from_bytes(end.read(4), "little"))
        try:
            file = parquet.ParquetFile(path)
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _damaged(path, error) from error
        with file:
            yield _ParquetReader(arrow, file, path)


def _grouped(
    batches: Iterator[dict[str, torch.Tensor]], size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """``batches``, put together until each, but for the last, has ``size`` bytes."""
    waiting: list[dict[str, torch.Tensor]] = []
    total = 0
    for batch in batches:
        waiting.append(batch)
        total += sum(column.nbytes for column in batch.values())
        if total >= size:
            yield _joined(waiting)
            waiting, total = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if len(batches) == 1:
        return batches[0]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _arrow_type(arrow: Any, array: Array) -> Any:
    scalar = arrow.from_numpy_dtype(_numpy_type(array.dtype))
    return scalar if len(array.shape) == 1 else arrow.list_(scalar, array.shape[1])


def _to_arrow(arrow: Any, column: torch.Tensor, array: Array, kind: Any) -> Any:
    flat = arrow.array(column.to(_in_numpy(array.dtype)).reshape(-1).numpy())
    if len(array.shape) == 1:
        return flat
    return arrow.FixedSizeListArray.from_arrays(flat, type=kind)


class _ParquetReader(Reader):
    def __init__(self, arrow: Any, file: Any, path: Path) -> None:
        self._arrow = arrow
        self._file = file
        self._path = path
        meta = (file.schema_arrow.metadata or {}).get(META_KEY.encode(), b"")
        self.meta = meta.decode("utf-8", "replace")
        self.arrays = {}
        count = file.metadata.num_rows
        for field in file.schema_arrow:
            array = self._array(field.type, field.name, count)
            if array is not None:
                self.arrays[field.name] = array

    def _array(self, kind: Any, name: str, count: int) -> Array | None:
        types = self._arrow.types
        shape: tuple[int, ...] = (count,)
        if types.is_fixed_size_list(kind):
            shape, kind = (count, kind.list_size), kind.value_type
        elif types.is_list(kind) or types.is_large_list(kind):  # other tools: the first row's width
            kind = kind.value_type
            first = next(self._file.iter_batches(1, columns=[name]), None)
            width = len(first.column(0)[0].as_py() or ()) if first is not None else 0
            shape = (count, width)
        if not (types.is_integer(kind) or types.is_floating(kind)):
            return None
        try:
            dtype = torch.from_numpy(np.empty(0, dtype=kind.to_pandas_dtype())).dtype
        except TypeError:
            return None
        return Array(shape, dtype)

    def batches(self, names: Sequence[str], size: int) -> Iterator[dict[str, torch.Tensor]]:
        try:
            for batch in self._file.iter_batches(size, columns=list(names)):
                yield {name: self._tensor(batch.column(name), name) for name in names}
        except self._arrow.ArrowException as error:
            raise _damaged(self._path, error) from error

    def _tensor(self, column: Any, name: str) -> torch.Tensor:
        array = self.arrays[name]
        shape = (len(column), *array.shape[1:])
        flat = column if len(shape) == 1 else column.flatten()
        if column.null_count or flat.null_count or len(flat) != int(np.prod(shape)):
            raise InvalidArgumentError(
                f"{name} of {self._path} has empty places or rows of other widths; allowed: "
                f"{shape[1:]} numbers in each row"
            )
        values = flat.to_numpy(zero_copy_only=False)
        return torch.from_numpy(np.array(values)).reshape(shape)


FORMATS: dict[str, Format] = {
    "safetensors": _Safetensors(),
    "parquet": _Parquet(),
    "numpy": _Numpy(),
}
