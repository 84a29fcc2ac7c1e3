"""Sharing the processors between tables and files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread_for_files() -> Iterator[None]:
    """Let tables use one thread fewer (at least one) in this thread, while another one reads or
    writes files: threads that wait for each other must not wait for a processor too."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
