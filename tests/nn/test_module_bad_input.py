"""Bad arguments are typed errors that name the argument; the tables are as before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import table_options

from dynamicemb import (
    ArgumentTypeError,
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbError,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    InvalidArgumentError,
    OptimizerArgs,
)

TYPE, VALUE = ArgumentTypeError, InvalidArgumentError
OPTIONS = table_options(4)


def without_gpu(*case: Any) -> Any:
    """A case where no GPU is asked: it would not be refused, or, the numbers of offsets on a GPU,
    not looked at."""
    return pytest.param(*case, marks=pytest.mark.not_on_a_gpu)


def check(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        make()
    assert isinstance(caught.value, DynamicEmbError)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"embedding_dim": 0}, VALUE, "embedding_dim is 0.*at least 1"),
        ({"embedding_dim": -3}, VALUE, "embedding_dim is -3"),
        ({"embedding_dim": 2.0}, TYPE, r"embedding_dim is 2\.0"),
        ({"embedding_dim": None}, TYPE, "embedding_dim is None"),
        ({"embedding_dim": True}, TYPE, "embedding_dim is True"),
        ({"padding_idx": 1.5}, TYPE, r"padding_idx is 1\.5"),
        ({"padding_idx": 2**63}, VALUE, "padding_idx"),
        ({"max_capacity": 0}, VALUE, "max_capacity is 0"),
        ({"max_capacity": -1}, VALUE, "max_capacity is -1"),
        ({"max_capacity": math.nan}, TYPE, "max_capacity is nan"),
        ({"max_capacity": "many"}, TYPE, "max_capacity is 'many'"),
        ({"max_capacity": 2**40}, VALUE, "max_capacity"),
        ({"dtype": torch.int64}, VALUE, "dtype is torch.int64.*float32, torch.float16"),
        ({"dtype": "float32"}, TYPE, "dtype is 'float32'"),
        ({"output_dtype": torch.float64}, VALUE, "output_dtype is torch.float64.*float32"),
        ({"optimizer": "lion"}, VALUE, "'lion'.*SGD"),
        ({"optimizer": 3}, TYPE, "optimizer type is 3.*SGD"),
        ({"optimizer_args": OptimizerArgs()}, VALUE, "optimizer_args.*optimizer is None"),
        ({"optimizer": "sgd", "optimizer_args": {"lr": 1}}, TYPE, "args is {'lr': 1}"),
        ({"options": {"dim": 4}}, TYPE, "options is {'dim': 4}.*DynamicEmbTableOptions"),
        ({"options": table_options(5)}, VALUE, r"options.dim is 5.*embedding_dim, 4"),
        ({"seed": "x"}, TYPE, "seed is 'x'"),
        ({"seed": 2**64}, VALUE, "seed"),
        ({"name": ""}, VALUE, "name is ''"),
        ({"name": 7}, VALUE, "name is 7"),
        without_gpu({"device": "cuda"}, VALUE, "device is 'cuda'.*cpu"),
    ],
)
@pytest.mark.parametrize("module", [DynamicEmbedding, DynamicEmbeddingBag])
def test_arguments_of_the_simple_modules(
    module: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    check(lambda: module(**({"embedding_dim": 4} | arguments)), error, message)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "max"}, VALUE, "mode is 'max'; allowed: sum, mean"),
        ({"mode": 0}, TYPE, "mode is 0"),
        ({"include_last_offset": 1}, TYPE, "include_last_offset is 1"),
    ],
)
def test_arguments_of_a_bag(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    check(lambda: DynamicEmbeddingBag(4, **arguments), error, message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bucket_capacity", 17, "bucket_capacity is 17.*multiple of 16"),
        ("bucket_capacity", 0, "bucket_capacity is 0"),
        ("dim", 0, "dim is 0"),
        ("max_capacity", math.nan, "max_capacity is nan"),
        ("max_load_factor", math.nan, "max_load_factor is nan"),
        ("max_load_factor", 1.5, "max_load_factor is 1.5"),
        ("init_capacity", 2000, "init_capacity is 2000"),
        ("embedding_dtype", torch.float64, "embedding_dtype is torch.float64"),
    ],
)
def test_options_of_a_table(field: str, value: Any, message: str) -> None:
    fields: dict[str, Any] = {"dim": 4, "max_capacity": 1024, field: value}
    check(lambda: DynamicEmbTableOptions(**fields), (TYPE, VALUE), message)  # type: ignore[arg-type]
    changed = table_options(4)
    setattr(changed, field, value)  # and again when the table is made from changed options
    check(lambda: BatchedDynamicEmbeddingTables([changed]), (TYPE, VALUE), message)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"table_options": []}, TYPE, "table_options"),
        ({"table_options": None}, TYPE, "table_options is None"),
        ({"table_options": OPTIONS}, TYPE, "table_options"),
        ({"table_options": [OPTIONS, "x"]}, TYPE, "table_options is 'x'"),
        ({"table_options": [DynamicEmbTableOptions(max_capacity=9)]}, VALUE, "dim of table 't0'"),
        ({"table_options": [DynamicEmbTableOptions(dim=9)]}, VALUE, "max_capacity of table 't0'"),
        ({"table_names": ["a", "b"]}, VALUE, r"len\(table_names\) is 2.*1"),
        ({"table_names": "a"}, TYPE, "table_names is 'a'"),
        ({"table_names": [5]}, VALUE, r"table_names is \[5\]"),
        ({"table_names": [""]}, VALUE, "table_names"),
        (
            {"table_options": [OPTIONS, OPTIONS], "table_names": ["a", "a"]},
            VALUE,
            "table_names.*different",
        ),
        ({"feature_table_map": [1]}, VALUE, r"feature_table_map is \[1\]"),
        ({"feature_table_map": []}, VALUE, r"feature_table_map is \[\]"),
        ({"feature_table_map": 0}, TYPE, "feature_table_map is 0"),
        ({"feature_table_map": ["a"]}, TYPE, "feature_table_map is 'a'"),
        (
            {"table_options": [OPTIONS, OPTIONS], "feature_table_map": [1, 0]},
            VALUE,
            r"feature_table_map is \[1, 0\].*ascending",
        ),
        (
            {"table_options": [OPTIONS, OPTIONS], "feature_table_map": [0, 0]},
            VALUE,
            r"feature_table_map is \[0, 0\].*every table",
        ),
        ({"pooling_mode": 0}, TYPE, "pooling_mode is 0.*SUM, MEAN, NONE"),
        ({"pooling_mode": "sum"}, TYPE, "pooling_mode is 'sum'.*SUM, MEAN, NONE"),
        (
            {
                "table_options": [OPTIONS, table_options(5)],
                "pooling_mode": DynamicEmbPoolingMode.NONE,
            },
            VALUE,
            "dim of the tables.*one dim",
        ),
        ({"output_dtype": torch.int8}, VALUE, "output_dtype is torch.int8"),
        without_gpu({"device": "cuda:0"}, VALUE, "device is 'cuda:0'.*cpu"),
        ({"optimizer": "lamb"}, VALUE, "LAMB.*allowed.*ADAM"),
        ({"learning_rate": -1.0}, VALUE, r"learning_rate is -1\.0"),
        ({"learning_rte": 0.1}, VALUE, "'learning_rte'; did you mean 'learning_rate'"),
        ({"lr": 0.1}, VALUE, "unknown argument 'lr'.*learning_rate"),
        ({"max_norm": 1.0}, VALUE, "max_norm is 1.0.*nothing implements"),
        ({"seed": 1.5}, TYPE, r"seed is 1\.5"),
    ],
)
def test_arguments_of_batched_tables(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    check(
        lambda: BatchedDynamicEmbeddingTables(**({"table_options": [OPTIONS]} | arguments)),
        error,
        message,
    )


def unchanged(module: Any, call: Callable[[], Any], error: Any, message: str) -> None:
    before = [table.state_dict() for table in module.tables]
    stats = [table.stats() for table in module.tables]
    check(call, error, message)
    assert [table.stats() for table in module.tables] == stats
    for table, state in zip(module.tables, before, strict=True):
        after = table.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())


IDS = torch.tensor([1, 2, 3])
META = torch.empty(3, dtype=torch.int64, device="meta")

IDS_CASES = [
    ([1, 2, 3], TYPE, r"is \[1, 2, 3\]"),
    (None, TYPE, "is None"),
    (IDS.float(), TYPE, "dtype is torch.float32.*integer"),
    (IDS.bool(), TYPE, "dtype is torch.bool"),
    (IDS.to(torch.complex64), TYPE, "dtype is torch.complex64"),
    (META, VALUE, "device is 'meta'.*(cpu|cuda)"),
]


@pytest.mark.parametrize(("ids", "error", "message"), IDS_CASES)
@pytest.mark.parametrize("training", [True, False])
def test_ids_of_every_module(ids: Any, error: Any, message: str, training: bool) -> None:
    rows = DynamicEmbedding(4)
    rows.train(training)
    unchanged(rows, lambda: rows(ids), error, "input.*" + message)
    bag = DynamicEmbeddingBag(4)
    bag.train(training)
    unchanged(bag, lambda: bag(ids, torch.tensor([0])), error, "input.*" + message)
    batched = BatchedDynamicEmbeddingTables([OPTIONS])
    batched.train(training)
    offsets = torch.tensor([0, 3])
    unchanged(batched, lambda: batched(ids, offsets), error, "indices.*" + message)
    unchanged(batched, lambda: batched.prefetch(ids, offsets), error, "indices.*" + message)


OFFSET_CASES = [
    (None, TYPE, "offsets is None"),
    ([0, 3], TYPE, r"offsets is \[0, 3\]"),
    (torch.tensor([0.0, 3.0]), TYPE, "offsets is torch.float32"),
    (torch.tensor([[0, 3]]), VALUE, r"offsets.shape is \(1, 2\)"),
    (torch.empty(0, dtype=torch.int64), VALUE, "offsets"),
    without_gpu(torch.tensor([1, 3]), VALUE, r"offsets\[0\] is 1.*0"),
    without_gpu(torch.tensor([-1, 3]), VALUE, r"offsets\[0\] is -1"),
    without_gpu(torch.tensor([0, 2]), VALUE, r"offsets\[-1\] is 2.*3"),
    without_gpu(torch.tensor([0, 2**40]), VALUE, r"offsets\[-1\] is 1099511627776"),
    without_gpu(torch.tensor([0, 3, 2, 3]), VALUE, r"offsets\[2\] is 2; allowed: at least .*3"),
    without_gpu(torch.tensor([0, 4, 3]), VALUE, r"offsets\[1\] is 4; allowed: at most 3"),
    without_gpu(torch.tensor([0, -5, 3]), VALUE, r"offsets\[1\] is -5"),
    (torch.tensor([0]), VALUE, "offsets"),
    (torch.tensor([0, 3]).to("meta"), VALUE, "offsets.device is 'meta'"),
]


@pytest.mark.parametrize(
    "ids",
    [IDS.to_sparse(), torch.nested.nested_tensor([IDS, IDS[:1]])],
    ids=["sparse", "nested"],
)
def test_ids_in_another_layout(ids: torch.Tensor) -> None:
    for module in (DynamicEmbedding(4), DynamicEmbeddingBag(4)):
        unchanged(module, lambda one=module: one(ids), VALUE, "input.layout is .*torch.strided")


@pytest.mark.parametrize(("offsets", "error", "message"), OFFSET_CASES)
def test_offsets_of_batched_tables(offsets: Any, error: Any, message: str) -> None:
    module = BatchedDynamicEmbeddingTables([OPTIONS])
    module(torch.tensor([9]), torch.tensor([0, 1]))
    unchanged(module, lambda: module(IDS, offsets), error, message)
    unchanged(module, lambda: module.prefetch(IDS, offsets), error, message)
    module.eval()
    unchanged(module, lambda: module(IDS, offsets), error, message)


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        (None, VALUE, "offsets is None"),
        ([0, 1], TYPE, r"offsets is \[0, 1\]"),
        (torch.tensor([0.0]), TYPE, "offsets is torch.float32"),
        (torch.tensor([[0]]), VALUE, r"offsets.shape is \(1, 1\)"),
        without_gpu(torch.tensor([1]), VALUE, r"offsets\[0\] is 1"),
        without_gpu(torch.tensor([0, 2, 1]), VALUE, r"offsets\[2\] is 1"),
        without_gpu(torch.tensor([0, 4]), VALUE, r"offsets\[1\] is 4; allowed: at most 3"),
        (torch.empty(0, dtype=torch.int64), VALUE, "offsets is 'empty'; allowed: .* of 3 ids"),
        (torch.tensor([0]).to("meta"), VALUE, "offsets.device is 'meta'"),
    ],
)
def test_offsets_of_a_bag(offsets: Any, error: Any, message: str) -> None:
    module = DynamicEmbeddingBag(4)
    module(torch.tensor([[9]]))
    unchanged(module, lambda: module(IDS, offsets), error, message)


@pytest.mark.not_on_a_gpu
def test_include_last_offset_must_end_at_the_number_of_ids() -> None:
    module = DynamicEmbeddingBag(4, include_last_offset=True)
    unchanged(module, lambda: module(IDS, torch.tensor([0, 2])), VALUE, r"offsets\[-1\] is 2.*3")


def test_shapes_of_a_bags_input() -> None:
    module = DynamicEmbeddingBag(4)
    cube = torch.zeros(2, 2, 2, dtype=torch.int64)
    unchanged(module, lambda: module(cube), VALUE, r"input.shape is \(2, 2, 2\)")
    one = torch.tensor(3)
    unchanged(module, lambda: module(one, torch.tensor([0])), VALUE, r"input.shape is \(\)")
    square = torch.zeros(2, 2, dtype=torch.int64)
    unchanged(module, lambda: module(square, torch.tensor([0])), VALUE, "offsets.*2-D")


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1.0, 1.0, 1.0], TYPE, r"per_sample_weights is \[1"),
        (torch.ones(3, dtype=torch.int64), TYPE, "per_sample_weights is torch.int64"),
        (torch.ones(2), VALUE, r"per_sample_weights.shape is \(2,\).*\(3,\)"),
        (torch.ones(3, 1), VALUE, r"per_sample_weights.shape is \(3, 1\)"),
        (torch.ones(3, device="meta"), VALUE, "per_sample_weights.device is 'meta'"),
    ],
)
def test_weights(weights: Any, error: Any, message: str) -> None:
    bag = DynamicEmbeddingBag(4, mode="sum")
    unchanged(bag, lambda: bag(IDS, torch.tensor([0]), weights), error, message)
    batched = BatchedDynamicEmbeddingTables([OPTIONS])
    unchanged(batched, lambda: batched(IDS, torch.tensor([0, 3]), weights), error, message)


def test_weights_where_they_mean_nothing() -> None:
    mean = DynamicEmbeddingBag(4, mode="mean")
    weights = torch.ones(3)
    unchanged(mean, lambda: mean(IDS, torch.tensor([0]), weights), VALUE, "mode is 'mean'.*'sum'")
    rows = BatchedDynamicEmbeddingTables([OPTIONS], pooling_mode=DynamicEmbPoolingMode.NONE)
    unchanged(
        rows,
        lambda: rows(IDS, torch.tensor([0, 3]), weights),
        VALUE,
        "per_sample_weights.*pooling NONE",
    )


def test_offsets_that_do_not_fit_the_features() -> None:
    module = BatchedDynamicEmbeddingTables([OPTIONS], feature_table_map=[0, 0])
    unchanged(
        module, lambda: module(IDS, torch.tensor([0, 3])), VALUE, r"len\(offsets\) is 2.*2 features"
    )


def test_variable_batches_are_refused() -> None:
    module = BatchedDynamicEmbeddingTables([OPTIONS])
    unchanged(
        module,
        lambda: module(IDS, torch.tensor([0, 3]), batch_size_per_feature_per_rank=[[1]]),
        VALUE,
        "batch_size_per_feature_per_rank",
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.set_score(5), TYPE, "named_score is 5"),
        (lambda m: m.set_score({"x": 5}), VALUE, "table name is 'x'.*t0"),
        (lambda m: m.incremental_dump(5), TYPE, "named_thresholds is 5"),
        (lambda m: m.incremental_dump({"x": 5}), VALUE, "table name is 'x'.*t0"),
        (lambda m: m.incremental_dump({"t0": -1}), VALUE, "threshold is -1"),
        (lambda m: m.incremental_dump({"t0": 1.5}), TYPE, "threshold is 1.5"),
        (lambda m: m.export_keys_values("x"), VALUE, "table name is 'x'.*t0"),
        (lambda m: m.export_keys_values("t0", batch_size=0), VALUE, "batch_size is 0"),
        (lambda m: m.set_learning_rate(-0.1), VALUE, "lr is -0.1"),
        (lambda m: m.set_learning_rate(math.inf), VALUE, "lr is inf"),
        (lambda m: m.set_learning_rate("fast"), TYPE, "lr is 'fast'"),
    ],
)
def test_methods_of_batched_tables(call: Any, error: Any, message: str) -> None:
    module = BatchedDynamicEmbeddingTables([OPTIONS])
    module(IDS, torch.tensor([0, 3]))
    unchanged(module, lambda: call(module), error, message)


def test_a_gradient_of_nan_stays_in_its_row() -> None:
    module = DynamicEmbedding(2, options=table_options(2), optimizer="adam")
    gradient = torch.ones(3, 2)
    gradient[1] = math.nan
    module(IDS).backward(gradient)
    rows = module.table.find(IDS).embeddings
    assert torch.isfinite(rows[[0, 2]]).all()
    assert torch.isnan(rows[1]).all()
