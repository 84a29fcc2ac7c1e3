"""Sizes, full buckets, and what `safe_check_mode` does about ids that find no place."""

from __future__ import annotations

import warnings

import pytest
import torch

from dynamicemb.errors import InsertionError
from dynamicemb.options import MAX_BUCKET_CAPACITY, DynamicEmbCheckMode
from tables import contents, debug_value, ids_of_bucket, make_table, tensor


@pytest.mark.parametrize(
    ("max_capacity", "bucket_capacity", "capacity"),
    [
        (1, 16, 16),
        (16, 16, 16),
        (17, 16, 32),
        (1000, 128, 1024),
        (1025, 128, 1152),
        (1, 128, 128),
        (1, MAX_BUCKET_CAPACITY, 16),
        (100, MAX_BUCKET_CAPACITY, 112),
        (4096, MAX_BUCKET_CAPACITY, 4096),
    ],
)
def test_capacity_is_rounded_up_to_whole_buckets(
    max_capacity: int, bucket_capacity: int, capacity: int
) -> None:
    table = make_table(max_capacity=max_capacity, bucket_capacity=bucket_capacity)
    assert table.capacity == capacity
    width = capacity if bucket_capacity == MAX_BUCKET_CAPACITY else bucket_capacity
    assert table.bucket_capacity == width
    assert (len(table), table.size(), table.load_factor) == (0, 0, 0.0)


def test_one_bucket_holds_exactly_its_capacity() -> None:
    table = make_table("NO_EVICTION", max_capacity=1000, bucket_capacity=MAX_BUCKET_CAPACITY)
    out = table.find_or_insert(torch.arange(2000))
    assert out.slots.tolist() == [*range(1008)] + [-1] * 992
    assert table.load_factor == 1.0
    assert table.stats().failures == 992


def test_a_full_bucket_fails_reads_zero_and_is_counted() -> None:
    table = make_table()
    ids = [*range(1, 21), 17, 18, 1]  # 20 different ids for 16 slots
    out = table.find_or_insert(tensor(ids))
    assert out.slots.tolist() == [*range(16), -1, -1, -1, -1, -1, -1, 0]
    expected = [debug_value(i) if i <= 16 else 0.0 for i in ids]
    assert out.embeddings.tolist() == [[v] * 4 for v in expected]
    stats = table.stats()
    assert (stats.misses, stats.inserts, stats.failures, stats.size) == (20, 16, 4, 16)
    assert stats.evictions == 0
    assert table.contains(tensor(range(17, 21))).tolist() == [False] * 4


def test_only_the_full_bucket_fails() -> None:
    table = make_table("NO_EVICTION", max_capacity=32, max_load_factor=0.0)
    full, roomy = ids_of_bucket(0, 2, 18), ids_of_bucket(1, 2, 3)
    out = table.find_or_insert(tensor([*full, *roomy]))
    assert out.slots.tolist() == [*range(16), -1, -1, 16, 17, 18]


def test_no_eviction_never_evicts() -> None:
    table = make_table("NO_EVICTION")
    table.find_or_insert(tensor(range(16)))
    before = contents(table)
    out = table.find_or_insert(tensor(range(10, 30)), return_evicted=True)
    assert out.slots.tolist() == [*range(10, 16)] + [-1] * 14
    assert out.embeddings[6:].abs().max() == 0.0
    assert len(out.evicted.ids) == 0
    assert contents(table).ids.tolist() == before.ids.tolist()
    written = table.insert(tensor([3, 99]), torch.ones(2, 4), return_evicted=True)
    assert written.written.tolist() == [True, False]
    assert len(written.evicted.ids) == 0
    assert (table.stats().failures, table.stats().evictions) == (15, 0)


def test_a_place_that_becomes_free_is_used() -> None:
    table = make_table("NO_EVICTION")
    table.find_or_insert(tensor(range(17)))
    assert not table.contains(tensor([16])).item()
    table.erase(tensor([5]))
    assert table.find_or_insert(tensor([16])).slots.tolist() == [5]


def test_error_mode_raises_with_the_count() -> None:
    table = make_table(safe_check_mode=DynamicEmbCheckMode.ERROR, name="clicks")
    table.find_or_insert(tensor(range(16)))
    assert table.stats().failures == 0
    with pytest.raises(InsertionError, match=r"\b3\b") as raised:
        table.find_or_insert(tensor(range(100, 119)))
    assert "clicks" in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    assert table.stats().failures == 3
    # The table is in order and goes on.
    assert len(table) == 16
    assert table.find_or_insert(tensor([100])).slots.item() >= 0


def test_error_mode_raises_for_insert_too() -> None:
    table = make_table(safe_check_mode=DynamicEmbCheckMode.ERROR)
    with pytest.raises(InsertionError, match=r"\b2\b"):
        table.insert(tensor(range(18)), torch.zeros(18, 4))
    assert (len(table), table.stats().failures) == (16, 2)


