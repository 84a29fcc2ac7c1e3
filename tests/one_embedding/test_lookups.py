"""What a lookup gives: shapes, tables, new rows, padding, evaluation, capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from embeddings import DIM, STORES, make, rows_of, store_options, uniform_tables
from torch.optim.swa_utils import AveragedModel

from dynamicemb import one_embedding
from dynamicemb.errors import (
    ArgumentTypeError,
    InsertionError,
    InvalidArgumentError,
    UsageError,
)

IDS = torch.tensor([[1, 2, 3], [4, 2, 9], [-1, 2**62, -(2**63)]])


@pytest.mark.parametrize("store", STORES)
def test_output_has_a_row_for_each_id(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store, tables=uniform_tables(0.1, 0.2, 0.3))
    out = embedding(IDS)
    assert out.shape == (3, 3, DIM)
    assert out.dtype == torch.float32
    assert torch.equal(out[0, 1], out[1, 1])  # the same id
    assert len(embedding.tables[0]) == 8
    assert embedding(IDS[:0]).shape == (0, 3, DIM)
    assert embedding(torch.tensor(7), torch.tensor(2)).shape == (DIM,)


@pytest.mark.parametrize("store", STORES)
def test_each_table_starts_rows_in_its_own_way(tmp_path: Path, store: str) -> None:
    embedding = make(tmp_path, store, tables=uniform_tables(0.1, 0.05, 0.15), dim=64)
    out = embedding(torch.arange(3000).view(-1, 3)).abs().amax((0, 2))
    for highest, bound in zip(out.tolist(), (0.1, 0.05, 0.15), strict=True):
        assert 0.99 * bound < highest <= bound


def test_four_distributions(tmp_path: Path) -> None:
    tables = [
        one_embedding.make_table(one_embedding.make_uniform_initializer(2.0, 3.0)),
        one_embedding.make_table(one_embedding.make_normal_initializer(5.0, 0.1)),
        one_embedding.make_table(one_embedding.make_constant_initializer(-1.5)),
        one_embedding.make_table(one_embedding.make_trunc_normal_initializer(0.0, 1.0, 0.5, 2.0)),
    ]
    out = make(tmp_path, tables=tables, dim=32)(torch.arange(4000).view(-1, 4))
    mean, std = out.mean((0, 2)), out.std((0, 2))
    torch.testing.assert_close(mean[:3], torch.tensor([2.5, 5.0, -1.5]), atol=0.01, rtol=0)
    torch.testing.assert_close(std[:3], torch.tensor([12**-0.5, 0.1, 0.0]), atol=0.01, rtol=0)
    assert out[:, 3].min() >= 0.5
    assert out[:, 3].max() <= 2.0


def test_without_tables_rows_are_normal(tmp_path: Path) -> None:
    out = make(tmp_path, dim=64)(torch.arange(2000))
    assert abs(out.std().item() - 0.05) < 0.001
    other = make(tmp_path / "b", default_initializer=one_embedding.make_constant_initializer(0.25))
    assert torch.equal(other(torch.arange(3)), torch.full((3, DIM), 0.25))


@pytest.mark.parametrize("store", STORES)
def test_a_frozen_embedding_reads_what_new_rows_would_be_and_keeps_none(
    tmp_path: Path, store: str
) -> None:
    embedding = make(tmp_path, store, tables=uniform_tables(0.1, 0.2, 0.3))
    embedding(IDS)
    embedding.requires_grad_(False)
    before = len(embedding.tables[0])
    out = embedding(IDS + 100)
    assert not out.requires_grad
    assert len(embedding.tables[0]) == before
    assert torch.equal(embedding.eval()(IDS + 100), out)
    embedding.train().requires_grad_(True)
    assert torch.equal(embedding(IDS + 100), out)
    assert len(embedding.tables[0]) == before + 9 - 1


def test_columns_start_apart(tmp_path: Path) -> None:
    def table(*values: float) -> dict[str, Any]:
        columns = [
            one_embedding.make_column_options(one_embedding.make_constant_initializer(value))
            for value in values
        ]
        return one_embedding.make_table_options(columns)

    embedding = make(
        tmp_path,
        dim=[2, 3],
        tables=[table(1, 2), table(3, 4)],
        module=one_embedding.MultiTableMultiColumnEmbedding,
    )
    assert embedding.embedding_dim == 5
    out = embedding(torch.tensor([[1, 2]]))
    assert out.tolist() == [[[1, 1, 2, 2, 2], [3, 3, 4, 4, 4]]]
    one_width = make(
        tmp_path / "b",
        dim=4,
        tables=uniform_tables(0.5),
        module=one_embedding.MultiTableMultiColumnEmbedding,
    )
    assert one_width(torch.tensor([[1]])).shape == (1, 1, 4)


def test_new_rows_depend_on_seed_and_id_alone(tmp_path: Path) -> None:
    tables = uniform_tables(0.1, 0.2)
    ids = torch.tensor([[3, 1], [2, 5]])
    first = make(tmp_path / "a", tables=tables)(ids)
    other = make(tmp_path / "b", "cached_ssd", tables=tables)
    assert torch.equal(other(ids.flip(0)), first.flip(0))
    assert not torch.equal(make(tmp_path / "c", tables=tables, seed=1)(ids), first)


# ---- which table an id is of ----


def test_table_ids_name_the_table_of_each_id(tmp_path: Path) -> None:
    embedding = make(tmp_path, tables=uniform_tables(0.001, 100.0), dim=32)
    ids = torch.tensor([10, 11, 12, 13])
    out = embedding(ids, torch.tensor([0, 1, 1, 0]))
    assert [row.abs().max() > 1 for row in out] == [False, True, True, False]
    # Of the last axes alone; any integer type.
    ids = torch.arange(100, 106).view(3, 2)
    out = embedding(ids, torch.tensor([1, 0], dtype=torch.uint8))
    assert (out[:, 0].abs().amax(1) > 1).all()
    assert (out[:, 1].abs() <= 0.001).all()


@pytest.mark.parametrize(
    ("ids", "table_ids", "problem"),
    [
        (torch.zeros(4, 3, dtype=torch.int64), None, "ids.shape is \\(4, 3\\); allowed: 2 in the"),
        (torch.tensor(5), None, "ids.shape is \\(\\); allowed: 2 in the last"),
        (torch.tensor([1, 2]), torch.tensor([0, 2]), "table_ids is 2; allowed: from 0 to 1"),
        (torch.tensor([1, 2]), torch.tensor([0, -1]), "table_ids is -1"),
        (torch.tensor([1, 2]), torch.tensor([0, 1, 1]), "table_ids.shape is \\(3,\\)"),
        (torch.tensor([1, 2]), torch.tensor([0.0, 1.0]), "table_ids is torch.float32"),
        (torch.tensor([1, 2], dtype=torch.int32), None, "ids.dtype is torch.int32.*key_type"),
        ([1, 2], None, "ids is \\[1, 2\\]"),
    ],
)
def test_wrong_ids_change_nothing(
    tmp_path: Path, ids: Any, table_ids: torch.Tensor | None, problem: str
) -> None:
    embedding = make(tmp_path, tables=uniform_tables(0.1, 0.2))
    with pytest.raises((InvalidArgumentError, ArgumentTypeError), match=problem):
        embedding(ids, table_ids)
    assert len(embedding.tables[0]) == 0


def test_with_one_table_nobody_asks_which(tmp_path: Path) -> None:
    embedding = make(tmp_path, tables=uniform_tables(0.1))
    ids = torch.tensor([1, 2, 3])
    assert torch.equal(embedding(ids), embedding(ids, torch.tensor([9, 9, 9])))


def test_tables_share_ids_unless_told_otherwise(tmp_path: Path) -> None:
    tables, ids = uniform_tables(0.001, 100.0), torch.tensor([[7, 7], [-7, -7]])
    shared = make(tmp_path / "a", tables=tables)
    out = shared(ids)
    assert torch.equal(out[:, 0], out[:, 1])
    assert (out.abs() <= 0.001).all()  # as the first table starts them
    assert len(shared.tables[0]) == 2

    apart = make(tmp_path / "b", tables=tables, share_ids=False)
    out = apart(ids)
    assert (out[:, 0].abs() <= 0.001).all()
    assert (out[:, 1].abs().amax(1) > 1).all()
    assert len(apart.tables[0]) == 4
    torch.optim.SGD(apart.parameters(), lr=1.0)
    apart(ids)[:, 1].sum().backward()
    torch.optim.SGD(apart.parameters(), lr=1.0).step()
    assert torch.equal(apart(ids)[:, 0], out[:, 0])
    assert torch.equal(apart(ids)[:, 1], out[:, 1] - 1)


@pytest.mark.parametrize(
    ("key_type", "wrong"),
    [(torch.int64, [2**55, -(2**55) - 1]), (torch.uint64, [2**56, 2**64 - 1])],
)
def test_ids_that_leave_no_room_for_the_table_are_refused(
    tmp_path: Path, key_type: torch.dtype, wrong: list[int]
) -> None:
    embedding = make(tmp_path, tables=uniform_tables(0.1, 0.2), key_type=key_type, share_ids=False)
    good = [2**55 - 1, -(2**55)] if key_type is torch.int64 else [2**56 - 1, 0]
    for id_ in good:
        embedding(torch.tensor([[id_, 1]], dtype=key_type))
    for id_ in wrong:
        with pytest.raises(InvalidArgumentError, match=f"an id is {id_}; .*share_ids=False"):
            embedding(torch.tensor([[id_, 1]], dtype=key_type))
    assert len(embedding.tables[0]) == 3


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    ("key_type", "ids"),
    [
        (torch.int32, [-1, 0, 2**31 - 1, -(2**31)]),
        (torch.uint32, [1, 0, 2**31, 2**32 - 1]),
        (torch.uint64, [1, 0, 2**50, 2**56 - 1]),
    ],
)
def test_other_types_of_ids(
    tmp_path: Path, key_type: torch.dtype, ids: list[int], folded: bool
) -> None:
    embedding = make(
        tmp_path, key_type=key_type, tables=uniform_tables(0.1, 0.2), share_ids=not folded
    )
    out = embedding(torch.tensor(ids, dtype=key_type).view(2, 2)).view(4, DIM)
    assert len(torch.unique(out, dim=0)) == 4
    assert len(embedding.tables[0]) == 4


# ---- padding, evaluation ----


@pytest.mark.parametrize("share_ids", [True, False])
@pytest.mark.parametrize("padding_idx", [0, -1])
def test_padding_reads_zeros_and_is_not_stored(
    tmp_path: Path, padding_idx: int, share_ids: bool
) -> None:
    embedding = make(
        tmp_path, tables=uniform_tables(0.1, 0.2), padding_idx=padding_idx, share_ids=share_ids
    )
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor([[5, padding_idx], [padding_idx, 6]])
    for _ in range(2):
        out = embedding(ids)
        assert (out[0, 1] == 0).all()
        assert (out[1, 0] == 0).all()
        assert (out[0, 0] != 0).any()
        out.sum().backward()
        optimizer.step()
    assert len(embedding.tables[0]) == 2
    embedding.eval()
    assert (embedding(ids)[0, 1] == 0).all()
    assert (embedding(ids)[0, 0] != 0).any()


@pytest.mark.parametrize("store", STORES)
def test_evaluation_reads_first_values_and_stores_nothing(tmp_path: Path, store: str) -> None:
    tables = uniform_tables(0.001, 100.0)
    embedding = make(tmp_path / "a", store, tables=tables)
    known, new = torch.tensor([[1, 2]]), torch.tensor([[1, 20], [30, 2]])
    embedding(known)
    embedding.eval()
    out = embedding(new)
    assert len(embedding.tables[0]) == 2
    assert torch.equal(out, make(tmp_path / "b", tables=tables)(new))
    before = embedding.tables[0].stats()
    embedding(new)
    assert embedding.tables[0].stats() == before
    embedding.train()
    assert torch.equal(embedding(new), out)
    assert len(embedding.tables[0]) == 4


# ---- capacity ----


@pytest.mark.parametrize("store", ["device_mem", "cached_host_mem"])
@pytest.mark.parametrize("tables", [1, 2])
def test_more_rows_than_the_capacity_are_an_error(tmp_path: Path, store: str, tables: int) -> None:
    options = store_options(store, tmp_path, capacity=1000)
    embedding = make(tmp_path, options=options, tables=uniform_tables(0.1, 0.2)[:tables])
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.arange(1000).view(-1, tables)).sum().backward()  # to the last one
    optimizer.step()
    before = rows_of(embedding, torch.arange(1000))
    with pytest.raises(InsertionError, match="2 new ids would make 1002 rows.*on_full='grow'"):
        embedding(torch.tensor([5, 1001, 1000, 1001]).view(-1, tables))
    assert len(embedding.tables[0]) == 1000
    assert torch.equal(rows_of(embedding, torch.arange(1000)), before)
    embedding(torch.arange(1000).view(-1, tables)).sum().backward()  # and goes on
    optimizer.step()


@pytest.mark.parametrize("store", ["device_mem", "cached_host_mem"])
def test_or_the_table_grows(tmp_path: Path, store: str) -> None:
    options = store_options(store, tmp_path, capacity=1000, on_full="grow")
    embedding = make(tmp_path, options=options, tables=uniform_tables(0.1))
    reference = make(tmp_path / "b", tables=uniform_tables(0.1))
    for ids in torch.arange(20_000).split(1000):
        assert torch.equal(embedding(ids[:, None]), reference(ids[:, None]))
    assert len(embedding.tables[0]) == 20_000


def test_an_ssd_takes_more_than_the_hint(tmp_path: Path) -> None:
    options = store_options("cached_ssd", tmp_path, capacity=10)
    embedding = make(tmp_path, options=options)
    embedding(torch.arange(5000))
    assert len(embedding.tables[0]) == 5000


def test_ids_that_fill_one_bucket_have_room(tmp_path: Path) -> None:
    """The capacity is kept for any ids: a bucket that is full first makes the table grow."""
    options = store_options("device_mem", tmp_path, capacity=2000)
    embedding = make(tmp_path, options=options)
    many = torch.arange(1_000_000)
    buckets = embedding.tables[0].bucket_of(many)
    ids = many[buckets == 3][:1500]
    out = embedding(ids)
    assert len(embedding.tables[0]) == len(ids) > 1000
    assert (out != 0).any(1).all()


def test_a_batch_that_does_not_fit_the_cache_says_what_to_do(tmp_path: Path) -> None:
    embedding = make(tmp_path, "cached_ssd", dim=64)
    with pytest.raises(InsertionError, match="raise cache_budget_mb, or make the batches smaller"):
        embedding(torch.arange(100_000))


def test_a_moving_average_of_a_model_is_refused_when_it_is_made(tmp_path: Path) -> None:
    embedding = make(tmp_path)
    embedding(torch.arange(3))
    with pytest.raises(UsageError, match="cannot be copied or pickled; use save_snapshot"):
        AveragedModel(embedding)
    with torch.no_grad():
        embedding.shadow.mul_(0.9)  # as averages of their own do
    with pytest.raises(UsageError, match="something changed the parameter"):
        embedding(torch.arange(3))
