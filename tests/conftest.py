"""Shared by all tests. The helpers beside this file (`reference`, `tables`, `twin`) are modules.

DYNAMICEMB_TEST_BACKEND chooses what the tests of tables and modules run on: `cpu` (the default),
`cuda`, or `interpreter` (the GPU's kernels on CPU tensors, slowly).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from ranks import Ranks

BACKEND = os.environ.get("DYNAMICEMB_TEST_BACKEND", "cpu")
if BACKEND == "interpreter":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    import interpreter

    interpreter.use_for_all_tables()
elif BACKEND == "cuda":
    import on_cuda

    on_cuda.use_for_everything()
if BACKEND != "cpu":  # what is about the engine itself
    collect_ignore = [
        "cpp",
        "slots",
        "table/test_instruction_sets.py",
        "table/test_memory_errors.py",
        "table/test_threads.py",
        "test_engine_stub.py",
    ]

# No random choice differs between two runs; a failure is reproduced by running the test again.
settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stress: a long run; excluded unless asked for by -m stress")
    config.addinivalue_line("markers", "not_on_a_gpu: about what a GPU does otherwise, by design")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the long runs unless the marker expression names them, and on a GPU what is not
    meant for one."""
    if BACKEND == "cuda":
        elsewhere = [item for item in items if item.get_closest_marker("not_on_a_gpu")]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]
    if "stress" in config.getoption("markexpr"):
        return
    long = [item for item in items if item.get_closest_marker("stress")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that functions run in, started when they are first needed."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test starts from the same torch seed and leaves the thread count as it was."""
    threads = torch.get_num_threads()
    torch.manual_seed(20240607)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of small dumps wait for no disk there."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
