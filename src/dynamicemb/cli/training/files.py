"""Examples from Parquet and CSV files, streamed: a few thousand rows are in memory at a time."""

from __future__ import annotations

import csv
import glob
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamicemb.cli.training.batch import Batch, Source
from dynamicemb.cli.training.schema import FileSchema
from dynamicemb.errors import DynamicEmbError, InvalidArgumentError, missing_package
from dynamicemb.texts import text_ids

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pacsv
    import pyarrow.parquet as pq
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb train --data", "pyarrow", "parquet") from error

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
PACKED_SUFFIXES = (".gz", ".bz2", ".zst")
BLOCK_BYTES = 1 << 20  # of text; the reader has 32 of them ahead
BLOCK_ROWS = 16_384
READ_BYTES = 1 << 20


class DataError(DynamicEmbError, ValueError):
    """A file that is not as its schema says; the message names file, row and column."""


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files of paths and globs, in the order given and sorted within a glob."""
    found: list[Path] = []
    for pattern in patterns:
        names = sorted(glob.glob(pattern, recursive=True)) or [pattern]
        for name in names:
            path = Path(name)
            if not path.is_file():
                kind = "is a folder" if path.is_dir() else "does not exist"
                raise InvalidArgumentError(
                    f"--data {pattern}: {name} {kind}; allowed: files, globs"
                )
            _kind_of(path)
            found.append(path)
    return found


def _kind_of(path: Path) -> str:
    suffixes = [one.lower() for one in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in (".parquet", ".pq"):
        return "parquet"
    if last in TEXT_SUFFIXES:
        return "csv"
    allowed = ".parquet, .csv, .tsv, .txt (also .gz, .bz2, .zst)"
    raise InvalidArgumentError(f"--data {path}: unknown kind of file; allowed: {allowed}")


def _ids_of_texts(texts: pa.Array) -> np.ndarray:
    """Each distinct text is hashed once."""
    encoded = texts.dictionary_encode()
    ids: np.ndarray = text_ids(encoded.dictionary.to_pylist()).numpy()
    return ids[np.asarray(encoded.indices)] if len(ids) else ids


class FileSource(Source):
    """The rows of files, one file after the other."""

    def __init__(self, patterns: Sequence[str], schema: FileSchema) -> None:
        self._files, self._file_schema = find_files(patterns), schema
        self.schema = schema.columns_of
        counts = [self._rows_of(path) for path in self._files]
        known = [one for one in counts if one is not None]
        self.examples = sum(known) if len(known) == len(counts) else None
        self._counts = counts
        rows = "" if self.examples is None else f", {self.examples:,} examples"
        self.description = f"{len(self._files)} files ({self._files[0]} ...){rows}"

    def batches(self, skip: int, size: int) -> Iterator[Batch]:
        parts: list[pa.RecordBatch] = []
        count = 0
        for part in self._parts(skip):
            parts.append(part)
            count += part.num_rows
            if count < size:
                continue
            table = pa.Table.from_batches(parts)
            for begin in range(0, count - count % size, size):
                yield self._batch(table.slice(begin, size))
            rest = table.slice(count - count % size).combine_chunks()
            parts, count = rest.to_batches(), rest.num_rows
        if count:
            yield self._batch(pa.Table.from_batches(parts))

    def _batch(self, table: pa.Table) -> Batch:
        schema, size = self.schema, table.num_rows
        table = table.combine_chunks()
        dense = np.empty((size, len(schema.dense)), dtype=np.float32)
        for n, name in enumerate(schema.dense):
            dense[:, n] = np.asarray(table[name])
        ids, lengths = [], []
        for name in schema.features:
            column = table[name].combine_chunks()
            if isinstance(column, pa.ChunkedArray):
                column = pa.concat_arrays(column.chunks)
            lengths.append(np.asarray(pc.list_value_length(column)).astype(np.int64))
            ids.append(np.asarray(column.flatten()))
        return Batch(
            dense=torch.from_numpy(dense),
            ids=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            labels=torch.from_numpy(table[self._file_schema.label].to_numpy().copy()),
        )

    def _parts(self, skip: int) -> Iterator[pa.RecordBatch]:
        """All rows after the first ``skip``, with checked columns: label and dense float32, sparse
        lists of int64."""
        for path, count in zip(self._files, self._counts, strict=True):
            if count is not None and skip >= count:
                skip -= count
                continue
            kind = _kind_of(path)
            first = 0
            for part in self._read_parquet(path) if kind == "parquet" else self._read_csv(path):
                rows = part.num_rows
                if skip < rows:
                    checked = _Checker(path, first, self._file_schema).check(part)
                    yield checked.slice(skip)
                skip = max(0, skip - rows)
                first += rows
            if first == 0:
                raise DataError(f"{path} is empty: it has no rows")

    # ---- Parquet ----

    def _rows_of(self, path: Path) -> int | None:
        """Rows of a Parquet file, whose columns are checked; ``None`` for a CSV."""
        if _kind_of(path) != "parquet":
            return None
        with _open_parquet(path) as file:
            self._check_columns(path, file.schema_arrow.names)
            if file.metadata.num_rows == 0:
                raise DataError(f"{path} is empty: it has no rows")
            return int(file.metadata.num_rows)

    def _read_parquet(self, path: Path) -> Iterator[pa.RecordBatch]:
        with _open_parquet(path) as file:
            row = 0
            try:
                for batch in file.iter_batches(BLOCK_ROWS, columns=list(self._file_schema.wanted)):
                    row += batch.num_rows
                    yield batch
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"{path} is broken after row {row:,}: {_first_line(error)}"
                ) from error

    # ---- CSV ----

    def _read_csv(self, path: Path) -> Iterator[pa.RecordBatch]:
        schema = self._file_schema
        separator = schema.separator or ("\t" if ".tsv" in path.name.lower() else ",")
        names, has_header = self._columns_of(path, separator)
        self._check_columns(path, names)
        bad: list[Any] = []

        def on_bad_row(row: Any) -> str:
            bad.append(row)
            return "error"

        try:
            reader = pacsv.open_csv(
                path,
                read_options=pacsv.ReadOptions(
                    use_threads=False,
                    block_size=BLOCK_BYTES,
                    column_names=names,
                    skip_rows=int(has_header),
                ),
                parse_options=pacsv.ParseOptions(
                    delimiter=separator, invalid_row_handler=on_bad_row
                ),
                convert_options=pacsv.ConvertOptions(
                    column_types=dict.fromkeys(schema.wanted, pa.string()),
                    include_columns=list(schema.wanted),
                    strings_can_be_null=False,
                ),
            )
            yield from reader
        except (pa.ArrowException, OSError) as error:
            if bad:
                row = bad[0].number
                where = "" if row is None else f" row {row - has_header:,}"
                raise DataError(
                    f"{path}{where} has {bad[0].actual_columns} columns; the first row has "
                    f"{bad[0].expected_columns}"
                ) from error
            raise DataError(f"{path} cannot be read: {_first_line(error)}") from error

    def _columns_of(self, path: Path, separator: str) -> tuple[list[str], bool]:
        """(names, whether the first line has them)."""
        try:
            with pa.input_stream(str(path)) as stream:
                text = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8", newline="")
                first = next(csv.reader(text, delimiter=separator), None)
        except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read: {_first_line(error)}") from error
        if not first:
            raise DataError(f"{path} is empty")
        named = self._file_schema.columns
        if named is None or self._file_schema.label in first:
            return first, True
        if len(first) != len(named):
            raise DataError(f"{path} row 1 has {len(first)} columns; the schema has {len(named)}")
        return list(named), False

    def _check_columns(self, path: Path, names: Sequence[str]) -> None:
        for name in self._file_schema.wanted:
            if name not in names:
                raise DataError(f"{path} has no column {name!r}; it has {', '.join(names)}")


def _open_parquet(path: Path) -> Any:
    try:
        # So a row group, which may be the whole file, is read piece by piece.
        return pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is no Parquet file, or broken: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class _Checker:
    """The columns of some rows as numbers, or an error with file, row and column."""

    def __init__(self, path: Path, first: int, schema: FileSchema) -> None:
        self._path, self._first, self._schema = path, first, schema

    def error(self, row: int, name: str, value: object, allowed: str) -> DataError:
        return DataError(
            f"{self._path} row {self._first + row + 1:,} column {name!r} is {value!r}; "
            f"allowed: {allowed}"
        )

    def check(self, part: pa.RecordBatch) -> pa.RecordBatch:
        schema = self._schema
        columns = [pa.array(self._label(schema.label, part.column(schema.label)))]
        for name in schema.columns_of.dense:
            values = self._numbers(name, part.column(name), missing="0")
            if schema.dense_transform == "log1p":
                values = np.sign(values) * np.log1p(np.abs(values))
            columns.append(pa.array(values))
        columns += [self._ids(name, part.column(name)) for name in schema.columns_of.features]
        return pa.RecordBatch.from_arrays(columns, names=list(schema.wanted))

    def _label(self, name: str, column: pa.Array) -> np.ndarray:
        values = self._numbers(name, column, missing=None)
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            row = int(wrong[0])
            raise self.error(row, name, column[row].as_py(), "0 or 1")
        return values

    def _numbers(self, name: str, column: pa.Array, *, missing: str | None) -> np.ndarray:
        """float32; an empty value is ``missing``, or an error if that is ``None``."""
        original = column
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = pc.utf8_trim_whitespace(column)
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
        if missing is None and column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise self.error(row, name, original[row].as_py(), "0 or 1")
        try:
            numbers = np.asarray(pc.fill_null(column.cast(pa.float32()), float(missing or 0)))
        except pa.ArrowException:
            numbers = np.array([_float(one) for one in column.to_pylist()], dtype=np.float32)
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if len(wrong):
            row = int(wrong[0])
            raise self.error(row, name, original[row].as_py(), "a finite number")
        return numbers

    def _ids(self, name: str, column: pa.Array) -> pa.Array:
        """A list of ids for every row: integers as they are, texts hashed, nothing for nothing."""
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
            values = column.flatten()
            if values.null_count:
                owners = np.repeat(np.arange(len(lengths)), lengths)
                row = int(owners[pc.index(values.is_null(), True).as_py()])
                raise self.error(row, name, column[row].as_py(), "lists without missing values")
        else:
            empty = column.is_null()
            if pa.types.is_string(kind) or pa.types.is_large_string(kind):
                empty = pc.or_(pc.fill_null(pc.equal(column, ""), True), empty)
            there = np.asarray(pc.invert(empty).cast(pa.uint8())).astype(bool)
            lengths = there.astype(np.int64)
            values = column.filter(pa.array(there))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(self._flat(name, values)))

    def _flat(self, name: str, values: pa.Array) -> np.ndarray:
        kind = values.type
        if pa.types.is_dictionary(kind):
            values = values.dictionary_decode()
            kind = values.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return _ids_of_texts(values)
        if pa.types.is_uint64(kind):
            return np.asarray(values).view(np.int64)
        if pa.types.is_integer(kind):
            return np.asarray(values).astype(np.int64)
        if pa.types.is_null(kind):
            return np.empty(0, np.int64)
        raise DataError(
            f"{self._path} column {name!r} has type {kind}; allowed: integers, text, lists of them"
        )


def _float(value: Any) -> float:
    """A number, or NaN for what is none."""
    try:
        return 0.0 if value is None else float(value)
    except (TypeError, ValueError):
        return float("nan")
