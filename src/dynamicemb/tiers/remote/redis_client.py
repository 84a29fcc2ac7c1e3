"""Connections to a Redis: several at a time, with bounded waits and retries."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from dynamicemb.errors import StoreError, missing_package
from dynamicemb.tiers.remote.url import RedisUrl

try:
    import redis
except ModuleNotFoundError as error:
    raise missing_package("a redis:// store", "redis", "redis") from error

import redis.cluster
import redis.sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from dynamicemb.tiers.remote.redis_values import Replies

#: What may be over when a command is sent again.
_ON_THE_WAY = (
    redis.ConnectionError,
    redis.TimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    MasterDownError,
    ClusterDownError,
    TryAgainError,
    MovedError,
    AskError,
    RedisClusterException,
    OSError,
)

T = TypeVar("T")
R = TypeVar("R")

_WAIT_FIRST_S, _WAIT_MOST_S = 0.05, 1.0
_clients: weakref.WeakValueDictionary[RedisUrl, RedisClient] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def client_of(url: RedisUrl) -> RedisClient:
    """The client of this process for ``url``; tables share it."""
    with _lock:
        client = _clients.get(url)
        if client is None:
            client = _clients[url] = RedisClient(url)
        return client


class RedisClient:
    """Sends commands to a Redis, ``num_threads`` at the same time.

    Every command here may be sent twice without harm, so what failed on the way (refused, reset,
    no reply in ``timeout``, a server that is starting or not the master any more) is sent again,
    ``retry_limit`` times with growing pauses. A connection that failed is closed, so a late reply
    is never taken for another's. Other refusals (wrong password, out of memory) fail at once.
    """

    def __init__(self, url: RedisUrl) -> None:
        self.url = url
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0
        self._executor_lock = threading.Lock()
        self._client: Any = None  # made by the first command: a server that is down is no error yet

    def __repr__(self) -> str:
        return f"Redis at {self.url.where}"

    # ---- connections ----

    def _settings(self) -> dict[str, Any]:
        url = self.url
        settings: dict[str, Any] = {
            "username": url.username or None,
            "password": url.password or None,
            "socket_timeout": url.timeout_ms / 1e3,
            "socket_connect_timeout": url.timeout_ms / 1e3,
            "health_check_interval": url.heartbeat_ms / 1e3,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if url.kind != "cluster":
            settings["db"] = url.db
        if url.tls:
            ssl = dict(url.ssl)
            if ssl.get("ssl_cert_reqs") == "none":
                settings["ssl_check_hostname"] = False
            settings.update({"ssl": True, **ssl})
        return settings

    def _connect(self) -> Any:
        """redis-py's client."""
        url = self.url
        if url.kind == "cluster":
            nodes = [redis.cluster.ClusterNode(host, port) for host, port in url.hosts]
            settings = self._settings()
            settings["retry"] = Retry(NoBackoff(), 1)  # within one attempt: a slot has moved
            return redis.cluster.RedisCluster(startup_nodes=nodes, **settings)
        if url.kind == "sentinel":
            settings = self._settings()
            ask = {k: v for k, v in settings.items() if k not in ("username", "password", "db")}
            sentinel = redis.sentinel.Sentinel(url.hosts, sentinel_kwargs=ask)
            return sentinel.master_for(url.service, **settings)
        if url.scheme == "unix":
            return redis.Redis(unix_socket_path=url.path, **self._settings())
        host, port = url.hosts[0]
        return redis.Redis(host=host, port=port, **self._settings())

    @property
    def client(self) -> Any:
        """redis-py's client, connected as the URL says."""
        with self._executor_lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def converse(self, message: Sequence[bytes | memoryview], replies: int) -> list[Any]:
        """Send commands as bytes over one connection and return their replies (not of a cluster).
        An error that the server answers with is raised."""
        with self._connection() as connection:
            connection.send_packed_command(list(message))
            answers = []
            for _ in range(replies):
                try:
                    answers.append(connection.read_response(disable_decoding=True))
                except ResponseError as error:  # the other replies still come
                    answers.append(error)
        problem = next((one for one in answers if isinstance(one, ResponseError)), None)
        if problem is not None:
            connection.disconnect()  # it may be of a server that is not the master any more
            raise problem
        return answers

    def stream(
        self,
        what: str,
        messages: Sequence[Callable[[], bytes]],
        read: Callable[[Replies, int], None],
        longest: int,
    ) -> None:
        """Send commands over one connection, each while the one before is answered, and ``read``
        the reply to each (not of a cluster). After a failure on the way it goes on with the first
        that was not read; :meth:`retry` bounds failures without any progress."""
        done = 0

        def go_on() -> None:
            nonlocal done
            before = done
            try:
                with self._connection() as connection:
                    replies = Replies(connection, longest)
                    sent = done
                    while done < len(messages):
                        while sent < min(done + 2, len(messages)):
                            connection.send_packed_command([messages[sent]()], sent == before)
                            sent += 1
                        read(replies, done)
                        done += 1
            except _ON_THE_WAY as error:
                if done == before or isinstance(error, StoreError):
                    raise

        while done < len(messages):
            self.retry(what, go_on)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """One of the pool's; closed after any error."""
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def cluster_commands(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """Replies to commands whose keys are in one place each; of a cluster."""
        pipeline = self.client.pipeline(transaction=False)
        for name, *arguments in commands:
            pipeline.execute_command(name.decode(), *arguments)
        replies: list[Any] = pipeline.execute(raise_on_error=True)
        return replies

    # ---- waiting, retrying ----

    def retry(self, what: str, work: Callable[[], T]) -> T:
        """``work()``, again while it fails on the way. StoreError when it gives up."""
        begin = time.monotonic()
        for attempt in range(self.url.retry_limit + 1):
            try:
                return work()
            except (AuthenticationError, AuthorizationError) as error:
                raise self._error(what, error, "") from None
            except _ON_THE_WAY as error:
                if isinstance(error, StoreError):
                    raise
                if _names_credentials(error):
                    raise self._error(what, error, "") from None
                if attempt == self.url.retry_limit:
                    took = f" ({attempt + 1} attempts in {time.monotonic() - begin:.1f} s)"
                    raise self._error(what, error, took) from None
                time.sleep(_pause(attempt))
            except RedisError as error:
                raise self._error(what, error, "") from None
        raise AssertionError

    def _error(self, what: str, error: BaseException, took: str) -> StoreError:
        number = getattr(error, "errno", None)
        cause = str(error) or type(error).__name__
        for secret in (self.url.password, self.url.username):
            if secret:
                cause = cause.replace(secret, "***")
        return StoreError(
            number if isinstance(number, int) else None,
            f"{self!r}: {what} failed{took}: {type(error).__name__}: {cause}",
            self.url.where,
        )

    def run_all(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """``work`` of every item, in order, ``num_threads`` at the same time. The first error ends
        it: what has not begun is left."""
        if len(items) <= 1 or self.url.num_threads == 1:
            return [work(item) for item in items]
        pool = self._pool()
        futures: list[Future[R]] = [pool.submit(work, item) for item in items]
        _, rest = wait(futures, return_when=FIRST_EXCEPTION)
        if rest:
            for future in rest:
                future.cancel()
            wait([future for future in rest if not future.cancelled()])
        for future in futures:  # the first in order, so that the error does not depend on timing
            if future.done() and not future.cancelled() and future.exception() is not None:
                raise future.exception() or AssertionError
        return [future.result() for future in futures]

    def _pool(self) -> ThreadPoolExecutor:
        with self._executor_lock:
            if self._executor is None or self._process != os.getpid():  # threads survive no fork
                self._executor = ThreadPoolExecutor(
                    self.url.num_threads, thread_name_prefix="dynamicemb redis"
                )
                self._process = os.getpid()
            return self._executor

    def close(self) -> None:
        """Close the connections. A later command opens new ones."""
        with self._executor_lock:
            client, self._client = self._client, None
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)
        if client is not None:
            client.close()

    def __del__(self) -> None:
        executor = self.__dict__.get("_executor")
        if executor is not None and self._process == os.getpid():
            executor.shutdown(wait=False)


def _pause(attempt: int) -> float:
    longest = min(_WAIT_MOST_S, _WAIT_FIRST_S * 2.0**attempt)
    return longest * (0.5 + 0.5 * random.random())  # so that many clients do not come together


def _names_credentials(error: BaseException) -> bool:
    """A refusal of the password that redis-py wraps in another error."""
    return any(word in str(error) for word in ("WRONGPASS", "NOAUTH", "NOPERM", "AUTH <password>"))
