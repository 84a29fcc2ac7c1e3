"""Read-only tables over the files of a checkpoint, mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from dynamicemb import _engine
from dynamicemb.checkpoint.chain import CHAIN, ChainLink, kind_of, read_chain
from dynamicemb.checkpoint.mapped import Layer, find_index, not_read, write_index
from dynamicemb.checkpoint.reader import CheckpointReader, NoCheckpointError
from dynamicemb.checkpoint.replaced import tried_again, was_replaced
from dynamicemb.errors import (
    CheckpointError,
    CorruptCheckpointError,
    UsageError,
    check_number,
    check_path,
    wrong_type,
    wrong_value,
)
from dynamicemb.table.engine import threads

COUNTED_AT_ONCE = 2**14


class ServingTable:
    """The rows of one table of a checkpoint, for lookups only.

    The files are mapped, not read: opening takes as long for a large table as for a small one,
    processes that open the same checkpoint share its pages, and neither optimizer state nor scores
    come into memory. Lookups from several threads are safe; so is :meth:`apply_delta` beside them.
    Pickling (for worker processes) opens the files again, of the checkpoint that is there then.
    A new dump into the folder leaves an open table as it was; a table that is being opened reads
    the old checkpoint or the new one. Overwriting files in place is not safe.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        table_name: str | None = None,
        *,
        collection: str | None = None,
        rank: int | None = None,
        missing: float = 0.0,
        verify: bool = False,
        preload: bool = False,
    ) -> None:
        """Open a table.

        Args:
            path: a checkpoint's folder, or that of a chain of :func:`dump_delta`, of which all
                deltas are applied.
            table_name, collection: which table; needed where there are several.
            rank: of a table that is not spread over ranks, whose copy.
            missing: what an id without a row reads.
            verify: compare all checksums first. This reads every byte.
            preload: ask the system to read the files in the background.

        Lookups are fastest with an index (``DynamicEmbDump(serving_index=True)`` writes one, and
        :func:`build_serving_index` adds one); else they look through the bucket of an id. A
        checkpoint without either (of a table with a store, or from another library) works too, but
        its index is made in this process's memory while opening.
        """
        self._settings: dict[str, Any] = {
            "collection": collection,
            "rank": rank,
            "missing": check_number("missing", missing),
            "verify": verify,
            "preload": preload,
        }
        self._path = check_path("path", path)
        tried_again(lambda: self._open(table_name))

    def _open(self, table_name: str | None) -> None:
        kind = kind_of(self._path)
        try:
            links = read_chain(self._path) if kind == CHAIN else []
            reader = self._open_base(links)
        except NoCheckpointError as error:
            if kind or kind_of(self._path):  # it was there a moment ago, or is there now
                raise was_replaced(self._path) from error
            raise
        with reader:
            if reader.manifest.extra.get("delta") is not None:
                raise CheckpointError(
                    f"{self._path!r} is a delta; allowed: a checkpoint, or the folder of the chain"
                )
            self._begin(reader, *_find_table(reader, table_name, self._settings["collection"]))
        if links:
            self._apply(links)

    def _open_base(self, links: Sequence[ChainLink]) -> CheckpointReader:
        if links:
            return CheckpointReader.open_known(links[0].path, links[0].id)
        return CheckpointReader.open(self._path)

    def _begin(self, reader: CheckpointReader, collection: str, name: str) -> None:
        """Map the base."""
        self._collection, self._name = collection, name
        layer = Layer(reader, collection, name, self._settings)
        self._counted = (1, sum(n for _, n in layer.ids))  # layers, their rows
        self._set_layers((layer,), sequence=0)
        self._base_id = layer.checkpoint

    def _set_layers(self, layers: tuple[Layer, ...], sequence: int) -> None:
        """Lookups that run meanwhile finish with the layers they began with."""
        entry = self._entry = layers[0].entry
        self._found_in = (self._mapped(layers), layers)
        self._checkpoint_id = layers[-1].checkpoint
        self._sequence = sequence
        fill = self._settings["missing"]
        self._missing = torch.full((entry.dim,), fill, dtype=entry.value_dtype, device="cpu")

    def _mapped(self, layers: Sequence[Layer]) -> _engine.MappedTable:
        return _engine.MappedTable(
            row_bytes=self._entry.dim * self._entry.value_dtype.itemsize,
            layers=[layer.mapped for layer in reversed(layers)],
        )

    def _layers(self) -> tuple[Layer, ...]:
        layers = self._found_in[1]
        if not layers:
            raise UsageError(f"serving table {self._name!r} is closed")
        return layers

    # ---- what it is ----

    @property
    def name(self) -> str:
        """The table's name."""
        return self._name

    @property
    def dim(self) -> int:
        """Columns of a row."""
        return self._entry.dim

    @property
    def dtype(self) -> torch.dtype:
        """Of the table, and of what lookups return."""
        return self._entry.dtype

    @property
    def checkpoint_id(self) -> str:
        """The id of the checkpoint, or of the last delta that was applied."""
        return self._checkpoint_id

    @property
    def sequence(self) -> int:
        """How many deltas were applied."""
        return self._sequence

    @property
    def collection(self) -> str:
        """The path of the collection that the table is of."""
        return self._collection

    def __len__(self) -> int:
        """Rows. The first call after a delta looks up the ids that are in it."""
        layers = self._layers()
        number, rows = self._counted
        for at in range(number, len(layers)):
            rows += self._added(layers[:at], layers[at])
        self._counted = (len(layers), rows)
        return rows

    def _added(self, before: tuple[Layer, ...], delta: Layer) -> int:
        """Rows more, or fewer, through a delta."""
        mapped = self._mapped(before)
        found = torch.empty(COUNTED_AT_ONCE, dtype=torch.bool, device="cpu")
        rows = torch.empty(COUNTED_AT_ONCE, self.dim, dtype=self._entry.value_dtype, device="cpu")

        def known(address: int, n: int) -> int:
            count = 0
            for begin in range(0, n, COUNTED_AT_ONCE):
                size = min(n - begin, COUNTED_AT_ONCE)
                self._find(mapped, address + 8 * begin, size, found, rows)
                count += int(found[:size].sum())
            return count

        return sum(n - known(address, n) for address, n in delta.ids) - sum(
            known(address, n) for address, n in delta.removed
        )

    def __repr__(self) -> str:
        return (
            f"ServingTable({self._path!r}, {self.name!r}, dim={self.dim}, sequence={self.sequence})"
        )

    # ---- lookups ----

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(found bool, embeddings [..., dim]) of ids of any shape, int64 or uint64 on the CPU."""
        flat = _contiguous(ids)
        mapped, layers = self._found_in
        if not layers:
            raise UsageError(f"serving table {self._name!r} is closed")
        found = torch.empty(ids.shape, dtype=torch.bool, device="cpu")
        rows = torch.empty((*ids.shape, self.dim), dtype=self._entry.value_dtype, device="cpu")
        self._find(mapped, flat.data_ptr(), flat.numel(), found, rows)
        return found, rows.to(self.dtype)

    def find_into(self, ids: torch.Tensor, found: torch.Tensor, rows: torch.Tensor) -> None:
        """:meth:`find` of ids [n] that writes into ``found``, bool [n], and ``rows``, [n, dim] of
        any float type, both contiguous on the CPU: for callers that use memory again."""
        n = len(ids)
        for name, tensor, shape in (("found", found, (n,)), ("rows", rows, (n, self.dim))):
            if tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise wrong_value(name, tuple(tensor.shape), f"{shape}, contiguous, on the CPU")
        mapped, layers = self._found_in
        if layers and (found.dtype, rows.dtype) == (torch.bool, self._entry.value_dtype):
            self._find(mapped, _contiguous(ids).data_ptr(), n, found, rows)
        else:
            present, values = self.find(ids)
            found.copy_(present)
            rows.copy_(values)

    def _find(
        self,
        mapped: _engine.MappedTable,
        ids: int,
        n: int,
        found: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        missing = self._missing.data_ptr()
        mapped.find(ids, n, threads(), missing, found.data_ptr(), rows.data_ptr())

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., dim] of ids of any shape; ids without a row read ``missing``."""
        return self.find(ids)[1]

    # ---- changes ----

    def apply_delta(self, path: str | os.PathLike[str]) -> int:
        """Apply the deltas of the chain in the folder ``path`` that are newer than this table;
        returns how many. Their files are mapped like the base's. Lookups see all of them or none.

        Raises ``CorruptCheckpointError`` or ``CheckpointError``, with the table as it was, if the
        chain is not this table's, or one is missing, doubled, reordered or corrupt.
        """
        path = check_path("path", path)
        return tried_again(lambda: self._apply(read_chain(path)))

    def advanced(self, links: Sequence[ChainLink]) -> ServingTable:
        """A table that stands at the end of the chain ``links`` and shares the files of this one,
        which stays as it is. Raises as :meth:`apply_delta` does."""
        advanced = object.__new__(type(self))
        advanced.__dict__.update(self.__dict__)
        advanced._apply(links)
        return advanced

    def _apply(self, links: Sequence[ChainLink]) -> int:
        if links[0].id != self._base_id:
            raise CheckpointError(
                f"the chain begins with checkpoint {links[0].id}; allowed: {self._base_id}, on "
                f"which serving table {self._name!r} stands"
            )
        if len(links) <= self._sequence or links[self._sequence].id != self.checkpoint_id:
            raise CheckpointError(
                f"the chain has no delta {self._sequence} of id {self.checkpoint_id}, the last "
                f"that serving table {self._name!r} applied"
            )
        before = self._layers()
        fresh = []
        for link in links[self._sequence + 1 :]:
            layer = self._layer(link)
            if (layer.entry.dim, layer.entry.value_dtype) != (
                self.dim,
                self._entry.value_dtype,
            ):
                raise CorruptCheckpointError(f"{link.path} has rows of another width or type")
            fresh.append(layer)
        if fresh:
            self._set_layers((*before, *fresh), self._sequence + len(fresh))
        return len(fresh)

    def _layer(self, link: ChainLink) -> Layer:
        with CheckpointReader.open_known(link.path, link.id) as reader:
            return Layer(reader, self._collection, self._name, self._settings)

    def close(self) -> None:
        """Let the files go; lookups raise from now on."""
        self._found_in = (self._found_in[0], ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._settings | {"collection": self._collection, "verify": False}
        return _reopen, (self._path, self._name, settings)


def _contiguous(ids: torch.Tensor) -> torch.Tensor:
    """``ids``, checked."""
    if not isinstance(ids, torch.Tensor):
        raise wrong_type("ids", ids, "a tensor of int64 or uint64")
    if ids.dtype not in (torch.int64, torch.uint64):
        raise wrong_type("ids.dtype", ids.dtype, "torch.int64 or torch.uint64")
    if ids.device.type != "cpu":
        raise wrong_value("ids.device", str(ids.device), "'cpu'")
    return ids.contiguous()


def _reopen(path: str, name: str, settings: dict[str, Any]) -> ServingTable:
    return ServingTable(path, name, **settings)


def open_tables(path: str, identity: str, settings: Mapping[str, Any]) -> dict[str, ServingTable]:
    """All tables of the checkpoint ``identity`` in the folder ``path``, by ``COLLECTION.TABLE``.
    ``settings``: those of :class:`ServingTable`. Another checkpoint there is a
    ``ReplacedCheckpointError``."""
    tables = {}
    with CheckpointReader.open_known(path, identity) as reader:
        reader.hold(
            skip=not_read(settings)
        )  # of all tables, before the first one is verified, which may take long
        for collection, name in reader.all_tables():
            table = object.__new__(ServingTable)
            table._settings = {**settings, "collection": collection}
            table._path = path
            table._begin(reader, collection, name)
            tables[f"{collection}.{name}"] = table
    return tables


def build_serving_index(path: str | os.PathLike[str]) -> int:
    """Write the indexes that the tables of a checkpoint do not have yet, beside their files;
    returns how many. Needs about 20 bytes per row of a shard. The next dump to the folder removes
    them with the other files. A dump that is running is a ``CheckpointError``: it would remove the
    indexes at once."""
    path = check_path("path", path)

    def write_all() -> int:
        written = 0
        with CheckpointReader.open(path) as reader, reader.sound("indexing"):
            for collection, name in reader.all_tables():
                table = reader.table(collection, name)
                for shard in table.shards:
                    index = find_index(reader, collection, table, shard)
                    if index is not None:
                        index.close()
                        continue
                    write_index(reader, collection, table, shard)
                    written += 1
        return written

    return tried_again(write_all)


def _find_table(
    reader: CheckpointReader, name: str | None, collection: str | None
) -> tuple[str, str]:
    matching = [
        (path, table)
        for path, table in reader.all_tables()
        if (name is None or table == name)
        and (collection is None or collection in (path, path.rpartition(".")[2]))
    ]
    if len(matching) != 1:
        every = ", ".join(f"{table!r} of {path!r}" for path, table in reader.all_tables())
        raise wrong_value(
            "(table_name, collection)", (name, collection), f"what names one table of {every}"
        )
    return matching[0]
