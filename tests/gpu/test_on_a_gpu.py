"""What only a GPU can show: graphs, streams, steps that do not wait for the device."""

from __future__ import annotations

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.errors import InvalidArgumentError, OutOfMemoryError
from dynamicemb.table import create_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def module(tables: int = 3, **options: object) -> BatchedDynamicEmbeddingTables:
    return BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(dim=16, max_capacity=4096, **options)] * tables,  # type: ignore[arg-type]
        pooling_mode=DynamicEmbPoolingMode.SUM,
        optimizer=EmbOptimType.ADAM,
        device="cuda",
        seed=1,
    )


def batch(seed: int, tables: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 500, (tables * 40,), generator=generator, device="cpu")
    return ids.cuda(), (torch.arange(tables * 8 + 1, device="cpu") * 5).cuda()


def test_a_graph_replays_evaluation_with_new_ids() -> None:
    tables = module()
    for seed in range(5):
        tables(*batch(seed))
    tables.eval()
    ids, offsets = batch(0)
    with torch.no_grad():
        tables(ids, offsets)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tables(ids, offsets)
        for seed in (1, 2, 99):
            fresh, _ = batch(seed)
            ids.copy_(fresh)
            graph.replay()
            assert torch.equal(out, tables(fresh, offsets))


def test_a_training_step_does_not_wait_for_the_device() -> None:
    tables = module()
    for seed in range(3):
        tables(*batch(seed)).sum().backward()
    batches = [batch(seed) for seed in range(4)]
    torch.cuda.set_sync_debug_mode("error")  # an operation that waits raises
    try:
        for ids, offsets in batches:
            tables(ids, offsets).sum().backward()
        tables.eval()
        with torch.no_grad():
            tables(*batches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_on_several_streams_are_in_order() -> None:
    alone, spread = module(), module()
    streams = [torch.cuda.Stream() for _ in range(3)]
    batches = [batch(seed) for seed in range(12)]
    torch.cuda.synchronize()
    for number, (ids, offsets) in enumerate(batches):
        alone(ids, offsets).sum().backward()
        with torch.cuda.stream(streams[number % 3]):
            spread(ids, offsets).sum().backward()
    torch.cuda.synchronize()
    for a, b in zip(alone.tables, spread.tables, strict=True):
        first, second = a.state_dict(), b.state_dict()
        assert all(torch.equal(first[name], second[name]) for name in ("ids", "embeddings"))


def test_out_of_memory_is_an_error_and_the_table_goes_on() -> None:
    huge = DynamicEmbTableOptions(dim=1024, max_capacity=1 << 30, init_capacity=1 << 10)
    table = create_table(huge, device="cuda", seed=1)
    ids = torch.arange(100, device="cuda")
    rows = table.find_or_insert(ids).embeddings
    with pytest.raises(OutOfMemoryError, match="grow"):
        table.reserve(1 << 28)
    assert torch.equal(table.find(ids).embeddings, rows)
    assert table.find_or_insert(ids + 50).slots.ge(0).all()


def test_tensors_of_another_device_are_refused() -> None:
    embedding = DynamicEmbedding(8, device="cuda")
    with pytest.raises(InvalidArgumentError, match="device is 'cpu'.*cuda:0"):
        embedding(torch.arange(4, device="cpu"))
    with pytest.raises(InvalidArgumentError, match="device is 'cpu'.*cuda:0"):
        embedding.table.find(torch.arange(4, device="cpu"))


def test_unaligned_strided_and_empty_ids() -> None:
    embedding = DynamicEmbedding(8, device="cuda", seed=1)
    ids = torch.arange(100, device="cuda")
    whole = embedding(ids)
    assert torch.equal(embedding(ids[1:]), whole[1:])
    assert torch.equal(embedding(ids[::3]), whole[::3])
    assert embedding(ids[:0]).shape == (0, 8)
