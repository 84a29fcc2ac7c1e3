"""A small HTTP/1.1 server: one thread per connection, keep-alive, bounded requests.

The standard library's own takes about 0.2 ms to parse a request; a lookup takes less. Memory is
taken for bytes that have come, not for those that are announced.
"""

from __future__ import annotations

import _thread
import contextlib
import email.utils
import functools
import http
import ipaddress
import itertools
import json
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any, Protocol

from dynamicemb.errors import UsageError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TEXT, JSON, BYTES = "text/plain; charset=utf-8", "application/json", "application/octet-stream"
MAX_LINE = 16 * 1024
MAX_HEADERS = 100
MAX_HEAD = 64 * 1024
#: Bytes of a body that are read at a time.
PIECE = 256 * 1024
#: Connections beyond the allowed number, for ``vital`` pages, and the seconds that one may take.
SPARE, SPARE_SECONDS = 64, 0.5
#: Bytes and seconds that are spent on what a refused client still sends, so that it can read why.
DRAINED_BYTES, DRAINED_SECONDS = 64 * 2**20, 2.0
_JOINED = 64 * 1024
_FULL = 503, "too many connections", {"Retry-After": "1"}
Chunk = bytes | bytearray | memoryview


class Lease:
    """Memory that a request may use until it is answered; this one has no bound."""

    def keep(self, size: int) -> None:
        """Give back what is more than ``size`` bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    """``path`` is as it was sent, without the query. Names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytearray
    version: str = "HTTP/1.1"
    lease: Lease = field(default_factory=Lease)


@dataclass(slots=True)
class Response:
    """An answer.

    chunks: the body, in views of bytes. rest: more of the body, computed while it is sent, in
    chunks that are not empty; each is sent before the next one is asked for. size: the bytes of
    both, if known; an answer with a rest of unknown size is sent in HTTP's chunks. route: what the
    request was for, in the metrics.
    """

    chunks: Sequence[Chunk] = ()
    type: str = TEXT
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    route: str = "other"
    rest: Iterator[Chunk] | None = None
    size: int | None = None

    @property
    def length(self) -> int | None:
        """Bytes of the body, if known."""
        return sum(map(len, self.chunks)) if self.rest is None else self.size


