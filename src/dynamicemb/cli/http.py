"""A small HTTP/1.1 server: one thread per connection, keep-alive, bounded requests.

The standard library's own takes about 0.2 ms to parse a request; a lookup takes less.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any, Protocol

from dynamicemb.errors import UsageError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TEXT, JSON, BYTES = "text/plain; charset=utf-8", "application/json", "application/octet-stream"
MAX_LINE = 16 * 1024
MAX_HEADERS = 100
#: Bytes and seconds that are spent on what a refused client still sends, so that it can read why.
DRAINED_BYTES, DRAINED_SECONDS = 64 * 2**20, 2.0
_JOINED = 64 * 1024
Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Request:
    """``path`` is as it was sent, without the query. Names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytearray


@dataclass(slots=True)
class Response:
    """chunks: the body, in views of bytes. route: what the request was for, in the metrics."""

    chunks: Sequence[Chunk] = ()
    type: str = TEXT
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    route: str = "other"


class Refused(Exception):
    """A request that is not answered as it wished; the message says why."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.headers = status, dict(headers or {})

    def response(self, route: str = "other") -> Response:
        return json_response({"error": str(self)}, self.status, self.headers, route)


class JsonText(str):
    """A part of an answer that is JSON already."""


def json_object(members: Mapping[str, Any]) -> JsonText:
    """An object; members that are :class:`JsonText` stay as they are."""
    texts = (
        f"{json.dumps(name)}: "
        f"{one if isinstance(one, JsonText) else json.dumps(one, allow_nan=False)}"
        for name, one in members.items()
    )
    return JsonText("{" + ", ".join(texts) + "}")


def json_response(
    members: Mapping[str, Any],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    route: str = "other",
) -> Response:
    """An object as JSON, with a line's end for those who read it in a terminal."""
    body = json_object(members).encode() + b"\n"
    return Response((body,), JSON, status, dict(headers or {}), route)


class Site(Protocol):
    """What a server answers."""

    #: Bytes of a request's body at most.
    max_body: int

    def respond(self, request: Request) -> Response:
        """The answer; may raise :class:`Refused`."""

    def done(self, response: Response, seconds: float) -> None:
        """Called before an answer is sent, with the time since its request began to be read."""


@functools.lru_cache(maxsize=2)
def _date(seconds: int) -> str:
    return email.utils.formatdate(seconds, usegmt=True)


class _Connection:
    """One client."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.stream: BufferedReader = connection.makefile("rb")
        self.busy = False  # with a request whose first line was read
        self.thread: threading.Thread | None = None

    def send(self, response: Response, *, close: bool, with_body: bool = True) -> None:
        size = sum(map(len, response.chunks))
        lines = [
            f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}",
            f"Content-Type: {response.type}",
            f"Content-Length: {size}",
            f"Date: {_date(int(time.time()))}",
            *(f"{name}: {value}" for name, value in response.headers.items()),
        ]
        if close:
            lines.append("Connection: close")
        head = "\r\n".join((*lines, "", "")).encode("latin-1")
        chunks = response.chunks if with_body else ()
        if size <= _JOINED:
            self.socket.sendall(b"".join((head, *chunks)))
            return
        self.socket.sendall(head, getattr(socket, "MSG_MORE", 0))
        for one in chunks:
            self.socket.sendall(one)

    def drain(self) -> None:
        """Closing with bytes unread would take the answer away from a client that still sends."""
        end = time.monotonic() + DRAINED_SECONDS
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(DRAINED_SECONDS)
            left = DRAINED_BYTES
            while left > 0 and time.monotonic() < end:
                some = len(self.socket.recv(2**16))
                if some == 0:
                    return
                left -= some

    def end_of_requests(self) -> None:
        """What has arrived can still be read, then the stream ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()
            self.socket.close()


