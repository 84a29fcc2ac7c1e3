"""Native plug-ins: shared libraries that store rows, behind the C interface of
``include/dynamicemb/tde_io.h``."""

from __future__ import annotations

import os
import threading
import warnings

import torch

from dynamicemb.errors import InvalidArgumentError, StoreError, wrong_type
from dynamicemb.table.engine import _engine
from dynamicemb.tiers.remote.rows import RemoteRows, RowFormat, first_of_each
from dynamicemb.tiers.remote.url import REDIS_SCHEMES, PluginUrl

#: Seconds after which a call that the plug-in does not answer is given up.
timeout_s: float = 300.0

#: Rows of one call.
_CHUNK_ROWS = 65536

_lock = threading.Lock()
_plugins: dict[str, _engine.Plugin] = {}


def registered_plugins() -> dict[str, str]:
    """The plug-ins that are registered: IO_type -> path."""
    with _lock:
        return {name: plugin.path for name, plugin in _plugins.items()}


def register_io(path: str | os.PathLike[str]) -> None:
    """Load the plug-in at ``path``; URLs ``IO_type://text`` are then its. Runs the library's code.

    A second plug-in of the same IO_type (or one of "memory", "redis", ...) is ignored with a
    warning. Raises InvalidArgumentError for a file that is not a plug-in.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("path", path, "the path of a shared library")
    full = os.path.abspath(os.fspath(path))  # never a search through the system's folders
    if not os.path.isfile(full):
        raise InvalidArgumentError(f"path is {full!r}: no such file; allowed: a shared library")
    try:
        plugin = _engine.Plugin(full)
        name = plugin.type.decode("ascii")
    except _engine.PluginError as error:
        raise InvalidArgumentError(
            f"{full!r} is not a plug-in: {error}; see include/dynamicemb/tde_io.h"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{full!r} is not a plug-in: its IO_type is not ASCII") from None
    with _lock:
        known = _plugins.get(name)
        if known is None and name != "memory" and name not in REDIS_SCHEMES:
            _plugins[name] = plugin
            return
    if known is None or known.path != full:
        holder = "is built in" if known is None else f"is the plug-in {known.path!r}"
        warnings.warn(
            f"the plug-in {full!r} is ignored: {name}:// {holder}", RuntimeWarning, stacklevel=2
        )


class PluginRows(RemoteRows):
    """Rows behind a plug-in. It can neither erase nor list them."""

    def __init__(self, url: PluginUrl, table: str, row_format: RowFormat) -> None:
        super().__init__(table, row_format)
        with _lock:
            plugin = _plugins[url.scheme]
        self._type = url.scheme
        self._sizes = [part.nbytes for part in row_format.parts]
        if "\0" in table:
            raise InvalidArgumentError(f"table is {table!r}; allowed: a name without NUL")
        self._table_bytes = table.encode()
        try:
            self._store: _engine.PluginStore | None = _engine.PluginStore(
                plugin, url.config.encode()
            )
        except _engine.PluginError as error:
            raise self._error(error) from None

    def __repr__(self) -> str:
        return f"plug-in {self._type}:// table {self.table!r}"

    def _error(self, error: Exception) -> StoreError:
        return StoreError(None, f"{self!r}: {error}")

    @property
    def _open(self) -> _engine.PluginStore:
        if self._store is None:
            raise StoreError(None, f"{self!r} is closed")
        return self._store

    def pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._checked(ids)
        found = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
        rows = torch.zeros(len(ids), self.format.nbytes, dtype=torch.uint8, device="cpu")
        for at in range(0, len(ids), _CHUNK_ROWS):
            part = slice(at, at + _CHUNK_ROWS)
            try:
                self._open.pull(
                    self._table_bytes,
                    ids[part].data_ptr(),
                    len(ids[part]),
                    self._sizes,
                    int(timeout_s * 1000),
                    found[part].data_ptr(),
                    rows[part].data_ptr(),
                )
            except _engine.PluginError as error:
                raise self._error(error) from None
        return found, rows

    def push(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        ids = self._checked(ids, rows)
        last = first_of_each(ids.flip(0)).flip(0)  # a plug-in may write in any order
        if not bool(last.all()):
            ids, rows = ids[last], rows[last]
        rows = rows.contiguous()
        for at in range(0, len(ids), _CHUNK_ROWS):
            part = slice(at, at + _CHUNK_ROWS)
            try:
                self._open.push(
                    self._table_bytes,
                    ids[part].data_ptr(),
                    len(ids[part]),
                    self._sizes,
                    int(timeout_s * 1000),
                    rows[part].data_ptr(),
                )
            except _engine.PluginError as error:
                raise self._error(error) from None

    def close(self) -> None:
        """Finalize the plug-in's store."""
        self._store = None
