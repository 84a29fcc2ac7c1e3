"""Connections to a Redis: several at a time, with bounded waits and retries."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from dynamicemb.errors import StoreError, missing_package
from dynamicemb.tiers.remote.url import RedisUrl

try:
    import redis
except ModuleNotFoundError as error:
    raise missing_package("a redis:// store", "redis", "redis") from error

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TryAgainError,
)

from dynamicemb.tiers.remote.redis_calls import current_call, run_all
from dynamicemb.tiers.remote.redis_connections import connect, names_credentials, strange_replies
from dynamicemb.tiers.remote.redis_exchange import current, exchange
from dynamicemb.tiers.remote.redis_reader import ELEMENT_BYTES, Reader

#: Errors that may be over when a command is sent again.
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

#: Characters of a server's error that are shown.
LONGEST_CAUSE = 500

T = TypeVar("T")
R = TypeVar("R")
Message = Sequence[bytes | memoryview]

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


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


class _Process:
    """Connections and threads of a client in one process. A forked child has none of its parent's:
    it would share their sockets, and another thread may have held their locks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connecting = threading.Lock()
        self.client: Any = None  # made by the first command: a server that is down is no error yet
        self.executor: ThreadPoolExecutor | None = None
        #: When the server last answered, and when an exchange was last given up.
        self.answered = self.gave_up = float("-inf")


#: Of the parents of this process: never used, and never freed, which may take their locks.
_of_parents: list[_Process] = []


