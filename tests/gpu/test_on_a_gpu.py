"""What only a GPU can show: graphs, streams, steps that do not wait for the device."""

from __future__ import annotations

import pytest
import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.errors import InvalidArgumentError, OutOfMemoryError, UsageError
from dynamicemb.expiry import expire_rows
from dynamicemb.table import create_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def module(
    tables: int = 3, pooling: str = "SUM", **options: object
) -> BatchedDynamicEmbeddingTables:
    fields = {"dim": 16, "max_capacity": 4096, **options}
    return BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(**fields)] * tables,  # type: ignore[arg-type]
        pooling_mode=DynamicEmbPoolingMode[pooling],
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


@pytest.mark.parametrize("pooling", ["NONE", "SUM"])
def test_a_training_step_does_not_wait_for_the_device(pooling: str) -> None:
    tables = module(pooling=pooling)
    for seed in range(3):
        tables(*batch(seed)).sum().backward()
    batches = [batch(seed) for seed in range(8)]  # some of them as a graph
    torch.cuda.set_sync_debug_mode("error")  # an operation that waits raises
    try:
        for ids, offsets in batches:
            tables(ids, offsets).sum().backward()
        tables.eval()
        with torch.no_grad():
            tables(*batches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pooling", ["NONE", "SUM"])
@pytest.mark.parametrize("strategy", ["TIMESTAMP", "LFU", "STEP"])
def test_steps_that_are_replayed_as_a_graph_give_the_same_bits(strategy: str, pooling: str) -> None:
    def trained(graphs: bool) -> tuple[list[torch.Tensor], BatchedDynamicEmbeddingTables]:
        tables = module(
            pooling=pooling,
            score_strategy=DynamicEmbScoreStrategy[strategy],
            bucket_capacity=32,
            max_capacity=128,
        )
        tables._group._replay._works = graphs
        outputs = []
        for seed in range(40):
            ids, offsets = batch(seed)
            out = tables(ids * 1000 + seed // 4, offsets)  # evicts: 120 ids for 128 slots
            out.backward(torch.ones_like(out))
            outputs.append(out.detach())
        return outputs, tables

    (direct, a), (replayed, b) = trained(False), trained(True)
    assert b._group.layout.workspaces._idle[-1].graph is not None
    assert all(torch.equal(x, y) for x, y in zip(direct, replayed, strict=True))
    for first, second in zip(a.tables, b.tables, strict=True):
        assert first.stats() == second.stats()
        left, right = first.state_dict(), second.state_dict()
        assert left.keys() == right.keys()
        for name in left.keys() - {"meta"}:
            if name != "scores" or strategy != "TIMESTAMP":  # the time of the run
                assert torch.equal(left[name], right[name])


def test_few_ids_that_are_replayed_are_trained_as_often_as_they_occur() -> None:
    direct, replayed = module(tables=1, pooling="NONE"), module(tables=1, pooling="NONE")
    direct._group._replay._works = False
    ids, offsets = torch.tensor([3, 5, 3, 3, 5], device="cuda"), torch.arange(6, device="cuda")
    for tables in (direct, replayed):
        for _ in range(8):
            tables(ids, offsets).sum().backward()
    assert replayed._group.layout.workspaces._idle[-1].graph is not None
    assert torch.equal(direct(ids, offsets), replayed(ids, offsets))


@pytest.mark.parametrize("separate_step", [False, True])
def test_many_ids_after_a_few_are_summed(separate_step: bool) -> None:
    """What is compiled for a batch in which no id can occur often serves those after it."""
    dim = 17 + separate_step  # rows that no other test has
    tables = BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(dim=dim, max_capacity=256)],
        pooling_mode=DynamicEmbPoolingMode.NONE,
        separate_step=separate_step,
        learning_rate=1.0,
        device="cuda",
        seed=1,
    )
    ids = torch.tensor([1] * 12 + [2, 3], device="cuda")
    start = tables(ids[11:], torch.arange(4, device="cuda")).detach().clone()
    for one in (ids[11:], ids):
        tables(one, torch.arange(len(one) + 1, device="cuda")).sum().backward()
        if separate_step:
            tables.step()
            tables.handle.grad = None
    change = start - tables.tables[0].find(ids[11:]).embeddings
    expected = torch.tensor([13.0, 2.0, 2.0], device="cuda")[:, None].expand(3, dim)
    assert torch.allclose(change, expected, atol=1e-5)


