"""Rows given by the caller: insert, assign, erase, clear."""

from __future__ import annotations

import pytest
import torch

from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from reference import STRATEGIES
from tables import Clock, contents, ids_of_bucket, make_table, score_list, score_tensor, tensor


def rows_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1).repeat(1, 4)


def adagrad() -> Optimizer:
    return Optimizer(OptimizerKind.ADAGRAD, OptimizerArgs(initial_accumulator_value=0.5))


def test_insert_adds_and_overwrites() -> None:
    table = make_table()
    table.find_or_insert(tensor([1, 2]))
    out = table.insert(tensor([2, 3]), rows_of(20, 30), scores=tensor([5, 6]))
    assert out.written.tolist() == [True, True]
    rows = contents(table)
    assert rows.ids.tolist() == [1, 2, 3]
    assert rows.embeddings[:, 0].tolist() == [1.0, 20.0, 30.0]
    assert rows.scores.tolist()[1:] == [5, 6]
    stats = table.stats()
    assert (stats.inserts, stats.misses, stats.hits) == (3, 2, 0)  # no training batch, no hit


def test_the_last_duplicate_wins() -> None:
    table = make_table(optimizer=adagrad())
    ids = tensor([7, 8, 7, 9, 7, 8])
    state = rows_of(10, 20, 30, 40, 50, 60)
    out = table.insert(ids, rows_of(1, 2, 3, 4, 5, 6), state=state, scores=tensor(range(6)))
    assert out.written.all()
    rows = contents(table)
    assert rows.ids.tolist() == [7, 8, 9]  # slots in order of first occurrence
    assert rows.embeddings[:, 0].tolist() == [5.0, 6.0, 4.0]
    assert rows.state[:, 0].tolist() == [50.0, 60.0, 40.0]
    assert rows.scores.tolist() == [4, 5, 3]
    assert table.assign(tensor([7, 7]), rows_of(100, 200)).tolist() == [True, True]
    assert table.find(tensor([7])).embeddings.tolist() == [[200.0] * 4]


def test_insert_evicts_the_smallest_score_it_did_not_touch() -> None:
    table = make_table()
    table.insert(tensor(range(16)), torch.zeros(16, 4), scores=tensor(range(16)))
    out = table.insert(
        tensor([100, 0, 101]), rows_of(1, 2, 3), scores=tensor([0, 0, 0]), return_evicted=True
    )
    assert out.written.tolist() == [True, True, True]
    assert out.evicted.ids.tolist() == [1, 2]  # 0 is overwritten by this batch and stays
    assert out.evicted.scores.tolist() == [1, 2]
    assert contents(table).ids.tolist() == [0, 100, 101, *range(3, 16)]
    assert table.stats().evictions == 2


def test_insert_fails_when_the_batch_fills_the_bucket() -> None:
    table = make_table(max_capacity=32, max_load_factor=0.0)
    ids = ids_of_bucket(0, 2, 20)
    out = table.insert(tensor([*ids, ids[18]]), torch.ones(21, 4))
    assert out.written.tolist() == [True] * 16 + [False] * 5
    assert table.stats().failures == 4
    assert contents(table).ids.tolist() == ids[:16]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_given_scores_are_stored_as_they_are(strategy: str) -> None:
    table = make_table(strategy)
    if strategy == "CUSTOMIZED":
        table.set_score(1)
    words = 2 if strategy == "TIMESTAMP_LFU" else 1
    scores = [(2**64 - 1, 3)[:words], (0, 2**64 - 1)[:words], (2**63, 2**63)[:words]]
    table.insert(tensor([1, 2, 3]), rows_of(1, 2, 3), scores=score_tensor(scores, words))
    assert score_list(contents(table).scores) == scores
    scores.reverse()
    table.assign(tensor([1, 2, 3]), rows_of(1, 2, 3), scores=score_tensor(scores, words))
    assert score_list(contents(table).scores) == scores


def test_insert_without_scores_uses_the_strategy() -> None:
    clock = Clock(42)
    table = make_table(clock=clock)
    table.insert(tensor([1, 2]), rows_of(1, 2))
    assert contents(table).scores.tolist() == [42, 42]
    table = make_table("STEP")
    table.find_or_insert(tensor([5]))
    table.insert(tensor([1]), rows_of(1))
    assert contents(table).scores.tolist() == [1, 2]
    assert table.get_score() == 2  # inserting is no training step


def test_assign_changes_only_what_is_there() -> None:
    table = make_table(clock=Clock(9))
    table.find_or_insert(tensor([1, 2]))
    assert table.assign(tensor([2, 3, 2]), rows_of(5, 6, 7)).tolist() == [True, False, True]
    rows = contents(table)
    assert rows.ids.tolist() == [1, 2]
    assert rows.embeddings[:, 0].tolist() == [1.0, 7.0]
    assert rows.scores.tolist() == [9, 9]
    stats = table.stats()
    assert (stats.inserts, stats.misses, stats.evictions) == (2, 2, 0)


def test_assign_without_state_and_scores_keeps_them() -> None:
    table = make_table(optimizer=adagrad())
    table.insert(tensor([1]), rows_of(1), state=rows_of(11), scores=tensor([77]))
    table.assign(tensor([1]), rows_of(2))
    rows = contents(table)
    assert rows.embeddings.tolist() == [[2.0] * 4]
    assert rows.state.tolist() == [[11.0] * 4]
    assert rows.scores.tolist() == [77]


