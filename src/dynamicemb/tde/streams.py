"""The order of work on GPUs between threads, whose streams do not wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


class Moment:
    """What this thread's current streams have been given to do so far, on the GPUs among
    ``devices``. Without a GPU it is nothing."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [
            (device, torch.cuda.current_stream(device).record_event())
            for device in sorted(set(devices), key=str)
            if device.type == "cuda"
        ]

    def wait(self) -> None:
        """What the caller's current streams are given from now on comes after it. The host does
        not wait."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)


def on_these_streams(work: Callable[[], T], devices: Iterable[torch.device]) -> Callable[[], T]:
    """``work``, to be called by another thread, on the current streams of this one."""
    streams = [torch.cuda.current_stream(one) for one in set(devices) if one.type == "cuda"]
    if not streams:
        return work

    def run() -> T:
        with contextlib.ExitStack() as entered:
            for stream in streams:
                entered.enter_context(torch.cuda.stream(stream))
            return work()

    return run