def test_a_captured_evaluation_follows_an_optimizer_of_torch() -> None:
    embedding = DynamicEmbedding(16, device="cuda", seed=1)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    ids = torch.arange(50, device="cuda")
    embedding(ids).sum().backward()
    optimizer.step()
    embedding.eval()
    with torch.no_grad():
        embedding(ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = embedding(ids)
    for _ in range(3):
        embedding.train()(ids).sum().backward()
        optimizer.step()
        taken = [torch.full((100,), -1, device="cuda") for _ in range(1000)]  # what was given back
        graph.replay()
        assert torch.equal(out, embedding.eval()(ids))
        del taken


def test_ids_outside_of_all_bags_take_no_gradient() -> None:
    tables, expected = module(), module()
    ids, offsets = batch(0)
    more = torch.cat([ids, torch.arange(9000, 9040, device="cuda")])  # a buffer with room
    for step in range(8):  # some as a graph
        for one, given in ((expected, ids), (tables, more)):
            out = one(given, offsets)
            out.backward(torch.full_like(out, 0.1 * step))
    for a, b in zip(expected.tables, tables.tables, strict=True):
        known = a.state_dict()["ids"]
        assert torch.equal(a.find(known).embeddings, b.find(known).embeddings)
    assert tables.tables[-1].contains(more[120:]).all()  # the last table's, as the others after it


def test_tables_with_several_features_are_prefetched_on_a_stream() -> None:
    """Where the ids of a table begin is made on the stream that asks first."""
    options = DynamicEmbTableOptions(dim=8, max_capacity=4096)
    plain, ahead = (
        BatchedDynamicEmbeddingTables(
            [options] * 2, feature_table_map=[0, 0, 1], device="cuda", seed=1
        )
        for _ in range(2)
    )
    ids, offsets = batch(0)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        ahead.prefetch(ids, offsets)
    assert torch.equal(ahead(ids, offsets), plain(ids, offsets))


@pytest.mark.parametrize("pooling", ["NONE", "SUM"])
def test_batches_of_many_sizes_and_prefetching_between_graphs(pooling: str) -> None:
    direct, replayed = module(pooling=pooling), module(pooling=pooling)
    direct._group._replay._works = False
    generator = torch.Generator().manual_seed(5)
    for step in range(60):
        bags = 8 if step % 3 else int(torch.randint(1, 40, (), generator=generator, device="cpu"))
        ids = torch.randint(0, 9000, (3 * bags * 5,), generator=generator, device="cpu").cuda()
        offsets = (torch.arange(3 * bags + 1, device="cpu") * 5).cuda()
        outputs = []
        for tables in (direct, replayed):
            if step % 7 == 0:
                tables.prefetch(ids, offsets)
            out = tables(ids, offsets)
            out.backward(torch.full_like(out, 0.5))
            outputs.append(out.detach())
        assert torch.equal(*outputs), step


def test_the_host_never_expects_fewer_rows_than_there_are() -> None:
    options = DynamicEmbTableOptions(dim=4, max_capacity=1 << 16, init_capacity=1 << 12)
    table = create_table(options, device="cuda", seed=1)
    for step in range(6):
        table.find_or_insert(torch.arange(500, device="cuda") + 500 * step)
        torch.cuda.synchronize()  # the size that was asked for has arrived
        assert table._size_bound >= table.size()  # type: ignore[attr-defined]


def test_a_training_step_in_a_graph_of_the_caller_is_refused() -> None:
    tables = module()
    ids, offsets = batch(0)
    tables(ids, offsets)
    with (
        pytest.raises(UsageError, match="cannot be captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        tables(ids, offsets)


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


def test_offsets_weights_and_rows_of_another_device_are_refused() -> None:
    tables = module()
    ids, offsets = batch(0)
    weights = torch.ones(len(ids), device="cpu")
    for arguments in ((ids.cpu(), offsets), (ids, offsets.cpu()), (ids, offsets, weights)):
        with pytest.raises(InvalidArgumentError, match="device is 'cpu'"):
            tables(*arguments)
    with pytest.raises(InvalidArgumentError, match="device is 'cpu'"):
        tables.tables[0].insert(ids, torch.zeros(len(ids), 16, device="cpu"))
    assert [len(table) for table in tables.tables] == [0, 0, 0]


def test_strided_gradients_and_empty_batches_train() -> None:
    plain, other = module(), module()
    ids, offsets = batch(0)
    gradient = torch.randn(8, 2 * 48, device="cuda")[:, ::2]
    plain(ids, offsets).backward(gradient.contiguous())
    other(ids, offsets).backward(gradient)
    nothing = other(ids[:0], torch.zeros_like(offsets))
    assert not nothing.any()
    nothing.sum().backward()
    for a, b in zip(plain.tables, other.tables, strict=True):
        assert torch.equal(a.state_dict()["embeddings"], b.state_dict()["embeddings"])


def test_rows_expire_without_waiting_for_the_device() -> None:
    tables = module(score_strategy=DynamicEmbScoreStrategy.STEP)
    batches = [batch(seed) for seed in range(12)]
    tables(*batches[0]).sum().backward()
    expire_rows(tables, steps=2)
    for ids, offsets in batches[1:4]:
        tables(ids, offsets).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids, offsets in batches[4:]:
            tables(ids, offsets).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    last = torch.cat([ids[:40] for ids, _ in batches[-3:]]).unique()
    assert len(tables.tables[0]) == len(last)
    assert tables.tables[0].contains(last).all()


def test_unaligned_strided_and_empty_ids() -> None:
    embedding = DynamicEmbedding(8, device="cuda", seed=1)
    ids = torch.arange(100, device="cuda")
    whole = embedding(ids)
    assert torch.equal(embedding(ids[1:]), whole[1:])
    assert torch.equal(embedding(ids[::3]), whole[::3])
    assert embedding(ids[:0]).shape == (0, 8)


@pytest.mark.parametrize("dim", [6, 8])
def test_gradients_that_start_anywhere(dim: int) -> None:
    given = torch.randn(100, 12, device="cuda")
    rows = []
    for gradient in (given[:, 1 : 1 + dim], given[:, 1 : 1 + dim].contiguous()):
        embedding = DynamicEmbedding(dim, device="cuda", seed=1)
        ids = torch.arange(100, device="cuda") % 7
        embedding(ids).backward(gradient)
        rows.append(embedding(ids[:7]).detach())
    assert torch.equal(rows[0], rows[1])
