"""set_score, get_score, export_keys_values, incremental_dump, flush on the module."""

from __future__ import annotations

import pytest
import torch
from pairs import table_options

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbScoreStrategy,
    InvalidArgumentError,
    UsageError,
)

STEP, CUSTOMIZED = DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.CUSTOMIZED


def module_of(
    strategy: DynamicEmbScoreStrategy, **arguments: object
) -> BatchedDynamicEmbeddingTables:
    return BatchedDynamicEmbeddingTables(
        [table_options(2, score_strategy=strategy), table_options(3, score_strategy=strategy)],
        table_names=["user", "item"],
        **arguments,
    )


def run(module: BatchedDynamicEmbeddingTables, *ids: int) -> None:
    """One batch with the same ids for both tables."""
    both = torch.tensor([*ids, *ids])
    module(both, torch.tensor([0, len(ids), 2 * len(ids)]))


def test_customised_scores_are_per_table() -> None:
    module = module_of(CUSTOMIZED)
    with pytest.raises(UsageError, match=r"'user'.*set_score"):
        run(module, 1)
    module.set_score({"user": 5, "item": 2**64 - 1})
    assert module.get_score() == {"user": 5, "item": 2**64 - 1}
    run(module, 1)
    assert module.tables[0].find(torch.tensor([1])).scores.tolist() == [5]
    assert module.tables[1].find(torch.tensor([1])).scores.tolist() == [-1]
    with pytest.warns(UserWarning, match="'user' goes down from 5 to 4"):
        module.set_score({"user": 4})


def test_set_score_refuses_what_it_cannot_do_and_changes_nothing() -> None:
    module = module_of(CUSTOMIZED)
    module.set_score({"user": 5, "item": 5})
    with pytest.raises(InvalidArgumentError, match=r"'other'.*user, item"):
        module.set_score({"user": 6, "other": 6})
    assert module.get_score() == {"user": 5, "item": 5}
    with pytest.raises(UsageError, match=r"set_score.*'user'.*CUSTOMIZED"):
        module_of(STEP).set_score({"user": 6})


def test_steps_count_training_batches() -> None:
    module = module_of(STEP)
    assert module.get_score() == {"user": 1, "item": 1}
    run(module, 1)
    run(module, 2)
    assert module.get_score() == {"user": 3, "item": 3}
    module.eval()
    run(module, 1)
    assert module.get_score() == {"user": 3, "item": 3}
    assert module.tables[0].find(torch.tensor([1, 2])).scores.tolist() == [1, 2]


def test_incremental_dump_gives_what_was_touched_since() -> None:
    module = module_of(STEP)
    run(module, 1, 2, 3)
    thresholds = module.get_score()
    run(module, 3, 4)
    rows, following = module.incremental_dump(thresholds)
    assert set(rows) == {"user", "item"}
    assert following == {"user": 3, "item": 3}
    for (name, dim), table in zip((("user", 2), ("item", 3)), module.tables, strict=True):
        ids, values = rows[name]
        assert sorted(ids.tolist()) == [3, 4]
        assert values.shape == (2, dim)
        assert torch.equal(values, table.find(ids.to(table.device)).embeddings.cpu())
    rows, again = module.incremental_dump({"item": following["item"]})
    assert again == {"item": 3}
    assert list(rows) == ["item"]
    assert rows["item"][0].shape == (0,)
    assert rows["item"][1].shape == (0, 3)


def test_timestamps_as_thresholds() -> None:
    module = module_of(DynamicEmbScoreStrategy.TIMESTAMP)
    run(module, 1, 2)
    threshold = module.get_score()
    run(module, 2, 3)
    rows, _ = module.incremental_dump(threshold)
    assert sorted(rows["user"][0].tolist()) == [2, 3]


def test_customised_scores_above_the_signed_range() -> None:
    module = module_of(CUSTOMIZED)
    module.set_score({"user": 2**63 - 1, "item": 1})
    run(module, 1)
    module.set_score({"user": 2**63 + 5})
    run(module, 2)
    rows, _ = module.incremental_dump({"user": 2**63})
    assert rows["user"][0].tolist() == [2]


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_export_keys_values(batch_size: int) -> None:
    module = module_of(STEP, learning_rate=0.5)
    ids = torch.arange(-30, 30)
    both = torch.cat([ids, ids])
    module(both, torch.tensor([0, 60, 120])).backward(torch.randn(1, 5))
    keys, values = module.export_keys_values("item", batch_size=batch_size)
    assert keys.dtype == torch.int64
    assert values.dtype == torch.float32
    assert sorted(keys.tolist()) == ids.tolist()
    assert torch.equal(values, module.tables[1].find(keys.to(module.device)).embeddings.cpu())


def test_export_is_float32_and_incremental_dump_keeps_the_dtype() -> None:
    module = BatchedDynamicEmbeddingTables([table_options(2, embedding_dtype=torch.bfloat16)])
    module(torch.tensor([1]), torch.tensor([0, 1]))
    assert module.export_keys_values("t0")[1].dtype == torch.float32
    rows, _ = module.incremental_dump({"t0": 0})
    assert rows["t0"][1].dtype == torch.bfloat16


def test_export_of_an_empty_table() -> None:
    keys, values = module_of(STEP).export_keys_values("user")
    assert keys.shape == (0,)
    assert values.shape == (0, 2)


def test_flush_and_reset_cache_states_change_nothing() -> None:
    module = module_of(STEP)
    run(module, 1)
    module.flush()
    module.reset_cache_states()
    assert [len(table) for table in module.tables] == [1, 1]
