"""Per-table options stay apart: initialiser, score, bucket width, type, admission, capacity."""

from __future__ import annotations

import pytest
import torch
from pairs import constant, table_options

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    FrequencyAdmissionStrategy,
    InsertionError,
    KVCounter,
)

STRATEGY = DynamicEmbScoreStrategy


def test_initialisers_and_evaluation_constants() -> None:
    module = BatchedDynamicEmbeddingTables(
        [
            table_options(2, initializer_args=constant(3.0), eval_initializer_args=constant(-1.0)),
            table_options(
                2,
                initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.DEBUG),
                eval_initializer_args=constant(-2.0),
            ),
        ]
    )
    ids, offsets = torch.tensor([41, 42]), torch.tensor([0, 1, 2])
    assert module.eval()(ids, offsets).tolist() == [[-1.0, -1.0, -2.0, -2.0]]
    assert module.train()(ids, offsets).tolist() == [[3.0, 3.0, 42.0, 42.0]]


def test_score_strategies() -> None:
    strategies = [
        STRATEGY.STEP,
        STRATEGY.LFU,
        STRATEGY.CUSTOMIZED,
        STRATEGY.NO_EVICTION,
        (STRATEGY.TIMESTAMP, STRATEGY.LFU),
    ]
    module = BatchedDynamicEmbeddingTables(
        [table_options(2, score_strategy=one) for one in strategies],
        table_names=["step", "lfu", "custom", "forever", "pair"],
    )
    module.set_score({"custom": 77})
    ids = torch.tensor([7, 7, 8] * 5)
    offsets = torch.tensor([0, 3, 6, 9, 12, 15])
    module(ids, offsets)
    module(ids, offsets)
    scores = [table.find(torch.tensor([7, 8])).scores for table in module.tables]
    assert scores[0].tolist() == [2, 2]
    assert scores[1].tolist() == [4, 2]
    assert scores[2].tolist() == [77, 77]
    assert scores[3].tolist() == [0, 1]
    assert scores[4][:, 1].tolist() == [4, 2]
    assert scores[4][0, 0] == scores[4][1, 0] > 10**15


def test_bucket_widths_and_capacities() -> None:
    module = BatchedDynamicEmbeddingTables(
        [
            table_options(2, bucket_capacity=16, max_capacity=16),
            table_options(2, bucket_capacity=64, max_capacity=128),
        ]
    )
    assert [table.bucket_capacity for table in module.tables] == [16, 64]
    assert [table.capacity for table in module.tables] == [16, 128]
    for begin in (0, 20):
        ids = torch.arange(begin, begin + 10)
        module(torch.cat([ids, ids]), torch.tensor([0, 10, 20]))
    assert [len(table) for table in module.tables] == [16, 20]
    assert [table.stats().evictions for table in module.tables] == [4, 0]


def test_data_types() -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    module = BatchedDynamicEmbeddingTables(
        [table_options(3, embedding_dtype=dtype) for dtype in dtypes],
        learning_rate=0.3,
        stochastic_rounding=False,
    )
    ids = torch.tensor([1, 1, 1])
    out = module(ids, torch.tensor([0, 1, 2, 3]))
    assert out.dtype == torch.float32
    out.sum().backward()
    for table, dtype in zip(module.tables, dtypes, strict=True):
        rows = table.find(torch.tensor([1])).embeddings
        assert rows.dtype == dtype
        assert torch.equal(rows, torch.full((1, 3), 1 - 0.3).to(dtype))


def test_admission() -> None:
    module = BatchedDynamicEmbeddingTables(
        [
            table_options(
                2,
                admit_strategy=FrequencyAdmissionStrategy(2, constant(0.5)),
                admission_counter=KVCounter(128),
            ),
            table_options(2),
            table_options(
                2, admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=KVCounter(128)
            ),
        ]
    )
    ids, offsets = torch.tensor([5, 5, 5]), torch.tensor([0, 1, 2, 3])
    assert module(ids, offsets)[0].tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    stored = [[len(table) for table in module.tables]]
    for _ in range(2):
        module(ids, offsets)
        stored.append([len(table) for table in module.tables])
    assert stored == [[0, 1, 0], [1, 1, 0], [1, 1, 1]]


def test_check_modes() -> None:
    full = {"max_capacity": 16, "bucket_capacity": 16}
    module = BatchedDynamicEmbeddingTables(
        [
            table_options(2, **full),
            table_options(2, **full, safe_check_mode=DynamicEmbCheckMode.WARNING),
        ],
        table_names=["quiet", "warns"],
    )
    ids = torch.arange(17)
    module(ids, torch.tensor([0, 17, 17]))
    with pytest.warns(UserWarning, match="'warns' could not insert 1 "):
        out = module(ids, torch.tensor([0, 0, 17]))
    assert out[0].tolist() == [0.0, 0.0, 16.0, 16.0]
    strict = BatchedDynamicEmbeddingTables(
        [table_options(2, **full, safe_check_mode=DynamicEmbCheckMode.ERROR)]
    )
    with pytest.raises(InsertionError, match="'t0' could not insert 1 "):
        strict(ids, torch.tensor([0, 17]))


def test_options_are_copied() -> None:
    options = table_options(2)
    module = BatchedDynamicEmbeddingTables([options])
    options.dim = 99
    assert module.tables[0].dim == 2
    assert module(torch.tensor([1]), torch.tensor([0, 1])).shape == (1, 2)


def test_one_options_object_for_two_tables() -> None:
    options = table_options(2, score_strategy=STRATEGY.STEP)
    module = BatchedDynamicEmbeddingTables([options, options], learning_rate=1.0)
    module(torch.tensor([1]), torch.tensor([0, 1, 1])).sum().backward()
    assert [len(table) for table in module.tables] == [1, 0]
    module.tables[0].optimizer.set_learning_rate(0.0)
    assert module.tables[1].optimizer.args.learning_rate == 1.0


def test_numbers_of_optimizers() -> None:
    """What differs is more than a rate: how kernels treat gradients."""
    changes: list[dict[str, object]] = [
        {},
        {"maximize": True},
        {"weight_decay": 0.5, "weight_decay_mode": 1},
        {"gradient_clipping": True, "max_gradient": 1.0},
    ]
    module = BatchedDynamicEmbeddingTables(
        [table_options(2, initializer_args=constant(1.0))] * len(changes), learning_rate=0.5
    )
    ids, offsets = torch.arange(len(changes)), torch.arange(len(changes) + 1)
    module(ids, offsets)
    for table, change in zip(module.tables, changes, strict=True):
        for name, value in change.items():
            setattr(table.optimizer.args, name, value)
    (module(ids, offsets) * 2).sum().backward()
    found = [t.find(ids[n : n + 1]).embeddings[0, 0] for n, t in enumerate(module.tables)]
    assert [float(one) for one in found] == [0.0, 2.0, -0.25, 0.5]


def test_a_warning_names_the_ids_of_its_own_table() -> None:
    options = table_options(
        2, max_capacity=16, bucket_capacity=16, safe_check_mode=DynamicEmbCheckMode.WARNING
    )
    module = BatchedDynamicEmbeddingTables([options] * 2, ["a", "b"])
    with pytest.warns(UserWarning, match="could not insert") as warned:
        module(torch.arange(50), torch.tensor([0, 30, 50]))
    assert [str(one.message)[:60] for one in warned] == [
        "table 'a' could not insert 14 distinct ids of a batch of 30:"[:60],
        "table 'b' could not insert 4 distinct ids of a batch of 20: "[:60],
    ]
