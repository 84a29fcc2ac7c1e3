"""The URLs of remote stores, parsed strictly, with credentials that are shown nowhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from dynamicemb import errors
from dynamicemb.errors import InvalidArgumentError, wrong_type

#: Schemes of Redis, with how its servers are reached.
REDIS_SCHEMES = {
    "redis": "one server",
    "rediss": "one server, TLS",
    "unix": "one server, a unix socket",
    "redis+cluster": "Redis Cluster",
    "rediss+cluster": "Redis Cluster, TLS",
    "redis+sentinel": "a master that Sentinels know",
    "rediss+sentinel": "a master that Sentinels know, TLS",
}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|d)")
_MILLISECONDS = {"ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6, "d": 8.64e7}
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]+))(?::(\d{1,5}))?")
#: What stands before ``://``, at most 64 characters.
SCHEME = re.compile(rf"(?=[\s\S]{{1,64}}\Z){errors.SCHEME}")


def redacted(url: object) -> str:
    """``url`` for messages: whatever stands before an ``@`` is hidden, and the whole text after the
    scheme where the scheme is not one of ours."""
    if not isinstance(url, str):
        return type(url).__name__
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***" if "@" in url else repr(url)
    if scheme != "memory" and scheme not in REDIS_SCHEMES:
        return repr(f"{scheme}://***") if SCHEME.fullmatch(scheme) else "***"
    _, at, visible = rest.rpartition("@")
    return repr(f"{scheme}://{'***@' if at else ''}{visible}")


def split_url(url: object) -> tuple[str, str]:
    """(scheme, what follows ``://``)."""
    if not isinstance(url, str):
        raise wrong_type("url", url, "a string such as 'redis://127.0.0.1:6379/?prefix=model'")
    scheme, separator, rest = url.partition("://")
    if not separator or not SCHEME.fullmatch(scheme):
        raise InvalidArgumentError(
            f"url is {redacted(url)}; allowed: scheme://..., such as "
            "'redis://127.0.0.1:6379/?prefix=model' or 'memory://name'"
        )
    return scheme, rest


@dataclass(frozen=True)
class RedisUrl:
    """The URL of a Redis, parsed.

    scheme: of :data:`REDIS_SCHEMES`. hosts: (name, port), several for a cluster or Sentinels; empty
    for a socket. path: of the socket. service: the name that Sentinels know the master by.
    username, password: empty if there are none; not in ``repr``.
    db: of the server. prefix: of all keys. layout: "packed", one value per row, or "upstream", one
    value per row and optimizer state under torchrec_dynamic_embedding's keys.
    num_threads: connections in use at the same time. chunk_size: keys of one command.
    timeout_ms: of connecting, and of every reply. heartbeat_ms: a connection that was idle for so
    long is checked before it is used. retry_limit: attempts after the first one.
    ttl_ms: rows are forgotten so long after they were written; 0: never.
    ssl: of TLS, under redis-py's names.
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    db: int = 0
    prefix: str = ""
    layout: str = "packed"
    num_threads: int = 2
    chunk_size: int = 1000
    timeout_ms: int = 10_000
    heartbeat_ms: int = 100_000
    retry_limit: int = 3
    ttl_ms: int = 0
    ssl: tuple[tuple[str, str], ...] = ()

    @property
    def where(self) -> str:
        """The server, for messages."""
        if self.scheme == "unix":
            return f"unix://{self.path}"
        hosts = ",".join(f"{f'[{h}]' if ':' in h else h}:{port}" for h, port in self.hosts)
        return f"{self.scheme}://{hosts}" + (f"/{self.service}" if self.service else "")

    @property
    def tls(self) -> bool:
        return self.scheme.startswith("rediss")

    @property
    def kind(self) -> str:
        """ "cluster", "sentinel" or "single"."""
        _, _, kind = self.scheme.partition("+")
        return kind or "single"


@dataclass(frozen=True)
class MemoryUrl:
    """``memory://name``: rows in this process, shared by all that use the name."""

    name: str


@dataclass(frozen=True)
class PluginUrl:
    """A URL of a native plug-in: its type, and the text that it is given (not in ``repr``)."""

    scheme: str
    config: str = field(repr=False)


Url = RedisUrl | MemoryUrl | PluginUrl


def parse_url(url: object, plugin_types: Mapping[str, Any] | None = None) -> Url:
    """``url``, parsed. ``plugin_types``: schemes of the plug-ins that are registered, which come
    before those of this library.

    Raises InvalidArgumentError, which names no credentials, for an unknown scheme or option, a
    value that is not allowed, and text that is left over.
    """
    scheme, rest = split_url(url)
    if scheme in (plugin_types or {}):
        if "\0" in rest:
            raise InvalidArgumentError(f"url is '{scheme}://***' and has a NUL; allowed: none")
        return PluginUrl(scheme, rest)
    if scheme == "memory":
        return _parse_memory(url, rest)
    if scheme in REDIS_SCHEMES:
        return _RedisParser(url, scheme).parse(rest)
    allowed = ", ".join(["memory", *REDIS_SCHEMES, *sorted(plugin_types or {})])
    raise InvalidArgumentError(
        f"the scheme of url {redacted(url)} is not known; allowed: {allowed}, or the IO_type of a "
        "plug-in after torch.ops.tde.register_io(path)"
    )


def _parse_memory(url: object, rest: str) -> MemoryUrl:
    if not re.fullmatch(r"[A-Za-z0-9_.\-]{0,200}", rest):
        raise InvalidArgumentError(
            f"url is {redacted(url)}; allowed: memory:// and a name of at most 200 letters, "
            "digits, '_', '.' and '-', without options"
        )
    return MemoryUrl(rest)


class _RedisParser:
    """``scheme://[user[:password]@]host[:port][,...][/db or /service][?options]``."""

    def __init__(self, url: object, scheme: str) -> None:
        self.shown = redacted(url)
        self.scheme = scheme

    def fail(self, what: str, allowed: str) -> NoReturn:
        raise InvalidArgumentError(f"{what} in url {self.shown}; allowed: {allowed}") from None

    def decode(self, text: str, what: str) -> str:
        """Percent-decoded text."""
        if re.search(r"%(?![0-9A-Fa-f]{2})", text):
            self.fail(f"{what} has a % that is not %XX", "%25 for a percent sign")
        try:
            return unquote_to_bytes(text).decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", "UTF-8, percent-encoded")

    def parse(self, rest: str) -> RedisUrl:
        authority, path, options = self.split(rest)
        values: dict[str, Any] = {"scheme": self.scheme}
        credentials, at, where = authority.rpartition("@")
        if at:
            values.update(self.credentials(credentials))
        if self.scheme == "unix":
            values["path"] = self.decode(path, "the path of the socket")
            if where or not path.strip("/"):
                self.fail("no path of a socket is", "unix:///path/to/redis.sock")
        else:
            values["hosts"] = self.hosts(where)
            values.update(self.path(path))
        for name, value in self.options(options).items():
            if name in values:
                self.fail(f"{name} is given twice", "once")
            values[name] = value
        return RedisUrl(**values)

    def split(self, rest: str) -> tuple[str, str, str]:
        """(authority, path, options)."""
        rest, _, options = rest.partition("?")
        authority, slash, path = rest.partition("/")
        if self.scheme == "unix":
            return authority, slash + path, options
        return authority, path, options

    def credentials(self, text: str) -> dict[str, str]:
        user, colon, password = text.partition(":")
        username = self.decode(user, "the user name")
        if not colon:
            if username:
                self.fail("a user name stands without a password", "user:password@")
            return {}
        return {"username": username, "password": self.decode(password, "the password")}

    def hosts(self, text: str) -> tuple[tuple[str, int], ...]:
        default = 26379 if self.scheme.endswith("+sentinel") else 6379
        hosts = []
        for host in text.split(","):
            match = _HOST.fullmatch(host)
            if match is None:
                self.fail("the host is not one", "host, host:port or [IPv6 address]:port")
            port = int(match[3] or default)
            if not 0 < port < 65536:
                self.fail(f"the port is {port}", "1 to 65535")
            hosts.append((match[1] or match[2], port))
        if len(hosts) > 1 and "+" not in self.scheme:
            self.fail("there are several hosts", "one, or redis+cluster:// and redis+sentinel://")
        return tuple(hosts)

    def path(self, path: str) -> dict[str, Any]:
        path = path.rstrip("/")
        if self.scheme.endswith("+sentinel"):
            if not path or "/" in path:
                self.fail("no name of a master is", "redis+sentinel://host:port/name")
            return {"service": self.decode(path, "the name of the master")}
        if not path:
            return {}
        if self.scheme.endswith("+cluster"):
            self.fail("a path is", "none: a cluster has one database")
        return {"db": self.integer("db", path, 0, 2**31 - 1)}

    def integer(self, name: str, text: str, minimum: int, maximum: int) -> int:
        if not re.fullmatch(r"0|[1-9]\d{0,18}", text) or not minimum <= int(text) <= maximum:
            self.fail(f"{name} is {text[:50]!r}", f"an integer from {minimum} to {maximum}")
        return int(text)

    def duration(self, name: str, text: str) -> int:
        match = _DURATION.fullmatch(text)
        value = round(float(match[1]) * _MILLISECONDS[match[2]]) if match else 0
        if not 0 < value < 2**53:
            self.fail(f"{name} is {text[:50]!r}", "a positive number and a unit: 500ms, 1.5s, 2m")
        return value

    def choice(self, name: str, text: str, choices: tuple[str, ...]) -> str:
        if text not in choices:
            self.fail(f"{name} is {text[:50]!r}", ", ".join(choices))
        return text

    def options(self, text: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        known = self.known()
        for option in re.split("&&|&", text) if text else ():
            name, equals, value = option.partition("=")
            if name not in known or not equals:
                self.fail(
                    f"the option {name[:50]!r} is not known", "name=value of " + ", ".join(known)
                )
            field_name, read = known[name]
            if field_name == "ssl":
                given = dict(values.get("ssl", ()))
                if name in given:
                    self.fail(f"{name} is given twice", "once")
                values["ssl"] = (*values.get("ssl", ()), (name, read(name, value)))
                continue
            if field_name in values:
                self.fail(f"{name} is given twice", "once")
            values[field_name] = read(name, value)
        return values

    def known(self) -> dict[str, tuple[str, Callable[[str, str], Any]]]:
        """Option -> (field, how its value is read)."""

        def between(low: int, high: int) -> Callable[[str, str], int]:
            return lambda name, text: self.integer(name, text, low, high)

        def text(name: str, value: str) -> str:
            return self.decode(value, name)

        known: dict[str, tuple[str, Callable[[str, str], Any]]] = {
            "prefix": ("prefix", text),
            "num_threads": ("num_threads", between(1, 256)),
            "chunk_size": ("chunk_size", between(1, 2**20)),
            "timeout": ("timeout_ms", self.duration),
            "heartbeat": ("heartbeat_ms", self.duration),
            "retry_limit": ("retry_limit", between(0, 100)),
            "ttl": ("ttl_ms", self.duration),
            "layout": (
                "layout",
                lambda name, value: self.choice(name, value, ("packed", "upstream")),
            ),
        }
        if not self.scheme.endswith("+cluster"):
            known["db"] = ("db", between(0, 2**31 - 1))
        if self.scheme.startswith("rediss"):
            for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
                known[name] = ("ssl", text)
            known["ssl_cert_reqs"] = (
                "ssl",
                lambda name, value: self.choice(name, value, ("required", "none")),
            )
        return known
