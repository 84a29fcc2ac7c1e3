"""A new row is a pure function of (table seed, id, column), and has the distribution asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from dynamicemb.table import Table
from tables import EXTREME_IDS, contents, debug_value, make_table, tensor

Mode = DynamicEmbInitializerMode
ARGS = {
    "uniform": DynamicEmbInitializerArgs(mode=Mode.UNIFORM, lower=-0.5, upper=1.5),
    "normal": DynamicEmbInitializerArgs(mode=Mode.NORMAL, mean=2.0, std_dev=0.5),
    "truncated": DynamicEmbInitializerArgs(
        mode=Mode.TRUNCATED_NORMAL, mean=0.0, std_dev=1.0, lower=-1.0, upper=2.0
    ),
}
COUNT, DIM = 40_000, 16


def new_table(args: DynamicEmbInitializerArgs, **options: Any) -> Table:
    options = {"dim": DIM, "max_capacity": 1 << 17, "bucket_capacity": 128, "seed": 3} | options
    return make_table(initializer_args=args, **options)


def rows_for(table: Table, ids: torch.Tensor) -> torch.Tensor:
    out = table.find_or_insert(ids)
    assert out.slots.ge(0).all()
    return out.embeddings


@pytest.mark.parametrize("kind", ARGS)
def test_order_and_batches_do_not_matter(kind: str) -> None:
    ids = torch.cat([torch.arange(3000) * 0x9E3779B97F4A7C1, tensor(EXTREME_IDS[:-2])])
    at_once = rows_for(new_table(ARGS[kind]), ids)

    backwards = new_table(ARGS[kind])
    assert torch.equal(rows_for(backwards, ids.flip(0)).flip(0), at_once)

    split = new_table(ARGS[kind], max_capacity=1 << 16, init_capacity=128)  # and it grows
    assert torch.equal(torch.cat([rows_for(split, part) for part in ids.split(77)]), at_once)

    twice = torch.cat([ids, ids])
    assert torch.equal(rows_for(new_table(ARGS[kind]), twice), torch.cat([at_once, at_once]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ARGS)
def test_what_new_rows_would_be_can_be_asked(kind: str, dtype: torch.dtype) -> None:
    ids = tensor(EXTREME_IDS)
    table = new_table(ARGS[kind], embedding_dtype=dtype)
    other = ARGS["normal"] if kind != "normal" else ARGS["uniform"]
    asked, of_another = table.initial_rows(ids), table.initial_rows(ids, other)
    assert len(table) == 0
    assert torch.equal(rows_for(table, ids), asked)
    assert torch.equal(rows_for(new_table(other, embedding_dtype=dtype), ids), of_another)


@pytest.mark.parametrize("kind", ARGS)
def test_shape_of_the_table_does_not_matter(kind: str) -> None:
    ids = torch.arange(-50, 50)
    rows = rows_for(new_table(ARGS[kind]), ids)
    others = [
        new_table(ARGS[kind], max_capacity=4096, bucket_capacity=16),
        new_table(ARGS[kind], max_capacity=1000, bucket_capacity=2**63 - 1),
        new_table(ARGS[kind], strategy="LFU", name="another"),
    ]
    for other in others:
        assert torch.equal(rows_for(other, ids), rows)
    narrow = rows_for(new_table(ARGS[kind], dim=5), ids)
    assert torch.equal(narrow, rows[:, :5])  # of the column, not of the width


@pytest.mark.parametrize("kind", ARGS)
def test_an_id_that_comes_back_gets_the_same_row(kind: str) -> None:
    table = new_table(ARGS[kind], max_capacity=16, bucket_capacity=16)
    first = rows_for(table, tensor([5]))
    table.erase(tensor([5]))
    assert torch.equal(rows_for(table, tensor([5])), first)
    for id_ in range(100, 120):
        table.find_or_insert(tensor([id_]))
    assert not table.contains(tensor([5])).item()
    assert torch.equal(rows_for(table, tensor([5])), first)


@pytest.mark.parametrize("kind", ARGS)
def test_seeds_ids_and_columns_differ(kind: str) -> None:
    ids = torch.arange(2000)
    rows = rows_for(new_table(ARGS[kind]), ids)
    other_seed = rows_for(new_table(ARGS[kind], seed=4), ids)
    assert (rows == other_seed).double().mean() < 0.001
    # 32,000 draws of 24 bits or so: repeats are rare, equal rows or columns absent.
    assert rows.unique().numel() > 0.98 * rows.numel()
    assert rows.unique(dim=0).shape[0] == 2000
    assert rows.t().unique(dim=0).shape[0] == DIM


def test_torch_manual_seed_governs_the_rows() -> None:
    ids = torch.arange(100)

    def rows(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return rows_for(new_table(ARGS["uniform"], seed=None), ids)

    assert torch.equal(rows(1), rows(1))
    assert not torch.equal(rows(1), rows(2))


def test_two_tables_from_one_torch_seed_differ() -> None:
    torch.manual_seed(1)
    ids = torch.arange(100)
    first = rows_for(new_table(ARGS["uniform"], seed=None), ids)
    second = rows_for(new_table(ARGS["uniform"], seed=None), ids)
    assert not torch.equal(first, second)


def test_rows_draw_nothing_from_torch() -> None:
    table = new_table(ARGS["uniform"])
    before = torch.get_rng_state()
    rows_for(table, torch.arange(100))
    assert torch.equal(torch.get_rng_state(), before)


def standard_error(values: torch.Tensor, sigma: float) -> float:
    return sigma / math.sqrt(values.numel())


def check_moments(rows: torch.Tensor, mean: float, std: float) -> None:
    """Mean and deviation within five standard errors, over all, per column and between columns."""
    rows = rows.double()
    error = standard_error(rows, std)
    assert abs(rows.mean().item() - mean) < 5 * error
    assert abs(rows.std().item() - std) < 5 * error
    per_column = standard_error(rows[:, 0], std)
    assert (rows.mean(0) - mean).abs().max() < 5 * per_column
    assert (rows.std(0) - std).abs().max() < 5 * per_column
    correlation = torch.corrcoef(rows.t()) - torch.eye(rows.shape[1])
    assert correlation.abs().max() < 5 / math.sqrt(rows.shape[0])
    neighbours = torch.corrcoef(torch.stack([rows[:-1].flatten(), rows[1:].flatten()]))[0, 1]
    assert abs(neighbours.item()) < 5 / math.sqrt(rows.numel())


def check_distribution(rows: torch.Tensor, cdf: Any) -> None:
    """Kolmogorov-Smirnov: the largest distance between the two distribution functions."""
    values = rows.double().flatten().sort().values
    n = values.numel()
    expected = cdf(values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum(expected - steps[:-1], steps[1:] - expected).max().item()
    assert distance < 2.0 / math.sqrt(n)  # exceeded by chance once in 1,500


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


def test_uniform() -> None:
    rows = rows_for(new_table(ARGS["uniform"]), torch.arange(COUNT))
    assert rows.min() >= -0.5
    assert rows.max() < 1.5
    assert rows.min() < -0.499
    assert rows.max() > 1.499
    check_moments(rows, 0.5, 2.0 / math.sqrt(12))
    check_distribution(rows, lambda x: (x + 0.5) / 2)


def test_uniform_without_bounds_is_from_zero_to_one() -> None:
    rows = rows_for(new_table(DynamicEmbInitializerArgs(mode=Mode.UNIFORM)), torch.arange(COUNT))
    assert rows.min() >= 0.0
    assert rows.max() <= 1.0
    check_distribution(rows, lambda x: x)


def test_normal() -> None:
    rows = rows_for(new_table(ARGS["normal"]), torch.arange(COUNT))
    assert rows.isfinite().all()
    check_moments(rows, 2.0, 0.5)
    check_distribution(rows, lambda x: normal_cdf((x - 2.0) / 0.5))
    # The tails are there: about 40 of 640,000 lie beyond four deviations.
    beyond = ((rows - 2.0).abs() > 2.0).sum().item()
    assert 15 < beyond < 80


def test_truncated_normal() -> None:
    rows = rows_for(new_table(ARGS["truncated"]), torch.arange(COUNT))
    assert rows.min() >= -1.0
    assert rows.max() <= 2.0
    low, high = normal_cdf(torch.tensor([-1.0, 2.0], dtype=torch.float64)).tolist()
    check_distribution(rows, lambda x: (normal_cdf(x) - low) / (high - low))


FAR_BOUNDS = [(3.0, 4.0), (6.0, 8.0), (-8.0, -6.0), (-0.01, 0.01), (-9.0, 9.0)]


@pytest.mark.parametrize(("lower", "upper"), FAR_BOUNDS)
def test_truncated_normal_far_from_the_mean(lower: float, upper: float) -> None:
    args = DynamicEmbInitializerArgs(mode=Mode.TRUNCATED_NORMAL, lower=lower, upper=upper)
    rows = rows_for(new_table(args), torch.arange(5000))
    assert rows.isfinite().all()
    assert rows.min() >= lower
    assert rows.max() <= upper
    # Numbers near 0 in the double-precision distribution function; the negative side has them.
    sign = -1.0 if lower > 0 else 1.0
    ends = sorted((sign * lower, sign * upper))
    low, high = normal_cdf(torch.tensor(ends, dtype=torch.float64)).tolist()
    check_distribution(sign * rows, lambda x: (normal_cdf(x) - low) / (high - low))


def test_constant_and_debug() -> None:
    constant = DynamicEmbInitializerArgs(mode=Mode.CONSTANT, value=-1.25)
    assert rows_for(new_table(constant), torch.arange(100)).eq(-1.25).all()
    ids = tensor([*EXTREME_IDS, 99_999, 100_000, 123_456_789])
    rows = rows_for(new_table(DynamicEmbInitializerArgs(mode=Mode.DEBUG)), ids)
    assert rows.tolist() == [[debug_value(i)] * DIM for i in ids.tolist()]


def test_uniform_of_equal_bounds_and_normal_without_deviation() -> None:
    args = DynamicEmbInitializerArgs(mode=Mode.UNIFORM, lower=0.25, upper=0.25)
    assert rows_for(new_table(args), torch.arange(50)).eq(0.25).all()
    args = DynamicEmbInitializerArgs(mode=Mode.NORMAL, mean=-3.0, std_dev=0.0)
    assert rows_for(new_table(args), torch.arange(50)).eq(-3.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ARGS)
def test_half_types_are_the_float_row_rounded(kind: str, dtype: torch.dtype) -> None:
    ids = torch.arange(1000)
    exact = rows_for(new_table(ARGS[kind]), ids)
    half = rows_for(new_table(ARGS[kind], embedding_dtype=dtype), ids)
    assert half.dtype == dtype
    assert torch.equal(half, exact.to(dtype))


def test_what_is_returned_is_what_is_stored() -> None:
    table = new_table(ARGS["normal"], max_capacity=4096)
    ids = torch.arange(500)
    rows = rows_for(table, ids)
    assert torch.equal(table.find(ids).embeddings, rows)
    exported = contents(table)
    assert torch.equal(exported.embeddings, rows[exported.ids])


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 17, 33, 100])
def test_any_width(dim: int) -> None:
    wide = rows_for(new_table(ARGS["normal"], dim=128, max_capacity=1024), torch.arange(20))
    rows = rows_for(new_table(ARGS["normal"], dim=dim, max_capacity=1024), torch.arange(20))
    assert torch.equal(rows, wide[:, :dim])
