"""Calls of several exchanges: worker threads share them out, and the first failure ends a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_local = threading.local()


class AbandonedError(Exception):
    """Another exchange of the same call has failed, so this one did not begin."""


class Call:
    """One call of a table; its exchanges begin only while none of them has failed."""

    def __init__(self) -> None:
        self.submitted = time.monotonic()
        self._failed = threading.Event()

    def check(self) -> None:
        """Raises AbandonedError if an exchange of the call has failed."""
        if self._failed.is_set():
            raise AbandonedError

    @contextmanager
    def part(self) -> Iterator[None]:
        """What this thread does in the block is a part of the call."""
        self.check()
        _local.call = self
        try:
            yield
        except BaseException:
            self._failed.set()
            raise
        finally:
            _local.call = None


def current_call() -> Call | None:
    """The call that this thread works for, if it is one of :func:`run_all`."""
    call: Call | None = getattr(_local, "call", None)
    return call


def run_all(executor: ThreadPoolExecutor, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of every item, in order, on the executor's threads. After the first failure no item
    and no exchange begins; its error is raised, the first in the order of the items if there are
    several."""
    call = Call()

    def part(item: T) -> R:
        with call.part():
            return work(item)

    futures: list[Future[R]] = [executor.submit(part, item) for item in items]
    _, unfinished = wait(futures, return_when=FIRST_EXCEPTION)
    for future in unfinished:
        future.cancel()
    wait([future for future in unfinished if not future.cancelled()])
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, AbandonedError):
            raise error
    return [future.result() for future in futures]
