"""A table at a ``dynamicemb serve``, and the bytes that lookups there are made of.

A request is ids, int64, little-endian, 8 bytes each. The answer is one row per id, ``dim``
float32, little-endian, in the order of the ids, and then a bit per id, whether it has a row: bit
``i % 8`` of byte ``i // 8``, counted from the lowest; unused bits of the last byte are 0.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from urllib.parse import quote, urlsplit

import numpy as np
import torch

from dynamicemb.errors import StoreError, wrong_type, wrong_value

BYTES = "application/octet-stream"
TIMEOUT_SECONDS = 30.0
MAX_LINE = 16 * 1024
_PIECE = 1 << 20  # bytes of an answer that memory is taken for ahead


def pack_rows(found: torch.Tensor, rows: torch.Tensor) -> tuple[memoryview, memoryview]:
    """bool [n] and float [n, dim] as the bytes of an answer: rows, and bits."""
    numbers = np.ascontiguousarray(rows.float().numpy(), dtype="<f4")
    bits = np.packbits(found.numpy(), bitorder="little")
    return numbers.reshape(-1).view(np.uint8).data, bits.data


def unpack_rows(body: bytearray, n: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(found bool [n], rows float32 [n, dim]) of an answer, in its memory; ``ValueError`` if it has
    another size."""
    size = n * dim * 4
    if len(body) != size + (n + 7) // 8:
        raise ValueError(f"{len(body)} bytes for {n} rows of {dim} numbers")
    rows = np.frombuffer(body, "<f4", n * dim).astype(np.float32, copy=False).reshape(n, dim)
    bits = np.frombuffer(body, np.uint8, offset=size)
    found = np.unpackbits(bits, count=n, bitorder="little").astype(bool)
    return torch.from_numpy(found), torch.from_numpy(rows)


def pack_ids(ids: torch.Tensor) -> bytes:
    """int64 or uint64 of any shape as the bytes of a request."""
    return ids.contiguous().view(torch.int64).numpy().astype("<i8", copy=False).tobytes()


def unpack_ids(body: bytearray) -> torch.Tensor:
    """int64 [n] of a request, whose size is a multiple of 8. Uses its memory."""
    ids = np.frombuffer(body, "<i8")
    return torch.from_numpy(ids if sys.byteorder == "little" else ids.astype(np.int64))


class HttpTable:
    """A table of a ``dynamicemb serve``, for lookups only.

    ``table(ids)``: ids of any shape, int64 or uint64 on the CPU, to embeddings [..., dim], float32;
    ids without a row read what the server was told, 0.0 if nothing. For any number of threads, each
    of which keeps a connection open. What goes wrong is a ``StoreError``.

    Args:
        url: of the server, ``http://HOST:PORT``.
        name: ``COLLECTION.TABLE``, or ``TABLE`` if it is the only one of that name.
        timeout: seconds that one exchange may take.
    """

    def __init__(self, url: str, name: str, *, timeout: float = TIMEOUT_SECONDS) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise wrong_value("url", url, "http://HOST:PORT")
        self.url, self.name = url.rstrip("/"), name
        self._place, self._host = (
            (parts.hostname, parts.port or 80),
            parts.netloc.rpartition("@")[2],
        )
        self._timeout = timeout
        self._path = f"/v1/tables/{quote(name, safe='')}"
        self._threads = threading.local()
        about = json.loads(self._exchange("GET", self._path, None)[0])
        self.dim: int = about["dim"]

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(found bool [...], embeddings float32 [..., dim])."""
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.uint64):
            raise wrong_type("ids", getattr(ids, "dtype", ids), "a tensor of int64 or uint64")
        body, headers = self._exchange("POST", self._path + "/lookup", pack_ids(ids.cpu()))
        dim = int(headers["x-dim"])
        try:
            found, rows = unpack_rows(body, ids.numel(), dim)
        except ValueError as error:
            raise StoreError(None, f"{self.url} answered {error}") from error
        return found.view(ids.shape), rows.view(*ids.shape, dim)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.find(ids)[1]

    def __repr__(self) -> str:
        return f"HttpTable({self.url!r}, {self.name!r}, dim={self.dim})"

    def _exchange(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[bytearray, dict[str, str]]:
        """The body and the headers of the answer. A connection that the server closed in between
        is opened again, once."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}"]
        if body is not None:
            lines += [f"Content-Type: {BYTES}", f"Content-Length: {len(body)}"]
        request = "\r\n".join((*lines, "", "")).encode("ascii") + (body or b"")
        for last in (False, True):
            used: _Connection | None = getattr(self._threads, "connection", None)
            try:
                connection = used or _Connection(self._place, self._timeout)
                self._threads.connection = connection
                status, headers, content = connection.exchange(request)
            except (OSError, ValueError) as error:
                self._threads.connection = None
                if used is None or last:
                    raise StoreError(
                        getattr(error, "errno", None), f"{self.url} does not answer: {error}"
                    ) from error
                continue
            if headers.get("connection") == "close":
                self._threads.connection = None
            if status != 200:
                raise StoreError(None, f"{self.url} answered {status}: {_reason(content)}")
            return content, headers
        raise AssertionError("the second try returns or raises")


class _Connection:
    """One connection to a server. The standard library's takes 0.2 ms more for an exchange, which
    is as long as the lookup of a thousand ids."""

    def __init__(self, place: tuple[str, int], timeout: float) -> None:
        self._socket = socket.create_connection(place, timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")

    def exchange(self, request: bytes) -> tuple[int, dict[str, str], bytearray]:
        """Status, headers (names in lower case) and body of the answer. Raises ``OSError``, or
        ``ValueError`` for what is no answer."""
        self._socket.sendall(request)
        first = self._line().split(None, 2)
        if len(first) < 2 or not first[0].startswith(b"HTTP/1."):
            raise ValueError(f"it sent {first[:2]}, which is no HTTP")
        headers = {}
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", "-1"))
        content = bytearray(min(length, _PIECE))
        filled = 0
        while filled < length:
            if filled == len(content):  # memory for what has come, not for what is announced
                content.extend(bytes(min(filled, length - filled)))
            with memoryview(content) as rest:
                filled += self._some(self._stream.readinto(rest[filled:]))
        return int(first[1]), headers, content

    def _line(self) -> bytes:
        line = self._stream.readline(MAX_LINE)
        self._some(len(line))
        return line.rstrip(b"\r\n")

    @staticmethod
    def _some(number: int) -> int:
        if number == 0:
            raise ConnectionResetError("it closed the connection")
        return number


def _reason(content: bytearray) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")
