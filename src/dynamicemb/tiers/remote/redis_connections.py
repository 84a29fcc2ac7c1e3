"""redis-py's connections, pools and clusters, bounded by the exchange of the calling thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
import redis.cluster
import redis.sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError
from redis.retry import Retry

from dynamicemb.tiers.remote.redis_discovery import KEY_POSITIONS, is_masters, is_slots
from dynamicemb.tiers.remote.redis_exchange import TimedSocket, current, exchange
from dynamicemb.tiers.remote.redis_reader import Reader
from dynamicemb.tiers.remote.url import RedisUrl


class _Bounded:
    """A connection of redis-py that the exchange of its thread bounds, with our reader. It takes no
    reply that nobody asked for, and shows no reply to a password."""

    _sock: Any
    _sends_password = False  # it is connecting
    _packed = _due = 0  # commands that are packed; replies to those that were sent

    @property
    def socket_timeout(self) -> float:
        return current().seconds_left

    @socket_timeout.setter
    def socket_timeout(self, value: object) -> None:
        """Ignored: redis-py assigns its own setting."""

    @property
    def socket_connect_timeout(self) -> float:
        """Half for one address of the host: it may have more."""
        return current().seconds_left / 2

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, value: object) -> None:
        """Ignored, as above."""

    def set_parser(self, parser_class: object) -> None:
        self._parser = Reader()

    def _connect(self) -> TimedSocket:
        self._sends_password = bool(self.username or self.password)  # type: ignore[attr-defined]
        return TimedSocket(super()._connect())  # type: ignore[misc]

    def connect(self) -> None:
        if self._sock is not None:  # redis-py takes longer to see it
            return
        try:
            super().connect()  # type: ignore[misc]
        finally:
            self._sends_password = False

    def connect_check_health(self, *arguments: Any, **settings: Any) -> None:
        """What newer versions of redis-py connect by."""
        try:
            super().connect_check_health(*arguments, **settings)  # type: ignore[misc]
        finally:
            self._sends_password = False

    def pack_commands(self, commands: Any) -> Any:
        self._packed = len(commands)
        return super().pack_commands(commands)  # type: ignore[misc]

    def send_packed_command(self, *arguments: Any, **settings: Any) -> None:
        count, self._packed = self._packed or 1, 0
        super().send_packed_command(*arguments, **settings)  # type: ignore[misc]
        self._due = count

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        reply, error = None, None
        try:
            reply = super().read_response(*arguments, **settings)  # type: ignore[misc]
        except RedisError as raised:
            error = raised
        self._due -= 1
        if self._due == 0:
            try:
                self._parser.check_empty()
            except InvalidResponse as raised:
                self.disconnect()  # type: ignore[attr-defined]
                error = raised
        if error is not None:  # out of the block: no traceback may show what it was before
            raise _without_text(error) if self._sends_password else error
        return reply


#: First words of errors of Redis.
_CODES = {*Reader.EXCEPTION_CLASSES, "WRONGTYPE", "MISCONF", "BUSY", "DENIED", "NOREPLICAS"}


def _without_text(error: Any) -> RedisError:
    """The error without what the server wrote: Redis repeats the password if it does not know the
    command AUTH, and others may in any way."""
    if type(error) in (redis.TimeoutError, redis.ConnectionError):  # of this library
        return error
    if str(error) in Reader.EXCEPTION_CLASSES["ERR"]:  # redis-py knows it by heart
        return error
    code = getattr(error, "code", "")
    other = "Protocol Error" if isinstance(error, InvalidResponse) else "an unknown error"
    text = code if code in _CODES else other
    if isinstance(error, AuthenticationError):
        text = f"AUTH refused: {text}"
    text += " (the text is not shown: it may repeat the password)"
    try:
        hidden: RedisError = type(error)(text)
    except (ValueError, LookupError):  # MOVED needs a place
        hidden = ResponseError(text)
    return hidden


def names_credentials(error: BaseException) -> bool:
    """Whether it is a refusal of the password that redis-py has wrapped in another error."""
    words = ("WRONGPASS", "NOAUTH", "NOPERM", "AUTH refused", "AUTH <password>")
    return any(word in str(error) for word in words)


class _OneOfSeveral(_Bounded):
    """To one of several servers: connecting and discovery take half of the time that is left, so
    that the next server has some."""

    _asked = ""
    _check: Any = None  # of the reply that comes next

    def connect(self) -> None:
        if self._sock is not None:
            return
        with exchange(current().seconds_left / 2, 0):
            super().connect()

    def send_command(self, *arguments: Any, **settings: Any) -> None:
        super().send_command(*arguments, **settings)  # type: ignore[misc]
        self._asked = arguments[0]
        self._check = _DISCOVERY.get(arguments[0])

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        check, self._check = self._check, None
        if check is None:
            return super().read_response(*arguments, **settings)
        try:
            with exchange(current().seconds_left / 2, 0):
                reply = super().read_response(*arguments, **settings)
            if not check(reply):
                raise InvalidResponse(f"the reply to {self._asked} is {str(reply)[:60]!r}")
        except (InvalidResponse, ResponseError) as error:
            self.disconnect()  # type: ignore[attr-defined]
            raise redis.ConnectionError(str(error)) from error  # another server may know
        return reply


class _Tcp(_Bounded, redis.Connection):  # type: ignore[misc]
    pass


class _Tls(_Bounded, redis.SSLConnection):  # type: ignore[misc]
    pass


class _Unix(_Bounded, redis.UnixDomainSocketConnection):  # type: ignore[misc]
    pass


class _TcpOfSeveral(_OneOfSeveral, redis.Connection):  # type: ignore[misc]
    pass


class _TlsOfSeveral(_OneOfSeveral, redis.SSLConnection):  # type: ignore[misc]
    pass


class _TcpOfSentinel(_Bounded, redis.sentinel.SentinelManagedConnection):  # type: ignore[misc]
    pass


class _TlsOfSentinel(_Bounded, redis.sentinel.SentinelManagedSSLConnection):  # type: ignore[misc]
    pass


class _Pool(redis.ConnectionPool):  # type: ignore[misc]
    """Of one node of a cluster. redis-py makes one for every node that it hears of."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        _ = current().seconds_left  # raises if there are none
        super().__init__(*arguments, **settings)


