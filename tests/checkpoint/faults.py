"""Operating systems that fail, for the tests of checkpoints."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from dynamicemb.checkpoint.files import System


class FailingSystem(System):
    """Counts the operations of the given kinds and fails the `nth` of them (from 1).

    `fault` is an errno, or "short": a write that takes only one byte and then fails.
    """

    def __init__(
        self, kinds: Sequence[str], nth: int | None = None, fault: int | str = errno.EIO
    ) -> None:
        self.kinds = tuple(kinds)
        self.nth = nth
        self.fault = fault
        self.count = 0
        self.failed = False
        self._cut = False

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._cut and operation == "write":
            self._cut = False
            raise OSError(errno.ENOSPC, "no space left (made by the test)")
        if operation in self.kinds:
            self.count += 1
            if self.count == self.nth:
                self.failed = True
                if self.fault == "short" and operation == "write":
                    self._cut = True
                    descriptor, data = args
                    return os.write(descriptor, data[:1])
                number = errno.ENOSPC if self.fault == "short" else int(self.fault)
                raise OSError(number, f"{os.strerror(number)} (made by the test)")
        return super().run(operation, call, *args, **kwargs)


class ShortWrites(System):
    """Writes at most `limit` bytes at a time, which is no failure."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if operation == "write":
            descriptor, data = args
            return os.write(descriptor, data[: self.limit])
        return super().run(operation, call, *args, **kwargs)


class KillingSystem(System):
    """Kills the process at its `nth` operation, as a power cut would."""

    def __init__(self, nth: int | None) -> None:
        self.nth = nth
        self.count = 0

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == self.nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(operation, call, *args, **kwargs)
