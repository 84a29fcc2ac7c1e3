"""Forwards without backwards, and modules that are thrown away, leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from pairs import table_options

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbedding, DynamicEmbeddingBag


def resident_kib() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4


def lookups() -> int:
    from dynamicemb.table.rows import Lookup

    return sum(issubclass(type(one), Lookup) for one in gc.get_objects())


MODULES: dict[str, Any] = {
    "torch_optim": lambda: DynamicEmbedding(64),
    "fused": lambda: DynamicEmbedding(64, optimizer="adam"),
    "separate": lambda: BatchedDynamicEmbeddingTables([table_options(64)], separate_step=True),
    "bag": lambda: DynamicEmbeddingBag(64, mode="sum"),
}


def call(module: Any, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(module, DynamicEmbedding):
        return module(ids)
    return (
        module(ids, torch.arange(0, len(ids) + 1, 2)[: len(ids) // 2 + 1])
        if isinstance(module, BatchedDynamicEmbeddingTables)
        else module(ids.reshape(-1, 2))
    )


@pytest.mark.parametrize("name", MODULES)
def test_forwards_without_backward(name: str) -> None:
    module = MODULES[name]()
    ids = torch.arange(1000)
    for _ in range(20):
        call(module, ids)
    start, alive = resident_kib(), lookups()
    for _ in range(300):
        call(module, ids)
    assert lookups() == alive
    assert resident_kib() - start < 16_000  # 300 outputs alone would be 75 MB


@pytest.mark.parametrize("name", MODULES)
def test_steps_after_warm_up(name: str) -> None:
    module = MODULES[name]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ids = torch.arange(1000)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            call(module, ids).sum().backward()
            if name == "separate":
                module.step()
            else:
                optimizer.step()

    steps(20)
    start = resident_kib()
    steps(300)
    assert resident_kib() - start < 16_000


def test_a_module_is_freed() -> None:
    for name, make in MODULES.items():
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        call(module, torch.arange(10)).sum().backward()
        optimizer.step()
        watch = weakref.ref(module)
        engine = weakref.ref(module.tables[0])
        del module, optimizer
        gc.collect()
        assert watch() is None, name
        assert engine() is None, name


def test_an_output_that_is_dropped_frees_its_lookup() -> None:
    module = DynamicEmbedding(4)
    alive = lookups()
    out = module(torch.arange(10))
    assert lookups() == alive + 1
    del out
    assert lookups() == alive


def test_a_graph_keeps_its_module_alive() -> None:
    module = DynamicEmbedding(4, options=table_options(4), optimizer="sgd")
    table = module.table
    out = module(torch.tensor([1]))
    del module
    gc.collect()
    out.sum().backward()
    assert (table.find(torch.tensor([1])).embeddings == 0.99).all()
