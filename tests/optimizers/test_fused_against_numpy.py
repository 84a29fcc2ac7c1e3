"""Every fused optimizer against the rule in NumPy: widths, decay, clipping, rates, duplicates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rules import Reference, assert_equal, run_beside_reference

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbedding, OptimizerArgs

RULES: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1},
    "momentum_sgd": {"learning_rate": 0.1, "momentum": 0.8},
    "adam": {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95},
    "exact_adagrad": {"learning_rate": 0.2, "initial_accumulator_value": 0.1},
    "exact_row_wise_adagrad": {"learning_rate": 0.2, "initial_accumulator_value": 0.1},
    "partial_row_wise_adam": {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95},
    "ftrl": {"learning_rate": 0.3, "lambda1": 0.5, "lambda2": 0.1, "beta": 1.0},
    "smart_decay_adam": {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3},
}


@pytest.mark.parametrize("dim", [1, 7, 16, 17, 64, 130])
@pytest.mark.parametrize("rule", RULES)
def test_every_width(rule: str, dim: int) -> None:
    assert_equal(*run_beside_reference(rule, dim, RULES[rule]))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_weight_decay(rule: str, mode: int) -> None:
    if rule == "ftrl" and mode == 2:
        pytest.skip("refused: FTRL has no decoupled decay")
    arguments = RULES[rule] | {"weight_decay": 0.3, "weight_decay_mode": mode}
    module, reference = run_beside_reference(rule, 17, arguments)
    assert_equal(module, reference)
    plain, _ = run_beside_reference(rule, 17, RULES[rule])
    ids = torch.tensor(list(reference.rows))
    assert not torch.allclose(
        plain.table.find(ids).embeddings, module.table.find(ids).embeddings, atol=1e-4
    )


@pytest.mark.parametrize("rule", RULES)
def test_clipping_of_every_incoming_element(rule: str) -> None:
    arguments = RULES[rule] | {"gradient_clipping": True, "max_gradient": 0.4}
    assert_equal(*run_beside_reference(rule, 17, arguments))


@pytest.mark.parametrize("rule", RULES)
def test_maximize(rule: str) -> None:
    assert_equal(*run_beside_reference(rule, 7, RULES[rule] | {"maximize": True}))


@pytest.mark.parametrize("rule", RULES)
def test_learning_rate_changes_in_the_middle_of_a_run(rule: str) -> None:
    def halve(step: int, module: DynamicEmbedding, args: OptimizerArgs) -> None:
        rate = 0.2 * 0.5**step
        module.set_learning_rate(rate)
        args.learning_rate = rate

    assert_equal(*run_beside_reference(rule, 16, RULES[rule], change=halve))


@pytest.mark.parametrize("rule", RULES)
def test_a_learning_rate_of_zero(rule: str) -> None:
    if rule == "ftrl":
        pytest.skip("its rate divides")
    arguments = RULES[rule] | {"learning_rate": 0.0, "weight_decay": 0.1}
    module, reference = run_beside_reference(rule, 5, arguments)
    assert_equal(module, reference)
    assert torch.isfinite(module.table.find(torch.tensor(list(reference.rows))).embeddings).all()


@pytest.mark.parametrize(
    ("rule", "extra"),
    [
        ("momentum_sgd", {"nesterov": True}),
        ("momentum_sgd", {"dampening": 0.3}),
        ("momentum_sgd", {"momentum": 0.0}),
        ("exact_adagrad", {"lr_decay": 0.2}),
        ("exact_row_wise_adagrad", {"lr_decay": 0.2}),
        ("exact_adagrad", {"eps": 0.1}),
        ("adam", {"eps": 0.1}),
        ("adam", {"beta1": 0.0}),
        ("partial_row_wise_adam", {"eps": 0.1}),
        ("ftrl", {"lambda1": 0.0, "lambda2": 0.0, "beta": 0.0, "initial_accumulator_value": 0.5}),
        ("ftrl", {"lambda1": 50.0}),
    ],
)
def test_the_other_numbers(rule: str, extra: dict[str, Any]) -> None:
    assert_equal(*run_beside_reference(rule, 17, RULES[rule] | extra))


def test_ftrl_makes_rows_sparse() -> None:
    module, reference = run_beside_reference("ftrl", 64, RULES["ftrl"] | {"lambda1": 2.0})
    rows = module.table.find(torch.tensor(list(reference.rows))).embeddings
    share = (rows == 0).double().mean().item()
    assert 0.05 < share < 0.95
    expected = np.stack(list(reference.rows.values())) == 0
    assert torch.equal(rows == 0, torch.tensor(expected))


def test_smart_decay_adam_makes_up_for_the_steps_between() -> None:
    """With a gradient of 0 in between, all that a row misses is made up for at its next step."""
    args = OptimizerArgs(learning_rate=0.05, beta1=0.9, beta2=1 - 1e-7)
    module = DynamicEmbedding(3, optimizer="smart_decay_adam", optimizer_args=args, seed=1)
    module(torch.tensor([1, 2])).sum().backward()
    for _ in range(40):  # 1 takes part with a gradient of 0, 2 does not
        module(torch.tensor([1])).backward(torch.zeros(1, 3))
    module(torch.tensor([1, 2])).backward(torch.zeros(2, 3))
    start = module.table.initial_rows(torch.tensor([1, 2]))
    moved = start - module.table.find(torch.tensor([1, 2])).embeddings
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=0)
    assert module.table.find(torch.tensor([2])).state[0, -2:].clone().view(torch.int64) == 42


@pytest.mark.parametrize("rule", RULES)
def test_one_id_a_thousand_times_is_one_update(rule: str) -> None:
    args = OptimizerArgs(**RULES[rule])
    module = DynamicEmbedding(8, optimizer=rule, optimizer_args=args)
    reference = Reference(rule, 8, args)
    ids = torch.full((1000,), -4)
    reference.add(-4, module(ids)[0].tolist())
    gradient = torch.randn(1000, 8)
    module(ids).backward(gradient)
    reference.step(ids.tolist(), gradient.double().numpy())
    assert_equal(module, reference, tolerance=1e-4)
    assert module.table.iteration == 1


@pytest.mark.parametrize("rule", RULES)
def test_untouched_rows_keep_every_bit(rule: str) -> None:
    module = DynamicEmbedding(
        9, optimizer=rule, optimizer_args=OptimizerArgs(**RULES[rule], weight_decay=0.1)
    )
    module(torch.arange(50)).sum().backward()
    others = torch.arange(10, 50)
    before = module.table.find(others)
    for _ in range(3):
        module(torch.arange(10)).sum().backward()
    after = module.table.find(others)
    assert torch.equal(before.embeddings, after.embeddings)
    assert torch.equal(before.state, after.state)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_the_number_of_threads_changes_no_bit(rule: str, threads: int) -> None:
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        module = DynamicEmbedding(
            33, optimizer=rule, optimizer_args=OptimizerArgs(**RULES[rule]), seed=3
        )
        for _ in range(3):
            ids = torch.randint(0, 500, (4000,))
            module(ids).backward(torch.randn(4000, 33))
        results.append(module.table.find(torch.arange(500)))
    assert torch.equal(results[0].embeddings, results[1].embeddings)
    assert torch.equal(results[0].state, results[1].state)


def test_clipping_comes_before_the_mean_and_the_weights() -> None:
    """The incoming gradient is clipped, then scaled to the bag: d out / d row = 1 / length."""
    from dynamicemb import DynamicEmbPoolingMode
    from dynamicemb.options import DynamicEmbTableOptions

    module = BatchedDynamicEmbeddingTables(
        [DynamicEmbTableOptions(dim=2, max_capacity=128)],
        pooling_mode=DynamicEmbPoolingMode.MEAN,
        optimizer="sgd",
        learning_rate=1.0,
        gradient_clipping=True,
        max_gradient=0.5,
        seed=1,
    )
    ids = torch.tensor([1, 2])
    before = module.tables[0].find_or_insert(ids).embeddings
    module(ids, torch.tensor([0, 2])).backward(torch.tensor([[10.0, -0.25]]))
    moved = before - module.tables[0].find(ids).embeddings
    torch.testing.assert_close(moved, torch.tensor([[0.25, -0.125]] * 2))


def sum_in_order(products: np.ndarray) -> np.float32:
    """Four neighbours, two and two; these sums folded in halves, with zeros up to a power of 2."""
    columns = max(4, 1 << (len(products) - 1).bit_length())
    four = np.pad(products, (0, columns - len(products))).reshape(-1, 4)
    sums = (four[:, 0] + four[:, 1]) + (four[:, 2] + four[:, 3])
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return np.float32(sums[0])


@pytest.mark.parametrize("dim", [1, 3, 4, 8, 15, 16, 33, 48, 64, 65, 100, 128, 200, 256, 700])
def test_columns_are_added_in_the_order_that_is_promised(dim: int) -> None:
    module = DynamicEmbedding(dim, optimizer="exact_row_wise_adagrad", seed=1)
    gradient = torch.randn(3, dim, generator=torch.Generator().manual_seed(dim))
    ids = torch.arange(3)
    module(ids).backward(gradient)
    wanted = [sum_in_order(row * row) / np.float32(dim) for row in gradient.numpy()]
    assert module.table.find(ids).state[:, 0].tolist() == wanted