class RedisClient:
    """Sends commands to a Redis, ``num_threads`` at the same time.

    An exchange, connecting, sending and all replies, has ``timeout`` seconds together, and its
    replies have a bound. Every command here may be sent twice without harm, so what failed on the
    way (refused, reset, not done in time, a server that is starting or not the master any more) is
    sent again, ``retry_limit`` times with growing pauses. A connection that failed is closed, so a
    late reply is never taken for another's. Other refusals (wrong password, out of memory) and
    replies that Redis does not give fail at once.
    """

    def __init__(self, url: RedisUrl) -> None:
        self.url = url
        self._processes: dict[int, _Process] = {}
        pauses = sum(map(_longest_pause, range(url.retry_limit)))
        #: Seconds that an exchange with all its attempts may take.
        self.patience = (url.retry_limit + 1) * url.timeout_ms / 1e3 + pauses

    def __repr__(self) -> str:
        return f"Redis at {self.url.where}"

    # ---- connections ----

    @property
    def _process(self) -> _Process:
        """That of the running process."""
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, _Process())

    @property
    def _connected(self) -> Any:
        """redis-py's client or pool, made by the first exchange."""
        process = self._process
        if not process.connecting.acquire(timeout=current().seconds_left):
            raise redis.TimeoutError("Timeout: another thread still connects")
        try:
            if process.client is None:
                process.client = connect(self.url)
            return process.client
        finally:
            process.connecting.release()

    @contextmanager
    def _connection(self, pool: Any = None) -> Iterator[Any]:
        """A connection of ``pool`` (of the client's own, if it is not of a cluster); closed after
        any error, and when it has more than was read."""
        pool = pool or self._connected
        with strange_replies():
            connection = pool.get_connection()
        try:
            yield connection
            connection._parser.check_empty()
        except BaseException:
            connection.disconnect()
            raise
        else:
            if connection.health_check_interval:
                connection.next_health_check = time.monotonic() + connection.health_check_interval
        finally:
            pool.release(connection)

    # ---- exchanges ----

    def converse(
        self,
        what: str,
        message: Message,
        replies: int,
        reply_bytes: int = 0,
        pool: Any = None,
        until: float = float("inf"),
    ) -> list[Any]:
        """Send commands as bytes over one connection and return their replies. An error that the
        server answers with is raised.

        what: the exchange is for, in errors. reply_bytes: memory that the replies may take, beside
        what every exchange may. pool: of :meth:`pools`; needed for a cluster. until: when the last
        attempt ends.
        """

        def work() -> list[Any]:
            with self._connection(pool) as connection:
                connection.send_packed_command(list(message))
                reader: Reader = connection._parser
                answers = reader.read_many(replies)
                refusals = [answer for answer in answers if isinstance(answer, RedisError)]
                if refusals:  # perhaps of a server that is not the master any more
                    raise refusals[0]
                return answers

        allowed = reply_bytes + 2 * ELEMENT_BYTES * replies
        return self.retry(what, work, allowed, until)

    def stream(
        self,
        what: str,
        messages: Sequence[Callable[[], bytes]],
        read: Callable[[Reader, int], None],
    ) -> None:
        """Send commands over one connection, each while the one before is answered, and ``read``
        the reply to each, an exchange each (not of a cluster). After a failure on the way it goes
        on with the first that was not read; :meth:`retry` bounds failures without any progress."""
        done = 0

        def go_on() -> None:
            nonlocal done
            before, call, process = done, current_call(), self._process
            try:
                with self._connection() as connection:
                    sent = done
                    while done < len(messages):
                        while sent < min(done + 2, len(messages)):
                            if call is not None:
                                call.check()
                            connection.send_packed_command([messages[sent]()], sent == before)
                            sent += 1
                        read(connection._parser, done)
                        done += 1
                        process.answered = time.monotonic()
                        current().renew(self.url.timeout_ms / 1e3)
            except _ON_THE_WAY as error:
                if done == before or isinstance(error, StoreError):
                    raise

        while done < len(messages):
            self.retry(what, go_on, 0)

    def cluster_commands(
        self, what: str, commands: Sequence[tuple[bytes, ...]], reply_bytes: int = 0
    ) -> list[Any]:
        """Replies to commands whose keys are in one place each; of a cluster."""

        def work() -> list[Any]:
            with strange_replies():
                pipeline = self._connected.pipeline(transaction=False)
                for name, *arguments in commands:
                    pipeline.execute_command(name.decode(), *arguments)
                replies: list[Any] = pipeline.execute(raise_on_error=True)
                return replies

        return self.retry(what, work, reply_bytes + 2 * ELEMENT_BYTES * len(commands))

    def pools(self) -> list[Any]:
        """Connections to each server that has keys: a pool each. To be called in an exchange."""
        client = self._connected
        if self.url.kind != "cluster":
            return [client]
        nodes = client.get_primaries()
        return [client.get_redis_connection(node).connection_pool for node in nodes]

    # ---- waiting, retrying ----

    def retry(
        self, what: str, work: Callable[[], T], reply_bytes: int, until: float = float("inf")
    ) -> T:
        """``work()``, which is one exchange, again while it fails on the way, but not after
        ``until``. Raises StoreError when it gives up, AbandonedError when the call has failed."""
        begin, process, call = time.monotonic(), self._process, current_call()
        if call is not None and process.gave_up > max(call.submitted, process.answered):
            until = min(until, max(call.submitted, process.answered) + self.patience)
            if begin >= until:
                reason = "it answered no call of this process while this one waited for its turn"
                raise self.error(what, redis.TimeoutError(f"Timeout: {reason}"))
        for attempt in range(self.url.retry_limit + 1):
            if call is not None:
                call.check()
            try:
                seconds = min(self.url.timeout_ms / 1e3, max(0.0, until - time.monotonic()))
                with exchange(seconds, reply_bytes):
                    result = work()
                process.answered = time.monotonic()
                return result
            except StoreError:
                raise
            except (*_ON_THE_WAY, RedisError, MemoryError) as raised:
                error = raised
            # Raised out of the block: the server's text may have credentials, and is not behind it.
            refused = isinstance(error, (AuthenticationError, AuthorizationError))
            if refused or names_credentials(error) or not isinstance(error, _ON_THE_WAY):
                raise self.error(what, error)
            if attempt == self.url.retry_limit or time.monotonic() >= until:
                process.gave_up = time.monotonic()
                took = f" ({attempt + 1} attempts in {time.monotonic() - begin:.1f} s)"
                raise self.error(what, error, took)
            time.sleep(_longest_pause(attempt) * (0.5 + 0.5 * random.random()))
        raise AssertionError

    def wrong_reply(self, what: str, name: bytes, reply: object) -> StoreError:
        """The error for a reply that Redis does not give to that command."""
        shown = reply if isinstance(reply, str) else f"{type(reply).__name__} {str(reply)[:60]!r}"
        return self.error(what, InvalidResponse(f"the reply to {name.decode()} is {shown}"))

    def error(self, what: str, error: BaseException, took: str = "") -> StoreError:
        """The StoreError for ``what``, which failed with ``error``; without credentials."""
        number = getattr(error, "errno", None)
        cause = str(error) or type(error).__name__
        for secret in (self.url.password, self.url.username):
            if secret:
                cause = cause.replace(secret, "***")
        cause = "".join(char if char.isprintable() else "?" for char in cause[:LONGEST_CAUSE])
        return StoreError(
            number if isinstance(number, int) else None,
            f"{self!r}: {what} failed{took}: {type(error).__name__}: {cause}",
            self.url.where,
        )

    def run_all(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """``work`` of every item, in order, ``num_threads`` at the same time; tables of one URL
        share the threads. After the first error no exchange of the call begins."""
        if len(items) <= 1 or self.url.num_threads == 1:
            return [work(item) for item in items]
        return run_all(self._executor, work, items)

    @property
    def _executor(self) -> ThreadPoolExecutor:
        process = self._process
        with process.lock:
            if process.executor is None:
                process.executor = ThreadPoolExecutor(
                    self.url.num_threads, thread_name_prefix="dynamicemb redis"
                )
            return process.executor

    def close(self) -> None:
        """Close the connections. A later command opens new ones."""
        process = self._process
        with process.connecting, process.lock:
            client, process.client = process.client, None
            executor, process.executor = process.executor, None
        if executor is not None:
            executor.shutdown(wait=False)
        if client is not None:
            client.close()

    def __del__(self) -> None:
        for pid, process in self.__dict__.get("_processes", {}).items():
            if pid != os.getpid():
                _of_parents.append(process)
            elif process.executor is not None:
                process.executor.shutdown(wait=False)


def _longest_pause(attempt: int) -> float:
    """Before the next attempt. Pauses are shorter by chance, so that clients do not retry all at
    the same time."""
    longest: float = min(_WAIT_MOST_S, _WAIT_FIRST_S * 2.0**attempt)
    return longest