def test_insert_without_state_starts_the_state() -> None:
    table = make_table(optimizer=adagrad())
    table.insert(tensor([1]), rows_of(1))
    assert contents(table).state.tolist() == [[0.5] * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_come_back_bit_equal(dtype: torch.dtype) -> None:
    table = make_table(
        dim=7, max_capacity=256, max_load_factor=0.0, embedding_dtype=dtype, optimizer=adagrad()
    )
    ids = torch.randint(-(2**63), 2**63 - 1, (80,))
    embeddings = torch.randn(80, 7).to(dtype)
    embeddings[0] = torch.tensor([0.0, -0.0, 1e-7, 65504.0, -1.0, 3.0, 1e-40]).to(dtype)
    state = torch.randn(80, 7)
    written = table.insert(ids, embeddings, state=state).written
    found = table.find(ids)
    assert found.found.tolist() == written.tolist()
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    same = found.embeddings.view(bits) == embeddings.view(bits)
    assert same[written].all()
    assert torch.equal(found.state[written], state[written])


def test_tensors_that_are_not_contiguous() -> None:
    table = make_table(optimizer=adagrad(), max_capacity=64)
    ids = torch.arange(20)[::2]
    embeddings = torch.arange(40.0).reshape(4, 10).t()
    state = torch.arange(80.0).reshape(10, 8)[:, ::2]
    scores = torch.arange(30)[::3]
    table.insert(ids, embeddings, state=state, scores=scores)
    found = table.find(ids)
    assert torch.equal(found.embeddings, embeddings)
    assert torch.equal(found.state, state)
    assert torch.equal(found.scores, scores)
    assert table.find_or_insert(torch.arange(20)[::2]).slots.ge(0).all()
    assert table.stats().hits == 10


def test_a_tensor_that_is_negated_lazily() -> None:
    """Such a view has the bits of what it negates; reading its memory would miss the sign."""
    rows = torch._neg_view(rows_of(1, 2))
    assert rows.is_neg()
    table = make_table()
    table.insert(tensor([1, 2]), rows)
    assert contents(table).embeddings[:, 0].tolist() == [-1.0, -2.0]


def test_the_table_keeps_no_hold_on_its_arguments() -> None:
    table = make_table()
    ids, rows = tensor([1, 2]), rows_of(1, 2)
    table.insert(ids, rows)
    rows.fill_(99.0)
    ids.fill_(5)
    assert contents(table).ids.tolist() == [1, 2]
    assert contents(table).embeddings[:, 0].tolist() == [1.0, 2.0]
    out = table.find_or_insert(tensor([1]))
    out.embeddings.fill_(99.0)
    assert table.find(tensor([1])).embeddings.tolist() == [[1.0] * 4]


def test_erase() -> None:
    table = make_table()
    table.find_or_insert(tensor(range(6)))
    assert table.erase(tensor([3, 99, 3, 0])).tolist() == [True, False, False, True]
    assert contents(table).ids.tolist() == [1, 2, 4, 5]
    assert len(table) == 4
    assert table.stats().evictions == 0
    assert not table.find(tensor([3])).found.any()
    # The lowest free slot is used first, whatever was erased first.
    assert table.find_or_insert(tensor([50, 51, 52])).slots.tolist() == [0, 3, 6]


def test_an_erased_id_starts_anew() -> None:
    table = make_table("LFU", optimizer=adagrad())
    table.insert(tensor([1]), rows_of(9), state=rows_of(8), scores=tensor([1000]))
    table.erase(tensor([1]))
    table.find_or_insert(tensor([1]))
    rows = contents(table)
    assert rows.embeddings.tolist() == [[1.0] * 4]
    assert rows.state.tolist() == [[0.5] * 4]
    assert rows.scores.tolist() == [1]


def test_clear() -> None:
    table = make_table(max_capacity=64)
    table.find_or_insert(torch.arange(40))
    capacity = table.capacity
    table.clear()
    assert (len(table), table.size(), table.load_factor, table.capacity) == (0, 0, 0.0, capacity)
    assert not table.contains(torch.arange(40)).any()
    assert list(table.export()) == []
    stats = table.stats()
    assert stats.size == 0
    table.clear()  # of an empty table
    assert table.find_or_insert(tensor([1])).slots.item() >= 0


def test_find_gives_missing_ids_the_evaluation_value() -> None:
    from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

    constant = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.125)
    table = make_table(eval_initializer_args=constant)
    table.find_or_insert(tensor([1]))
    found = table.find(tensor([1, 2, 1]))
    assert found.found.tolist() == [True, False, True]
    assert found.embeddings.tolist() == [[1.0] * 4, [0.125] * 4, [1.0] * 4]
    assert make_table().find(tensor([5])).embeddings.tolist() == [[0.0] * 4]


def test_find_changes_nothing_at_all() -> None:
    table = make_table("LFU")
    table.find_or_insert(tensor([1, 2, 2]))
    before, stats = contents(table), table.stats()
    for _ in range(3):
        table.find(tensor([1, 2, 3, 3]))
        table.contains(tensor([1, 2, 3, 3]))
    assert contents(table).scores.tolist() == before.scores.tolist()
    assert table.stats() == stats


def test_new_rows_start_with_the_state_of_the_present_optimizer() -> None:
    table = make_table(optimizer=adagrad())
    table.find_or_insert(tensor([1]))
    arguments = OptimizerArgs(initial_accumulator_value=0.25)
    table.set_optimizer(Optimizer(OptimizerKind.ADAGRAD, arguments))
    table.find_or_insert(tensor([2]))
    state = table.find(tensor([1, 2])).state
    assert state[:, 0].tolist() == [0.5, 0.25]  # rows that are there keep theirs