class _Cluster(redis.cluster.RedisCluster):  # type: ignore[misc]
    def command(self, **_: Any) -> dict[str, dict[str, Any]]:
        """Where the keys of commands are. Not asked of a server, which could name any argument."""
        return {
            name: {
                "name": name,
                "flags": [],
                "first_key_pos": 1,
                "last_key_pos": last,
                "step_count": step,
            }
            for name, (last, step) in KEY_POSITIONS.items()
        }


def connect(url: RedisUrl) -> Any:
    """A redis-py RedisCluster, or a pool of connections to one server. Asks the servers of a
    cluster for their slots; connects to no other server."""
    settings: dict[str, Any] = {
        "health_check_interval": url.heartbeat_ms / 1e3,
        "protocol": 2,
        "max_connections": 2**31 - 1,
    }
    if url.tls:
        settings |= dict(url.ssl)
        if settings.get("ssl_cert_reqs") == "none":
            settings["ssl_check_hostname"] = False
    user = {"username": url.username or None, "password": url.password or None}
    several = _TlsOfSeveral if url.tls else _TcpOfSeveral
    if url.kind == "cluster":
        with strange_replies():
            return _Cluster(
                # It takes a class of connections only beside a URL.
                url="redis://{}:{}".format(*_bracketed(url.hosts[0])),
                startup_nodes=[redis.cluster.ClusterNode(*host) for host in url.hosts],
                connection_class=several,
                connection_pool_class=_Pool,
                retry=Retry(NoBackoff(), 1),  # within one attempt: a slot has moved
                **user,
                **settings,
            )
    settings["retry"] = Retry(NoBackoff(), 0)
    if url.kind == "sentinel":
        sentinel = redis.sentinel.Sentinel([])
        pools = [redis.ConnectionPool(several, host=h, port=p, **settings) for h, p in url.hosts]
        sentinel.sentinels = [redis.Redis(connection_pool=pool) for pool in pools]
        return redis.sentinel.SentinelConnectionPool(
            url.service,
            sentinel,
            connection_class=_TlsOfSentinel if url.tls else _TcpOfSentinel,
            db=url.db,
            **user,
            **settings,
        )
    settings |= {"db": url.db, **user}
    if url.scheme == "unix":
        return redis.ConnectionPool(_Unix, path=url.path, **settings)
    host, port = url.hosts[0]
    return redis.ConnectionPool(_Tls if url.tls else _Tcp, host=host, port=port, **settings)


def _bracketed(host: tuple[str, int]) -> tuple[str, int]:
    name, port = host
    return (f"[{name}]" if ":" in name else name), port


@contextmanager
def strange_replies() -> Iterator[None]:
    """Around redis-py's own reading of what servers and Sentinels report of each other."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, RedisError):
            raise
        raise InvalidResponse(f"a reply of another kind: {type(error).__name__}: {error}") from None


#: Commands by which a server lists others, as redis-py names them, and the check of the reply.
_DISCOVERY = {"CLUSTER SLOTS": is_slots, "SENTINEL MASTERS": is_masters}