class Refused(Exception):
    """A request that is not answered as it wished; the message says why."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.headers = status, dict(headers or {})

    def response(self) -> Response:
        return json_response({"error": str(self)}, self.status, self.headers)


def json_response(
    members: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An object as JSON, with a line's end for those who read it in a terminal."""
    body = json.dumps(members, allow_nan=False).encode() + b"\n"
    return Response((body,), JSON, status, dict(headers or {}))


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
        self.spare = False  # for one request, of a vital page
        self.lease = Lease()  # of the request that is read or answered
        self.ended = threading.Event()

    def send(
        self, response: Response, *, close: bool, with_body: bool = True, framed: bool = True
    ) -> None:
        """Each chunk has to be taken within the timeout of the socket. ``framed``: the client knows
        HTTP's chunks; one that does not reads an answer of unknown size to the connection's end."""
        size = response.length
        framed = framed and size is None
        lines = [
            f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}",
            f"Content-Type: {response.type}",
            f"Date: {_date(int(time.time()))}",
            *(f"{name}: {value}" for name, value in response.headers.items()),
        ]
        if size is not None:
            lines.append(f"Content-Length: {size}")
        if framed:
            lines.append("Transfer-Encoding: chunked")
        if close:
            lines.append("Connection: close")
        head = "\r\n".join((*lines, "", "")).encode("latin-1")
        chunks = response.chunks if with_body else ()
        rest = response.rest if with_body else None
        if rest is None and sum(map(len, chunks)) <= _JOINED:
            self.socket.sendall(b"".join((head, *chunks)))
            return
        self.socket.sendall(head, getattr(socket, "MSG_MORE", 0))
        for chunk in itertools.chain(filter(len, chunks), rest or ()):
            if framed:
                chunk = b"".join((b"%x\r\n" % len(chunk), chunk, b"\r\n"))
            self.socket.sendall(chunk)
        if framed:
            self.socket.sendall(b"0\r\n\r\n")

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
        idle_seconds: a connection that sends nothing, or does not take a chunk of its answer, for
            so long is closed.
        max_connections: more of them are answered 503.
        vital: paths that are answered on connections beyond those, too.
        admit: called with the size of a body when its first byte has come; returns the memory for
            the request, which is released after the answer, or raises :class:`Refused`.
        names: that requests may have in ``Host`` beside addresses, ``localhost``, ``host`` and the
            name of this machine; ``*`` is any. Others are answered 421: a web page whose name was
            pointed at this address (DNS rebinding) must not read what is served.
    """

    def __init__(
        self,
        site: Site,
        host: str = LOOPBACK,
        port: int = 0,
        *,
        idle_seconds: float = 60.0,
        max_connections: int = 256,
        vital: Collection[str] = (),
        admit: Callable[[int], Lease] = lambda size: Lease(),
        names: Collection[str] = (),
    ) -> None:
        self._site, self._vital, self._admit = site, frozenset(vital), admit
        self._idle_seconds, self._max_connections = idle_seconds, max_connections
        self._names = {name.lower().rstrip(".") for name in (host, socket.gethostname(), *names)}
        try:
            family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=4096)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"port {port} of {host} cannot be used: {reason}") from error
        self._connections: set[_Connection] = set()
        self._spare: set[_Connection] = set()
        self._spare_left = threading.Semaphore(SPARE)
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
            waiting = [*self._connections, *self._spare]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._accepting.is_alive():
            self._accepting.join()
        for one in waiting:
            if not one.busy:
                one.end_of_requests()
        end = time.monotonic() + grace_seconds
        late = sum(not one.ended.wait(max(0.0, end - time.monotonic())) for one in waiting)
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
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(accepted)
            if self._begin(connection):
                continue
            refused = Refused(*_FULL).response()
            self._site.done(refused, 0.0)
            with contextlib.suppress(OSError):
                connection.send(refused, close=True)
            connection.close()

    def _begin(self, connection: _Connection) -> bool:
        """Serve it in a thread; False if there are too many."""
        connection.spare = len(self._connections) >= self._max_connections
        seconds = SPARE_SECONDS if connection.spare else math.inf
        connection.socket.settimeout(min(seconds, self._idle_seconds))
        if connection.spare and not self._spare_left.acquire(timeout=seconds):
            return False
        with self._lock:
            begun = not self._stopping
            if begun:
                (self._spare if connection.spare else self._connections).add(connection)
        with contextlib.suppress(RuntimeError):  # the system has no more threads
            if begun:  # Thread.start() would wait until the thread runs, and all that come next
                _thread.start_new_thread(self._serve, (connection,))
                return True
        self._end(connection)
        return False

    def _end(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._spare.discard(connection)
        if connection.spare:
            self._spare_left.release()

    def _serve(self, connection: _Connection) -> None:
        try:
            while self._answer(connection):
                pass
        except (OSError, EOFError):
            pass  # the client went away, or neither sent nor took anything for too long
        except Exception:
            logger.exception("an answer broke off")
        finally:
            connection.lease.keep(0)
            self._end(connection)
            connection.close()
            connection.ended.set()

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
        framed = request is None or request.version != "HTTP/1.0"
        close = close or self._stopping or (response.length is None and not framed)
        self._site.done(response, time.perf_counter() - begin)
        with_body = request is None or request.method != "HEAD"
        connection.send(response, close=close, with_body=with_body, framed=framed)
        if request is None and not connection.spare:
            connection.drain()
        connection.lease.keep(0)
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
        self._check_host(headers.get("host"), version)
        wish = headers.get("connection", "").lower()
        close = "close" in wish or (version == "HTTP/1.0" and "keep-alive" not in wish)
        if "transfer-encoding" in headers:
            raise _Unreadable(411, "Transfer-Encoding is not supported; send a Content-Length")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise _Unreadable(400, f"Content-Length is {length!r}; allowed: a number")
        size = int(length)
        path, _, query = target.partition("?")
        if connection.spare:
            close = True
            if size or path not in self._vital:
                raise _Unreadable(*_FULL)
        if size > self._site.max_body:
            raise _Unreadable(
                413, f"the body has {length} bytes; allowed: at most {self._site.max_body}"
            )
        if headers.get("expect", "").lower() == "100-continue":
            connection.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._body(connection, size)
        return Request(method, path, query, headers, body, version, connection.lease), close

    def _body(self, connection: _Connection, size: int) -> bytearray:
        body = bytearray()
        if size == 0:
            return body
        connection.stream.peek(1)  # what is only announced takes no memory
        try:
            connection.lease = self._admit(size)
        except Refused as refused:
            raise _Unreadable(refused.status, str(refused), refused.headers) from None
        while len(body) < size:
            piece = connection.stream.read1(min(size - len(body), PIECE))
            if not piece:
                raise EOFError
            body += piece
        return body

    def _check_host(self, host: str | None, version: str) -> None:
        if host is None:
            if version == "HTTP/1.0":  # no browser
                return
            raise _Unreadable(400, "there is no Host; allowed: HTTP/1.1 with one")
        found = _HOST.fullmatch(host)
        if found is None:
            raise _Unreadable(400, f"Host is {host[:200]!r}; allowed: NAME or NAME:PORT")
        name = (found[1] or found[2]).lower().rstrip(".")
        if not (name in self._names or "*" in self._names or _is_local(name)):
            allowed = "an address, localhost, the machine's name, --allow-host of dynamicemb serve"
            raise _Unreadable(421, f"Host is {host[:200]!r}; allowed: {allowed}")


class _Unreadable(Refused):
    """A request after which the stream cannot be used: nobody knows where the next one begins."""


#: An IPv6 address in brackets, or a name or another address; then perhaps a port.
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::[0-9]*)?")


@functools.lru_cache(maxsize=256)
def _is_local(name: str) -> bool:
    """Whether no name server can point it at somebody else: addresses, and names of loopback."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name == "localhost" or name.endswith(".localhost")


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
    left = MAX_HEAD
    for _ in range(MAX_HEADERS):
        most = min(MAX_LINE, left)
        line = stream.readline(most + 1)
        left -= len(line)
        if line in (b"\r\n", b"\n"):
            return headers
        if len(line) > most:
            allowed = f"{MAX_LINE} bytes, and {MAX_HEAD} of all together"
            raise _Unreadable(431, f"a header is too long; allowed: {allowed}")
        if not line.endswith(b"\n"):
            raise EOFError
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name or name != name.strip():
            raise _Unreadable(400, f"{name.strip()[:100]!r} is no header")
        key, value = name.lower(), value.strip()
        if key == "content-length" and headers.get(key, value) != value:
            raise _Unreadable(400, "two different Content-Length")
        if key == "host" and key in headers:
            raise _Unreadable(400, "there are two Host; allowed: one")
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
