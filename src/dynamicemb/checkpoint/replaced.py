"""Readers beside a dump that replaces what they open: they retry a bounded number of times.

A reader opens all files that it needs and then checks whether the manifest that named them is still
in force; only then do they belong to one checkpoint (``reader.py``). If it is not, the reader
raises a :class:`ReplacedCheckpointError`, and the caller opens the path again through
:func:`tried_again`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from dynamicemb.errors import CheckpointError, CorruptCheckpointError, ReplacedCheckpointError

ResultT = TypeVar("ResultT")

#: How often a checkpoint is opened, and the seconds before the second time; they double.
ATTEMPTS = 10
FIRST_PAUSE = 0.001


class MissingFileError(CorruptCheckpointError):
    """A file that the manifest names is missing. A checkpoint that is being removed looks the same,
    so whoever sees this waits, and looks whether the checkpoint is still in force."""


class OtherRankError(CheckpointError):
    """Another rank has to open its files again, and so has this one."""


def was_replaced(path: str) -> ReplacedCheckpointError:
    """The error of a reader of ``path``."""
    return ReplacedCheckpointError(f"{path} was replaced while it was opened")


#: Errors after which :func:`tried_again` retries.
RETRIED = (ReplacedCheckpointError, OtherRankError)


def pauses() -> Iterator[None]:
    """Yields after each pause between two attempts."""
    pause = FIRST_PAUSE
    for _ in range(ATTEMPTS - 1):
        time.sleep(pause)
        yield
        pause *= 2


def tried_again(work: Callable[[], ResultT]) -> ResultT:
    """Do ``work``, which opens a checkpoint, and retry if that was replaced meanwhile; after
    :data:`ATTEMPTS` attempts raise the error of the last one."""
    waits = pauses()
    while True:
        try:
            return work()
        except RETRIED:
            if next(waits, False) is False:
                raise