def test_warning_mode_warns_with_the_count() -> None:
    table = make_table(safe_check_mode=DynamicEmbCheckMode.WARNING)
    with pytest.warns(UserWarning, match=r"\b4\b"):
        out = table.find_or_insert(tensor(range(20)))
    assert out.slots.tolist()[16:] == [-1] * 4
    assert out.embeddings[16:].tolist() == [[0.0] * 4] * 4
    assert table.stats().failures == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.find_or_insert(tensor(range(16)))  # nothing failed, nothing is said


def test_ignore_mode_says_nothing() -> None:
    table = make_table(safe_check_mode=DynamicEmbCheckMode.IGNORE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = table.find_or_insert(tensor(range(20)))
    assert out.slots.tolist()[16:] == [-1] * 4
    assert table.stats().failures == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 129])
def test_failed_rows_read_zero_in_every_type_and_width(dtype: torch.dtype, dim: int) -> None:
    table = make_table(dim=dim, embedding_dtype=dtype)
    out = table.find_or_insert(tensor(range(1, 21)))
    assert out.embeddings.shape == (20, dim)
    assert out.embeddings.dtype == dtype
    assert out.embeddings[16:].eq(0).all()
    assert out.embeddings[:16].eq(torch.arange(1, 17).unsqueeze(1)).all()


def test_an_empty_batch_changes_nothing() -> None:
    table = make_table()
    table.find_or_insert(tensor(range(5)))
    before = contents(table)
    none = tensor([])
    out = table.find_or_insert(none, return_evicted=True)
    assert out.embeddings.shape == (0, 4)
    assert out.slots.shape == (0,)
    assert table.find(none).embeddings.shape == (0, 4)
    assert table.contains(none).shape == (0,)
    assert table.insert(none, torch.empty(0, 4)).written.shape == (0,)
    assert table.assign(none, torch.empty(0, 4)).shape == (0,)
    assert table.erase(none).shape == (0,)
    assert contents(table).ids.tolist() == before.ids.tolist()
    assert contents(table).scores.tolist() == before.scores.tolist()


def test_all_ids_equal() -> None:
    table = make_table("LFU")
    out = table.find_or_insert(torch.full((100_000,), -7))
    assert out.slots.eq(0).all()
    assert out.embeddings.eq(debug_value(-7)).all()
    assert contents(table).scores.tolist() == [100_000]
    assert (table.stats().misses, table.stats().inserts) == (1, 1)


def test_ten_million_ids_in_one_batch() -> None:
    table = make_table("LFU", dim=1, max_capacity=1 << 22, bucket_capacity=128)
    ids = torch.arange(10_000_000) % 1_000_003
    out = table.find_or_insert(ids)
    assert len(table) == 1_000_003
    assert torch.equal(out.embeddings.squeeze(1), (ids % 100_000).float())
    assert out.slots[:1_000_003].unique().numel() == 1_000_003
    assert torch.equal(out.slots[1_000_003:], out.slots[: 10_000_000 - 1_000_003])
    assert contents(table).scores.sum().item() == 10_000_000


def test_stats_add_up_over_batches() -> None:
    table = make_table()
    table.find_or_insert(tensor([1, 1, 2, 3]))
    table.find_or_insert(tensor([3, 3, 4]))
    table.find(tensor([1, 99]))
    table.contains(tensor([1, 99]))
    stats = table.stats()
    assert (stats.hits, stats.misses, stats.inserts) == (1, 4, 4)
    assert (stats.evictions, stats.failures, stats.rejections) == (0, 0, 0)
    assert (stats.size, stats.capacity, stats.load_factor) == (4, 16, 0.25)
    assert stats.bytes >= 4 * (4 * 4 + 8 + 8)  # four rows, their ids and scores


@pytest.mark.parametrize(
    ("width", "load", "share"),
    [
        *((16, 0.5, 8.0e-4), (16, 0.75, 2.1e-2), (16, 0.9, 6.0e-2)),
        *((128, 0.5, 1.9e-14), (128, 0.75, 2.8e-5), (128, 0.9, 5.6e-3)),
    ],
)
def test_share_of_ids_that_do_not_fit_is_as_predicted(
    width: int, load: float, share: float
) -> None:
    """The share of distinct ids that find their bucket full, against the Poisson figure."""
    capacity = 2**22 if share < 1e-3 else 2**18
    table = make_table(
        "NO_EVICTION", dim=1, max_capacity=capacity, bucket_capacity=width, max_load_factor=0.0
    )
    count = int(load * capacity)
    table.find_or_insert(torch.arange(count) * 7919)
    failed = table.stats().failures
    expected = share * count
    # Within 15 %, or three standard deviations of a count of so few.
    assert failed == pytest.approx(expected, rel=0.15, abs=3 * expected**0.5)
