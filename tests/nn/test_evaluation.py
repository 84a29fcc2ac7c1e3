"""Evaluation finds only: nothing inserted, no score or count changed, unknown ids constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import constant, table_options

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    FrequencyAdmissionStrategy,
    KVCounter,
    UsageError,
)


def everything(module: Any) -> list[torch.Tensor]:
    return [tensor for table in module.tables for tensor in table.state_dict().values()]


@pytest.mark.parametrize("strategy", list(DynamicEmbScoreStrategy))
@pytest.mark.parametrize("mode", list(DynamicEmbPoolingMode))
def test_nothing_changes(strategy: DynamicEmbScoreStrategy, mode: DynamicEmbPoolingMode) -> None:
    options = table_options(
        3,
        score_strategy=strategy,
        admit_strategy=FrequencyAdmissionStrategy(1),
        admission_counter=KVCounter(128),
    )
    module = BatchedDynamicEmbeddingTables([options, options], pooling_mode=mode)
    if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
        module.set_score({"t0": 3, "t1": 4})
    ids, offsets = torch.arange(8), torch.tensor([0, 2, 4, 6, 8])
    module(ids, offsets)
    before, stats = everything(module), [table.stats() for table in module.tables]
    module.eval()
    for other in (ids, ids + 4, ids + 1000):
        out = module(other, offsets)
        assert not out.requires_grad
    assert [table.stats() for table in module.tables] == stats
    for one, two in zip(before, everything(module), strict=True):
        assert torch.equal(one, two)


def test_evaluation_reads_what_training_wrote() -> None:
    module = DynamicEmbedding(4)
    ids = torch.tensor([[3, 5], [3, -9]])
    trained = module(ids)
    module.eval()
    assert torch.equal(module(ids), trained)
    with torch.inference_mode():
        assert torch.equal(module(ids), trained)


def test_unknown_ids_read_the_constant_and_take_part_in_means() -> None:
    options = table_options(2, eval_initializer_args=constant(0.5))
    bag = DynamicEmbeddingBag(2, options=options, mode="mean")
    bag(torch.tensor([[1]]))
    bag.eval()
    assert bag(torch.tensor([[1, 99], [98, 99]])).tolist() == [[0.75, 0.75], [0.5, 0.5]]
    assert len(bag.table) == 1


def test_training_without_gradients_inserts() -> None:
    module = DynamicEmbedding(4)
    with torch.no_grad():
        out = module(torch.tensor([1, 2]))
    assert not out.requires_grad
    assert len(module.table) == 2


def test_weights_in_evaluation() -> None:
    bag = DynamicEmbeddingBag(2, options=table_options(2), mode="sum")
    bag(torch.tensor([[1, 2]]))
    bag.eval()
    out = bag(torch.tensor([[1, 2]]), None, torch.tensor([[2.0, 3.0]]))
    assert out.tolist() == [[5.0, 5.0]]


def test_a_table_for_evaluation_only() -> None:
    module = DynamicEmbedding(2, options=table_options(2, training=False), optimizer="adam")
    assert module.table.state_dim == 0
    module.table.insert(torch.tensor([1]), torch.ones(1, 2))
    with pytest.raises(UsageError, match="training=False"):
        module(torch.tensor([1]))
    assert module.eval()(torch.tensor([1, 2])).tolist() == [[1.0, 1.0], [0.0, 0.0]]
