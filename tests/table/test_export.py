"""Export: slot order, bounded batches, score threshold."""

from __future__ import annotations

import pytest
import torch

from dynamicemb.errors import DynamicEmbError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from tables import Clock, contents, equal_rows, make_table, score_tensor, tensor


def test_rows_come_in_slot_order() -> None:
    table = make_table(max_capacity=256)
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    slots = table.find_or_insert(ids).slots
    placed = slots >= 0
    in_order = ids[placed][torch.argsort(slots[placed])]
    assert torch.equal(contents(table).ids, in_order)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 99, 100, 101, 65536])
def test_batches_are_bounded_and_together_complete(batch_size: int) -> None:
    table = make_table(max_capacity=512)
    table.find_or_insert(torch.arange(100))
    whole = contents(table)
    batches = list(table.export(batch_size=batch_size))
    assert all(0 < len(b.ids) <= batch_size for b in batches)
    assert torch.equal(torch.cat([b.ids for b in batches]), whole.ids)
    assert torch.equal(torch.cat([b.embeddings for b in batches]), whole.embeddings)
    assert torch.equal(torch.cat([b.scores for b in batches]), whole.scores)
    for batch in batches:
        assert batch.embeddings.shape == (len(batch.ids), 4)
        assert batch.state.shape == (len(batch.ids), 0)


def test_a_row_is_exported_whole() -> None:
    optimizer = Optimizer(OptimizerKind.ADAGRAD, OptimizerArgs(initial_accumulator_value=0.5))
    table = make_table(optimizer=optimizer, embedding_dtype=torch.bfloat16, clock=Clock(8))
    table.find_or_insert(tensor([3]))
    rows = contents(table)
    assert rows.ids.dtype == torch.int64
    assert rows.embeddings.dtype == torch.bfloat16
    assert rows.state.dtype == torch.float32
    assert rows.embeddings.tolist() == [[3.0] * 4]
    assert rows.state.tolist() == [[0.5] * 4]
    assert rows.scores.tolist() == [8]


def test_an_empty_table_exports_no_batch() -> None:
    table = make_table()
    assert list(table.export()) == []
    table.find_or_insert(tensor([1]))
    table.erase(tensor([1]))
    assert list(table.export()) == []


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        (0, [0, 1, 2, 3, 4]),
        (1, [1, 2, 3, 4]),
        (6, [2, 3, 4]),
        (2**63, [3, 4]),
        (2**63 + 1, [4]),
        (2**64 - 1, [4]),
    ],
)
def test_threshold_is_inclusive_and_unsigned(threshold: int | None, expected: list[int]) -> None:
    table = make_table()
    scores = [0, 5, 6, 2**63, 2**64 - 1]
    table.insert(torch.arange(5), torch.zeros(5, 4), scores=tensor(scores))
    assert contents(table, score_threshold=threshold).ids.tolist() == expected


def test_threshold_of_the_pair_is_about_the_time() -> None:
    table = make_table("TIMESTAMP_LFU")
    scores = score_tensor([(10, 99), (20, 1), (30, 5)], words=2)
    table.insert(tensor([1, 2, 3]), torch.zeros(3, 4), scores=scores)
    assert contents(table, score_threshold=20).ids.tolist() == [2, 3]
    assert contents(table, score_threshold=31).ids.tolist() == []


def test_what_changed_since_the_last_score() -> None:
    table = make_table("STEP", max_capacity=64)
    table.find_or_insert(tensor([1, 2, 3]))
    since = table.get_score()
    table.find_or_insert(tensor([2, 9]))
    assert sorted(contents(table, score_threshold=since).ids.tolist()) == [2, 9]
    assert contents(table, score_threshold=table.get_score()).ids.tolist() == []


def test_threshold_and_batches_together() -> None:
    table = make_table(max_capacity=1024)
    table.insert(torch.arange(300), torch.zeros(300, 4), scores=torch.arange(300))
    batches = list(table.export(batch_size=16, score_threshold=150))
    assert all(0 < len(b.ids) <= 16 for b in batches)
    assert sorted(torch.cat([b.ids for b in batches]).tolist()) == list(range(150, 300))


def test_export_changes_nothing() -> None:
    table = make_table(max_capacity=64)
    table.find_or_insert(torch.arange(40))
    stats = table.stats()
    first, second = contents(table), contents(table)
    assert equal_rows(first, second)
    assert table.stats() == stats


def test_exported_rows_are_copies() -> None:
    table = make_table()
    table.find_or_insert(tensor([1, 2]))
    rows = contents(table)
    rows.embeddings.fill_(99.0)
    rows.scores.fill_(0)
    assert contents(table).embeddings.tolist() == [[1.0] * 4, [2.0] * 4]
    (batch,) = table.export()
    table.find_or_insert(tensor([3]))
    table.clear()
    assert batch.embeddings.tolist() == [[1.0] * 4, [2.0] * 4]


def test_an_export_goes_back_in() -> None:
    source = make_table("LFU", max_capacity=512)
    source.find_or_insert(torch.randint(0, 150, (1000,)))
    target = make_table("LFU", max_capacity=512)
    for batch in source.export(batch_size=17):
        assert target.insert(batch.ids, batch.embeddings, scores=batch.scores).written.all()
    assert equal_rows(contents(source), contents(target))


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, None])
def test_a_bad_batch_size_is_refused(batch_size: object) -> None:
    with pytest.raises(DynamicEmbError, match="batch_size"):
        list(make_table().export(batch_size=batch_size))


@pytest.mark.parametrize("threshold", [-1, 2**64, 1.5, "1"])
def test_a_bad_threshold_is_refused(threshold: object) -> None:
    with pytest.raises(DynamicEmbError, match="score_threshold"):
        list(make_table().export(score_threshold=threshold))
