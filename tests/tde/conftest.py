"""Fixtures of the tests of torchrec_dynamic_embedding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist

from fbgemm_on_cuda import on_one_gpu  # noqa: F401  a fixture


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, and one thread: the batches of the tests are small."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


_numbers = itertools.count()


@pytest.fixture
def memory() -> str:
    """The URL of an empty store in this process; with something appended, of another one."""
    return f"memory://tde-tests-{next(_numbers)}"
