"""Native plug-ins: shared libraries that store rows, behind the C interface of
``include/dynamicemb/tde_io.h``."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch

from dynamicemb.errors import InvalidArgumentError, StoreError, UsageError, check_path
from dynamicemb.table.engine import _engine
from dynamicemb.tiers.remote.rows import RemoteRows, RowFormat, first_of_each
from dynamicemb.tiers.remote.url import SCHEME, PluginUrl, Url, parse_url, split_url

#: Seconds after which a call that the plug-in does not answer is given up.
timeout_s: float = 300.0

#: Rows of one call.
_CHUNK_ROWS = 65536


@dataclass(frozen=True)
class _Registered:
    """A plug-in, and the file that it was loaded from: device, number, time and size."""

    plugin: _engine.Plugin
    file: tuple[int, int, int, int]


_lock = threading.Lock()
_plugins: dict[str, _Registered] = {}
#: Schemes of this library that a store of this process was opened with.
_built_in_use: set[str] = set()


def url_to_open(url: object) -> Url:
    """``url``, parsed, for a store that is opened now. No plug-in of its scheme can be registered
    after that: rows of one URL would be in two places."""
    with _lock:
        parsed = parse_url(url, _plugins)
        if not isinstance(parsed, PluginUrl):
            _built_in_use.add(split_url(url)[0])
        return parsed


def registered_plugins() -> dict[str, str]:
    """The plug-ins that are registered: IO_type -> path."""
    with _lock:
        return {name: known.plugin.path for name, known in _plugins.items()}


def register_io(path: str | os.PathLike[str]) -> None:
    """Load the plug-in at ``path``; URLs ``IO_type://text`` are then its. Runs the library's code.

    A plug-in comes before a store of this library: one of IO_type "memory" takes over
    ``memory://``. Registering the same file again changes nothing. Raises InvalidArgumentError for
    a file that is not a plug-in, for an IO_type that cannot begin a URL, and if another plug-in has
    the IO_type; UsageError if this process has opened a store of this library under that name.
    """
    library = check_path("path", path, "the path of a shared library")
    full = os.path.abspath(library)  # never a search through the system's folders
    if not os.path.isfile(full):
        raise InvalidArgumentError(f"path is {full!r}: no such file; allowed: a shared library")
    about = os.stat(full)
    file = (about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size)
    try:
        plugin = _engine.Plugin(full)
        name = plugin.type.decode("ascii")
    except _engine.PluginError as error:
        raise InvalidArgumentError(
            f"{full!r} is not a plug-in: {error}; see include/dynamicemb/tde_io.h"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{full!r} is not a plug-in: its IO_type is not ASCII") from None
    if not SCHEME.fullmatch(name):
        raise InvalidArgumentError(
            f"the IO_type of {full!r} is {name!r}; allowed: what can begin a URL, a letter and "
            "then at most 63 letters, digits, '+', '-', '.' and '_'"
        )
    with _lock:
        known = _plugins.get(name)
        if known is None:
            if name in _built_in_use:
                raise UsageError(
                    f"{name}:// stores of this library are in use; register {full!r}, which has "
                    "the same IO_type, before the first of them is opened"
                )
            _plugins[name] = _Registered(plugin, file)
            return
    if known.file == file:
        return
    if known.plugin.path == full:
        raise InvalidArgumentError(
            f"{full!r} was replaced after it was registered; a process keeps the plug-in that it "
            "loaded first. Start a new process"
        )
    raise InvalidArgumentError(
        f"the IO_type of {full!r} is {name!r}, which is that of the plug-in "
        f"{known.plugin.path!r}; allowed: one plug-in per IO_type"
    )


class PluginRows(RemoteRows):
    """Rows behind a plug-in. It can neither erase nor list them."""

    def __init__(self, url: PluginUrl, table: str, row_format: RowFormat) -> None:
        super().__init__(table, row_format)
        with _lock:
            plugin = _plugins[url.scheme].plugin
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