class HttpServer:
    """Listens from the start; answers after :meth:`start`.

    Args:
        site: what it answers.
        host, port: where; port 0 is a free one. ``url`` says which.
        idle_seconds: a connection that sends nothing for so long is closed.
        max_connections: more of them are answered 503.
    """

    def __init__(
        self,
        site: Site,
        host: str = LOOPBACK,
        port: int = 0,
        *,
        idle_seconds: float = 60.0,
        max_connections: int = 256,
    ) -> None:
        self._site = site
        self._idle_seconds, self._max_connections = idle_seconds, max_connections
        try:
            family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=256)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"port {port} of {host} cannot be used: {reason}") from error
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._accepting = threading.Thread(target=self._accept, name="dynamicemb-http", daemon=True)

    @property
    def host(self) -> str:
        """The address that it listens at."""
        return str(self._listener.getsockname()[0])

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def connections(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        self._accepting.start()

    def stop(self, grace_seconds: float = 10.0) -> bool:
        """Take no more requests, answer those that were begun, and end. False if some were not
        done in time."""
        with self._lock:
            self._stopping = True
            waiting = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._accepting.is_alive():
            self._accepting.join()
        for one in waiting:
            if not one.busy:
                one.end_of_requests()
        end = time.monotonic() + grace_seconds
        for one in waiting:
            if one.thread is not None:
                one.thread.join(max(0.0, end - time.monotonic()))
        late = sum(one.thread is not None and one.thread.is_alive() for one in waiting)
        if late:
            logger.warning("%d requests were not done in %g s", late, grace_seconds)
        return not late

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                if self._stopping:
                    return
                time.sleep(0.1)  # out of file descriptors: some will be closed
                continue
            accepted.settimeout(self._idle_seconds)
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(accepted)
            with self._lock:
                full = len(self._connections) >= self._max_connections
                if not full and not self._stopping:
                    connection.thread = threading.Thread(
                        target=self._serve, args=(connection,), name="dynamicemb-http", daemon=True
                    )
                    self._connections.add(connection)
            if connection.thread is not None:
                connection.thread.start()
                continue
            refused = Refused(503, "too many connections", {"Retry-After": "1"}).response()
            self._site.done(refused, 0.0)
            with contextlib.suppress(OSError):
                connection.send(refused, close=True)
            connection.close()

    def _serve(self, connection: _Connection) -> None:
        try:
            while self._answer(connection):
                pass
        except (OSError, EOFError):
            pass  # the client went away, or sent nothing for too long
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: _Connection) -> bool:
        """One request; False if it was the last."""
        connection.busy = False
        if self._stopping:  # stop() may have looked while it was busy
            connection.end_of_requests()
        line = connection.stream.readline(MAX_LINE + 1)
        if line in (b"\r\n", b"\n"):  # allowed between requests
            line = connection.stream.readline(MAX_LINE + 1)
        if not line:
            return False
        connection.busy = True
        begin = time.perf_counter()
        request = None
        try:
            request, close = self._read(connection, line)
            response = self._respond(request)
        except _Unreadable as refused:
            response, close = refused.response(), True
        close = close or self._stopping
        self._site.done(response, time.perf_counter() - begin)
        with_body = request is None or request.method != "HEAD"
        connection.send(response, close=close, with_body=with_body)
        if request is None:
            connection.drain()
        return not close

    def _respond(self, request: Request) -> Response:
        try:
            return self._site.respond(request)
        except Refused as refused:
            return refused.response()
        except Exception:
            logger.exception("a request failed")
            return Refused(500, "an error of the server; its log says more").response()

    def _read(self, connection: _Connection, line: bytes) -> tuple[Request, bool]:
        """The request that begins with ``line``, and whether the client wants no other."""
        method, target, version = _request_line(line)
        headers = _headers(connection.stream)
        wish = headers.get("connection", "").lower()
        close = "close" in wish or (version == "HTTP/1.0" and "keep-alive" not in wish)
        if "transfer-encoding" in headers:
            raise _Unreadable(411, "Transfer-Encoding is not supported; send a Content-Length")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise _Unreadable(400, f"Content-Length is {length!r}; allowed: a number")
        if int(length) > self._site.max_body:
            raise _Unreadable(
                413, f"the body has {length} bytes; allowed: at most {self._site.max_body}"
            )
        if headers.get("expect", "").lower() == "100-continue":
            connection.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray(int(length))
        filled = 0
        with memoryview(body) as rest:
            while filled < len(body):
                some = connection.stream.readinto(rest[filled:])
                if not some:
                    raise EOFError
                filled += some
        path, _, query = target.partition("?")
        return Request(method, path, query, headers, body), close


class _Unreadable(Refused):
    """A request after which the stream cannot be used: nobody knows where the next one begins."""


def _request_line(line: bytes) -> tuple[str, str, str]:
    if not line.endswith(b"\n"):
        if len(line) > MAX_LINE:
            raise _Unreadable(414, f"the address is too long; allowed: {MAX_LINE} bytes")
        raise EOFError
    parts = line.decode("latin-1").split()
    if len(parts) != 3 or not parts[2].startswith("HTTP/"):
        raise _Unreadable(400, "this is no HTTP request")
    if parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise _Unreadable(505, f"{parts[2]} is not spoken here; allowed: HTTP/1.1, HTTP/1.0")
    return parts[0], parts[1], parts[2]


def _headers(stream: BufferedReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = stream.readline(MAX_LINE + 1)
        if line in (b"\r\n", b"\n"):
            return headers
        if not line.endswith(b"\n"):
            if len(line) > MAX_LINE:
                raise _Unreadable(431, f"a header is too long; allowed: {MAX_LINE} bytes")
            raise EOFError
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name or name != name.strip():
            raise _Unreadable(400, f"{name.strip()[:100]!r} is no header")
        key, value = name.lower(), value.strip()
        if key == "content-length" and headers.get(key, value) != value:
            raise _Unreadable(400, "two different Content-Length")
        headers[key] = value
    raise _Unreadable(431, f"too many headers; allowed: {MAX_HEADERS}")


@contextlib.contextmanager
def serving(server: HttpServer, grace_seconds: float = 10.0) -> Iterator[str]:
    """Answer until the block ends; yields the server's address."""
    server.start()
    try:
        yield server.url
    finally:
        server.stop(grace_seconds)
