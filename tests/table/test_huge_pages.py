"""The memory of a table in main memory is asked for in huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dynamicemb.table import create_table
from tables import make_options

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="this system has no huge pages"
)


def asked() -> int:
    """KiB of this process's mappings that huge pages were asked for."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Size":
            size = int(value.split()[0])
        elif name == "VmFlags" and "hg" in value.split():
            total += size
    return total


def test_large_arrays_ask_for_huge_pages_and_small_ones_do_not() -> None:
    before = asked()
    small = create_table(make_options(max_capacity=1024, bucket_capacity=128), device="cpu")
    small.find_or_insert(torch.arange(100, device="cpu"))
    assert asked() == before
    options = make_options(dim=64, max_capacity=2**18, init_capacity=2**18, bucket_capacity=128)
    table = create_table(options, device="cpu")
    table.find_or_insert(torch.arange(2**17, device="cpu"))
    assert asked() - before >= table.stats().bytes // 1024 * 0.95  # 256 KiB of digests do not
