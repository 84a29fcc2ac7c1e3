"""BatchedDynamicEmbeddingTables: tables, features, dims, pooling, output types, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import table_options
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbPoolingMode,
    EmbOptimType,
)

SUM, MEAN, NONE = (
    DynamicEmbPoolingMode.SUM,
    DynamicEmbPoolingMode.MEAN,
    DynamicEmbPoolingMode.NONE,
)
ROWS = 25


def random_bags(features: int, batch: int, longest: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(0, longest + 1, (features * batch,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, ROWS, (int(offsets[-1]),)), offsets


class Dense(nn.Module):
    """The same tables as ``nn.EmbeddingBag``s: a column block per feature."""

    def __init__(self, dims: list[int], features: list[int], mode: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(ROWS, dim, mode=mode, include_last_offset=True) for dim in dims
        )
        self.features = features  # the table of every feature

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch = (len(offsets) - 1) // len(self.features)
        parts = []
        for f, table in enumerate(self.features):
            own = offsets[f * batch : (f + 1) * batch + 1]
            slice_ = slice(int(own[0]), int(own[-1]))
            chosen = None if weights is None else weights[slice_]
            parts.append(self.bags[table](ids[slice_], own - own[0], chosen))
        return torch.cat(parts, dim=1)


def pair(
    dims: list[int], features: list[int], mode: DynamicEmbPoolingMode, **arguments: Any
) -> tuple[BatchedDynamicEmbeddingTables, Dense]:
    dense = Dense(dims, features, mode.name.lower())
    ours = BatchedDynamicEmbeddingTables(
        [table_options(dim) for dim in dims],
        feature_table_map=features,
        pooling_mode=mode,
        **arguments,
    )
    for table, bag in zip(ours.tables, dense.bags, strict=True):
        table.insert(torch.arange(ROWS), bag.weight.detach())
    return ours, dense


LAYOUTS = [
    ([8], [0]),
    ([8], [0, 0, 0]),
    ([4, 17, 1], [0, 1, 2]),
    ([16, 5, 33], [0, 0, 1, 2, 2]),
]


@pytest.mark.parametrize(("dims", "features"), LAYOUTS)
@pytest.mark.parametrize("mode", [SUM, MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_training_as_with_embedding_bags(
    dims: list[int], features: list[int], mode: DynamicEmbPoolingMode, weighted: bool
) -> None:
    if weighted and mode is MEAN:
        pytest.skip("nn.EmbeddingBag has no weighted mean; see test_weighted_mean")
    ours, dense = pair(dims, features, mode, optimizer=EmbOptimType.SGD, learning_rate=0.2)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.2)
    for _ in range(4):
        ids, offsets = random_bags(len(features), 6)
        weights = torch.randn(len(ids)) if weighted else None
        mine = None if weights is None else weights.clone().requires_grad_()
        theirs = None if weights is None else weights.clone().requires_grad_()
        out = ours(ids, offsets, mine)
        expected = dense(ids, offsets, theirs)
        assert out.shape == (6, sum(dims[table] for table in features))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        gradient = torch.randn(out.shape)
        out.backward(gradient)
        optimizer.zero_grad()
        expected.backward(gradient)
        optimizer.step()
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        for table, bag in zip(ours.tables, dense.bags, strict=True):
            rows = table.find(torch.arange(ROWS)).embeddings
            torch.testing.assert_close(rows, bag.weight.detach(), rtol=1e-5, atol=1e-6)


def test_weighted_mean() -> None:
    """Weights scale the rows; the divisor is the number of ids."""
    ours, _ = pair([3], [0], MEAN, learning_rate=1.0)
    ids, offsets = torch.tensor([1, 2, 1, 4]), torch.tensor([0, 3, 4])
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    rows = ours.tables[0].find(torch.arange(5)).embeddings
    out = ours(ids, offsets, weights)
    expected = torch.stack([(rows[1] * 4 + rows[2] * 2) / 3, rows[4] * 4])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    sums = rows.sum(1)
    torch.testing.assert_close(
        weights.grad, torch.stack([sums[1] / 3, sums[2] / 3, sums[1] / 3, sums[4]])
    )
    moved = rows - ours.tables[0].find(torch.arange(5)).embeddings
    torch.testing.assert_close(moved[:, 0], torch.tensor([0, 4 / 3, 2 / 3, 0, 4.0]))


def test_no_pooling() -> None:
    _, dense = pair([6, 6], [0, 1, 1], SUM)
    sequence = BatchedDynamicEmbeddingTables(
        [table_options(6), table_options(6)],
        feature_table_map=[0, 1, 1],
        pooling_mode=NONE,
        learning_rate=0.5,
    )
    weights = [bag.weight.detach().clone() for bag in dense.bags]
    for table, weight in zip(sequence.tables, weights, strict=True):
        table.insert(torch.arange(ROWS), weight)
    ids, offsets = random_bags(3, 5)
    split = int(offsets[5])
    out = sequence(ids, offsets)
    assert out.shape == (len(ids), 6)
    assert torch.equal(out[:split], weights[0][ids[:split]])
    assert torch.equal(out[split:], weights[1][ids[split:]])
    gradient = torch.randn(out.shape)
    out.backward(gradient)
    for table, weight, part in zip(
        sequence.tables, weights, (slice(0, split), slice(split, None)), strict=True
    ):
        weight.index_add_(0, ids[part], gradient[part], alpha=-0.5)
        rows = table.find(torch.arange(ROWS)).embeddings
        torch.testing.assert_close(rows, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", [SUM, MEAN, NONE])
def test_output_dtype(dtype: torch.dtype, mode: DynamicEmbPoolingMode) -> None:
    """The output is rounded once; the gradient arrives in that type and is summed in float32."""
    modules = [
        BatchedDynamicEmbeddingTables(
            [table_options(7), table_options(7)],
            pooling_mode=mode,
            output_dtype=out,
            learning_rate=0.5,
            seed=1,
        )
        for out in (torch.float32, dtype)
    ]
    weight = torch.randn(2, ROWS, 7)
    for module in modules:
        for table, rows in zip(module.tables, weight, strict=True):
            table.insert(torch.arange(ROWS), rows)
    ids, offsets = random_bags(2, 8)
    full, half = (module(ids, offsets) for module in modules)
    assert half.dtype == dtype
    assert torch.equal(half, full.to(dtype))
    gradient = torch.randn(full.shape).to(dtype)
    full.backward(gradient.float())
    half.backward(gradient)
    for one, two in zip(modules[0].tables, modules[1].tables, strict=True):
        rows = [table.find(torch.arange(ROWS)).embeddings for table in (one, two)]
        assert torch.equal(rows[0], rows[1])


def test_the_tables_of_one_module_do_not_share_rows() -> None:
    module = BatchedDynamicEmbeddingTables([table_options(2), table_options(2)], learning_rate=1.0)
    module(torch.tensor([5, 5, 5]), torch.tensor([0, 1, 3])).sum().backward()
    rows = [table.find(torch.tensor([5])).embeddings[0, 0].item() for table in module.tables]
    assert rows == [0.0, -1.0]


def test_equal_ids_of_two_tables_start_apart() -> None:
    random = BatchedDynamicEmbeddingTables(
        [table_options(8, initializer_args=_uniform()) for _ in range(2)], seed=3
    )
    random(torch.tensor([5, 5]), torch.tensor([0, 1, 2]))
    rows = [table.find(torch.tensor([5])).embeddings for table in random.tables]
    assert not torch.equal(rows[0], rows[1])


def test_torch_manual_seed_governs_new_rows() -> None:
    rows = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        module = BatchedDynamicEmbeddingTables([table_options(8, initializer_args=_uniform())])
        rows.append(module(torch.tensor([5]), torch.tensor([0, 1])))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def _uniform() -> Any:
    from dynamicemb import DynamicEmbInitializerArgs

    return DynamicEmbInitializerArgs()


@pytest.mark.parametrize("mode", [SUM, MEAN, NONE])
def test_empty_batches(mode: DynamicEmbPoolingMode) -> None:
    module = BatchedDynamicEmbeddingTables([table_options(3), table_options(3)], pooling_mode=mode)
    nothing = torch.empty(0, dtype=torch.int64)
    out = module(nothing, torch.zeros(5, dtype=torch.int64))
    assert out.shape == ((0, 3) if mode is NONE else (2, 6))
    assert not out.any()
    out.sum().backward()
    one_sided = module(torch.tensor([1, 2]), torch.tensor([0, 0, 0, 1, 2]))
    one_sided.sum().backward()
    assert [len(table) for table in module.tables] == [0, 2]


def test_int32_indices_and_offsets() -> None:
    module = BatchedDynamicEmbeddingTables([table_options(3)])
    wide = module(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    narrow = module(
        torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
    )
    assert torch.equal(wide, narrow)


def test_fbgemm_enum_is_understood() -> None:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    module = BatchedDynamicEmbeddingTables(
        [table_options(3)], optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD
    )
    assert module.optimizer.kind.name == "ROWWISE_ADAGRAD"


def test_the_later_name_is_the_same_module() -> None:
    assert BatchedDynamicEmbeddingTablesV2 is BatchedDynamicEmbeddingTables
    from dynamicemb.batched_dynamicemb_tables import (
        BatchedDynamicEmbeddingTables as Old,
    )

    assert Old is BatchedDynamicEmbeddingTables


def test_set_learning_rate_reaches_every_table() -> None:
    module = BatchedDynamicEmbeddingTables([table_options(2), table_options(3)], learning_rate=9.0)
    module.set_learning_rate(0.25)
    module(torch.tensor([1, 1]), torch.tensor([0, 1, 2])).sum().backward()
    for table in module.tables:
        assert (table.find(torch.tensor([1])).embeddings == 0.75).all()


def test_a_gradient_cannot_be_differentiated_again() -> None:
    module = BatchedDynamicEmbeddingTables([table_options(2)])
    weights = torch.tensor([2.0, 3.0], requires_grad=True)
    out = module(torch.tensor([1, 5]), torch.tensor([0, 2]), weights)
    (gradient,) = torch.autograd.grad(out.square().sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
