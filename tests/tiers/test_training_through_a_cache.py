"""A table many times its cache trains to the bits of one in memory, for every store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dict_store import DictStore

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.tiers import CachedTable, HostStore, SsdStore, Stack
from tables import STRATEGY

NORMAL = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL)
IDS = 4000  # distinct; the caches below have 256 to 512 slots
STORES = ["host", "ssd", "python", "host-ssd", "ssd-python", "host-ssd-python"]


def storage(kind: str, path: Path) -> Callable[..., Any]:
    """A store, or a stack of several: those above others have a bound well below the rows."""
    names = kind.split("-")
    bound = 1000 if names[-1] != "ssd" and "ssd" in names else None
    parts: dict[str, Callable[..., Any]] = {
        "host": HostStore if names[-1] == "host" else HostStore.within(40_000),
        "ssd": SsdStore.at(path, segment_mb=1, max_rows=bound),
        "python": DictStore,
    }
    return Stack.of(*(parts[name] for name in names))


def options(storage: Any = None, rows: int = 256, **changes: Any) -> DynamicEmbTableOptions:
    fields: dict[str, Any] = {
        "dim": 8,
        "max_capacity": 16384,
        "bucket_capacity": 64,
        "initializer_args": NORMAL,
        "score_strategy": STRATEGY["STEP"],
    }
    if storage is not None:
        fields |= {"external_storage": storage, "local_hbm_for_values": rows * 160}
    return DynamicEmbTableOptions(**(fields | changes))


def batches(count: int = 30, ids: int = 100, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, IDS, (ids,), generator=generator) - 7 for _ in range(count)]


def make(table_options: DynamicEmbTableOptions, **changes: Any) -> BatchedDynamicEmbeddingTables:
    arguments: dict[str, Any] = {
        "pooling_mode": DynamicEmbPoolingMode.SUM,
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": 0.1,
        "seed": 3,
    }
    return BatchedDynamicEmbeddingTables([table_options], **(arguments | changes))


OFFSETS = torch.arange(0, 101, 4)


def train(module: Any, data: list[torch.Tensor], depth: int = 0) -> list[torch.Tensor]:
    """The outputs of every step; ``depth`` batches are prefetched."""
    outputs = []
    for k in range(min(depth, len(data))):
        module.prefetch(data[k], OFFSETS)
    for k, ids in enumerate(data):
        out = module(ids, OFFSETS)
        if depth and k + depth < len(data):
            module.prefetch(data[k + depth], OFFSETS)
        (out * out).sum().backward()
        outputs.append(out.detach())
    return outputs


def content(table: Any) -> dict[int, tuple[list[float], list[float], Any]]:
    return {
        int(id_): (rows.embeddings[i].tolist(), rows.state[i].tolist(), rows.scores[i].tolist())
        for rows in table.export(batch_size=1000)
        for i, id_ in enumerate(rows.ids)
    }


def assert_equal(cached: Any, plain: Any) -> None:
    """The same rows, state and scores."""
    assert isinstance(cached, CachedTable)
    assert content(cached) == content(plain)
    assert len(cached) == len(plain)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("strategy", ["STEP", "LFU", "NO_EVICTION"])
def test_a_table_ten_times_its_cache(tmp_path: Path, kind: str, strategy: str) -> None:
    data = batches()
    score = {"score_strategy": STRATEGY[strategy]}
    plain = make(options(**score))
    cached = make(options(storage(kind, tmp_path / "s"), rows=512, **score))
    for expected, out in zip(train(plain, data), train(cached, data), strict=True):
        assert torch.equal(expected, out)
    assert_equal(cached.tables[0], plain.tables[0])
    stats = cached.tables[0].cache_stats()
    assert stats.brought_up > 100
    assert stats.written_back > 500
    assert len(cached.tables[0]) > 2000
    below: Any = cached.tables[0].store
    while isinstance(below, Stack):  # every level has rows, none more than its bound
        assert 0 < below.upper.size() <= 1000
        below = below.lower
    assert below.size() > 500
    whole, alone = cached.tables[0].stats(), plain.tables[0].stats()
    assert (whole.hits, whole.misses, whole.inserts) == (alone.hits, alone.misses, alone.inserts)
    assert whole.evictions == whole.dropped_gradients == whole.failures == 0
    assert stats.bytes <= 512 * 160


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_layout(tmp_path: Path, optimizer: EmbOptimType, dtype: torch.dtype) -> None:
    changes = {"embedding_dtype": dtype, "score_strategy": STRATEGY["LFU"]}
    plain = make(options(**changes), optimizer=optimizer)
    cached = make(options(SsdStore.at(tmp_path / "s"), **changes), optimizer=optimizer)
    data = batches(15)
    for expected, out in zip(train(plain, data), train(cached, data), strict=True):
        assert torch.equal(expected, out)
    assert_equal(cached.tables[0], plain.tables[0])


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("depth", [1, 3])
def test_prefetching_changes_no_bit(tmp_path: Path, kind: str, depth: int) -> None:
    data = batches()
    plain = make(options())
    cached = make(options(storage(kind, tmp_path / "s"), rows=512))
    for expected, out in zip(train(plain, data), train(cached, data, depth), strict=True):
        assert torch.equal(expected, out)
    assert_equal(cached.tables[0], plain.tables[0])
    assert cached.tables[0].cache_stats().brought_up > 100


def test_several_tables_some_with_a_store(tmp_path: Path) -> None:
    def both(*storages: Any) -> BatchedDynamicEmbeddingTables:
        return BatchedDynamicEmbeddingTables(
            [options(one, dim=dim) for one, dim in zip(storages, (8, 4, 16), strict=True)],
            ["a", "b", "c"],
            optimizer=EmbOptimType.ADAM,
            seed=1,
        )

    plain, cached = both(None, None, None), both(SsdStore.at(tmp_path / "s"), None, HostStore)
    offsets = torch.arange(0, 301, 5)
    for a, b, c in zip(batches(seed=1), batches(seed=2), batches(seed=3), strict=True):
        outputs = []
        for module in (plain, cached):
            out = module(torch.cat([a, b, c]), offsets)
            (out * out).sum().backward()
            outputs.append(out)
        assert torch.equal(*outputs)
    for mine, other in zip(cached.tables, plain.tables, strict=True):
        assert content(mine) == content(other)


def test_a_torch_optimizer_and_accumulated_gradients(tmp_path: Path) -> None:
    results = []
    for store in (None, SsdStore.at(tmp_path / "s")):
        torch.manual_seed(0)
        rows = DynamicEmbedding(8, options=options(store, dim=None, rows=1024))
        optimizer = torch.optim.Adam(rows.parameters(), lr=0.1)
        losses = []
        for k, ids in enumerate(batches(20)):
            loss = rows(ids).pow(2).sum()
            loss.backward()
            losses.append(loss.item())
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
        results.append((losses, content(rows.table)))
    assert results[0] == results[1]


def test_rows_that_leave_between_forward_and_backward_get_their_gradient(tmp_path: Path) -> None:
    plain, cached = make(options()), make(options(SsdStore.at(tmp_path / "s")))
    data = batches(12)
    for module in (plain, cached):
        outputs = [module(ids, OFFSETS) for ids in data]  # the first rows are long gone
        for out in outputs:
            (out * out).sum().backward()
    assert_equal(cached.tables[0], plain.tables[0])
    assert cached.tables[0].stats().dropped_gradients == 0


@pytest.mark.parametrize("strategy", ["STEP", "NO_EVICTION"])
def test_a_row_that_comes_back_before_its_backward_gets_its_gradient(strategy: str) -> None:
    """Given as a whole row, it goes to the store past the cache."""
    changes = {"score_strategy": STRATEGY[strategy]}
    plain, cached = make(options(**changes)), make(options(DictStore, **changes))
    ids = torch.arange(100)
    for module in (plain, cached):
        (table,) = module.tables
        out = module(ids, OFFSETS)
        table.erase(ids[:10])
        rows = torch.ones(10, 8)
        table.insert(ids[:10], rows, state=torch.zeros(10, 16), scores=torch.arange(10))
        (out * out).sum().backward()
        assert not torch.equal(table.find(ids[:10]).embeddings, rows)
    assert_equal(cached.tables[0], plain.tables[0])
    assert cached.tables[0].stats().dropped_gradients == 0


def test_a_row_in_the_store_is_not_asked_for_admission_again(tmp_path: Path) -> None:
    changes = {
        "admit_strategy": FrequencyAdmissionStrategy(threshold=2),
        "admission_counter": KVCounter(capacity=65536),
    }
    plain = make(options(**changes))
    cached = make(options(SsdStore.at(tmp_path / "s"), **changes))
    data = batches(40)
    for expected, out in zip(train(plain, data), train(cached, data), strict=True):
        assert torch.equal(expected, out)
    assert_equal(cached.tables[0], plain.tables[0])
    assert cached.tables[0].stats().rejections == plain.tables[0].stats().rejections > 0


def test_evaluation_reads_through_and_moves_nothing(tmp_path: Path) -> None:
    plain, cached = make(options()), make(options(SsdStore.at(tmp_path / "s")))
    for module in (plain, cached):
        train(module, batches())
        module.eval()
    before = cached.tables[0].cache_stats()
    ids = torch.arange(-50, IDS + 50)  # many more than the cache has slots; some unknown
    offsets = torch.arange(0, len(ids) + 1, 3)
    offsets[-1] = len(ids)
    assert torch.equal(plain(ids, offsets), cached(ids, offsets))
    assert cached.tables[0].cache_stats() == before


def test_caching_over_host_memory_by_a_budget() -> None:
    plain = make(options())
    cached = make(options(caching=True, local_hbm_for_values=300 * 160))
    assert isinstance(cached.tables[0], CachedTable)
    data = batches()
    for expected, out in zip(train(plain, data), train(cached, data), strict=True):
        assert torch.equal(expected, out)
    assert_equal(cached.tables[0], plain.tables[0])
    assert cached.tables[0].cache_stats().bytes <= 300 * 160
    fits = make(options(caching=True, global_hbm_for_values=2**30))
    assert not isinstance(fits.tables[0], CachedTable)


def test_state_dict_over_both_levels(tmp_path: Path) -> None:
    plain, cached = make(options()), make(options(SsdStore.at(tmp_path / "s")))
    data = batches()
    train(plain, data[:20])
    train(cached, data[:20])
    restored = make(options(SsdStore.at(tmp_path / "t")))
    restored.load_state_dict(cached.state_dict())
    assert_equal(restored.tables[0], plain.tables[0])
    back = make(options())
    back.load_state_dict(restored.state_dict())
    for module in (plain, restored, back):
        train(module, data[20:])
    assert_equal(restored.tables[0], plain.tables[0])
    assert content(back.tables[0]) == content(plain.tables[0])


def test_a_store_that_is_opened_again_continues_from_its_snapshot(tmp_path: Path) -> None:
    plain = make(options())
    data = batches()
    train(plain, data)
    first = make(options(SsdStore.at(tmp_path / "s")))
    train(first, data[:15])
    first.tables[0].snapshot("half")
    train(first, data[:15])  # not to be kept
    first.tables[0].store.close()
    second = make(options(SsdStore.at(tmp_path / "s")), seed=99)
    second.tables[0].load_snapshot("half")
    train(second, data[15:])
    assert_equal(second.tables[0], plain.tables[0])
