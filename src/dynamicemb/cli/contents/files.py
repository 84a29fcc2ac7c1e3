"""Rows in safetensors, Parquet and NumPy files: one table each, or a folder of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from dynamicemb.checkpoint.exchange import NAMES, SUFFIXES, read_meta
from dynamicemb.checkpoint.exchange_formats import FORMATS, Array, Reader
from dynamicemb.checkpoint.replaced import was_replaced
from dynamicemb.cli.contents.base import EVERYTHING, Batch, Columns, Content, Damage, TableInfo
from dynamicemb.cli.contents.meta import Described
from dynamicemb.errors import DynamicEmbError, InvalidArgumentError

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BATCH_BYTES = 8 * 2**20


def is_table_file(path: Path) -> bool:
    """Whether a name is that of a file with rows."""
    return path.suffix in SUFFIXES and path.is_file()


def table_files(path: str) -> list[Path]:
    """The files with rows at a path: itself, or those in it."""
    place = Path(path)
    there = sorted(place.iterdir()) if place.is_dir() else [place]
    return [one for one in there if is_table_file(one)]


def _some(names: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "none"


def _marks(path: str) -> list[tuple[str, tuple[int, ...]]]:
    """The files at a path, and what is different once one of them was replaced."""
    marks: list[tuple[str, tuple[int, ...]]] = []
    for file in table_files(path):
        try:
            about = file.stat()
        except OSError:
            continue
        identity = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
        marks.append((str(file), identity))
    return marks


class FileContent(Content):
    """Files of ``export_table`` and ``convert``, or of other tools. ``columns``: what they call
    ids, embeddings, state and scores, where it differs."""

    def __init__(self, path: str, columns: Mapping[str, str]) -> None:
        super().__init__(path)
        before = _marks(path)
        if not before:
            raise was_replaced(path)
        files = [Path(name) for name, _ in before]
        self.layout = SUFFIXES[files[0].suffix]
        self.checksums = self.layout == "numpy"  # a zip file has some
        self._called = {name: columns.get(name, name) for name in NAMES}
        self._stack = ExitStack()
        self._readers: dict[tuple[str, str, int | None], tuple[Path, Reader]] = {}
        try:
            try:
                for file in files:
                    self._open(file)
            finally:  # whatever came of it: files of two states are no tables
                if _marks(path) != before:
                    raise was_replaced(path)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path) -> None:
        try:
            opened = FORMATS[SUFFIXES[file.suffix]].open(file)
            reader = self._stack.enter_context(opened)
        except OSError as error:
            raise InvalidArgumentError(
                f"{file} cannot be read: {error.strerror or error}"
            ) from error
        arrays = {name: reader.arrays.get(self._called[name]) for name in NAMES}
        ids, rows = arrays["ids"], arrays["embeddings"]
        for name, array in (("ids", ids), ("embeddings", rows)):
            if array is None:
                raise InvalidArgumentError(
                    f"{file} has no column {self._called[name]!r} for {name}; it has "
                    f"{_some(list(reader.arrays))} (--column {name}=NAME says which)"
                )
        assert ids is not None
        assert rows is not None
        if len(ids.shape) != 1 or ids.dtype not in (torch.int64, torch.uint64):
            raise InvalidArgumentError(f"ids of {file} are {ids}; allowed: [n] of 64-bit integers")
        count = ids.shape[0]
        if len(rows.shape) != 2 or rows.shape[0] != count or rows.dtype not in _FLOATS:
            raise InvalidArgumentError(
                f"embeddings of {file} are {rows}; allowed: [{count}, dim] of floats"
            )
        said = Described(read_meta(reader.meta))
        state_dim = self._state_dim(arrays["state"], count, file)
        strategy = said.strategy
        words = arrays["scores"]
        if words is not None and strategy is None:
            self.notes.append(f"scores of {file.name} are left out: it does not say what they mean")
        optimizer = said.optimizer
        if state_dim and (optimizer is None or optimizer.state_dim(rows.shape[1]) != state_dim):
            self.notes.append(f"state of {file.name} is left out: it does not say whose it is")
            state_dim = 0
        values = rows.dtype if rows.dtype != torch.float64 else torch.float32
        if rows.dtype == torch.float64:
            self.notes.append(f"{file.name} has float64; rows are read as float32")
        info = TableInfo(
            collection=said.text("collection", "model"),
            name=said.text("name", file.stem),
            dim=rows.shape[1],
            dtype=said.dtype("dtype", values),
            value_dtype=said.dtype("value_dtype", values),
            strategy=strategy if words is not None else None,
            optimizer=optimizer,
            state_dim=state_dim,
            routing=None,
            parts=(said.part(count, clock=file.stat().st_mtime_ns),),
            bytes=os.path.getsize(file),
            options=said.options,
        )
        if info.key in self._readers:
            other = self._readers[info.key][0]
            raise InvalidArgumentError(f"{file} and {other} are of one table, {info.label}")
        self.tables.append(info)
        self._readers[info.key] = (file, reader)

    @staticmethod
    def _state_dim(array: Array | None, count: int, file: Path) -> int:
        if array is None:
            return 0
        if len(array.shape) != 2 or array.shape[0] != count or array.dtype != torch.float32:
            raise InvalidArgumentError(
                f"state of {file} is {array}; allowed: [{count}, numbers] of float32"
            )
        return array.shape[1]

    def batches(
        self, table: TableInfo, part: int | None = None, columns: Columns = EVERYTHING
    ) -> Iterator[Batch]:
        _, reader = self._readers[table.key]
        wanted = ["ids"]
        wanted += ["embeddings"] if columns.values else []
        wanted += ["state"] if columns.state and table.state_dim else []
        wanted += ["scores"] if columns.scores and table.strategy is not None else []
        size = max(1, _BATCH_BYTES // table.row_bytes(columns))
        for found in reader.batches([self._called[name] for name in wanted], size):
            some = {name: found[self._called[name]] for name in wanted}
            rows = some.get("embeddings")
            words = some.get("scores")
            yield Batch(
                some["ids"].view(torch.int64),
                None if rows is None else rows.to(table.value_dtype),
                some.get("state"),
                None if words is None else words.view(torch.int64),
            )

    def damages(self, table: TableInfo, *, skip_rows: bool) -> Iterator[Damage | int]:
        if skip_rows:
            return
        file, _ = self._readers[table.key]
        try:
            for batch in self.batches(table):
                yield len(batch) * table.row_bytes()
        except DynamicEmbError as error:
            yield Damage(str(error), str(file), table.label)

    def close(self) -> None:
        self._stack.close()
