"""The dictionaries of options: what they hold, what they refuse, and that nobody changes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from embeddings import make, store_options, train, uniform_tables

from dynamicemb import one_embedding
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError


def test_initializers_are_plain_dictionaries() -> None:
    assert one_embedding.make_uniform_initializer() == {"type": "uniform", "low": 0.0, "high": 1.0}
    assert one_embedding.make_normal_initializer(std=0.5) == {
        "type": "normal",
        "mean": 0.0,
        "std": 0.5,
    }
    assert one_embedding.make_constant_initializer(3) == {"type": "constant", "value": 3}
    assert one_embedding.make_trunc_normal_initializer(a=-1.0) == {
        "type": "trunc_normal",
        "mean": 0.0,
        "std": 1.0,
        "a": -1.0,
        "b": 2.0,
    }


def test_tables_are_plain_dictionaries() -> None:
    uniform = one_embedding.make_uniform_initializer()
    assert one_embedding.make_table_options(uniform) == {"initializer": uniform}
    assert one_embedding.make_table(uniform) == {"initializer": uniform}
    column = one_embedding.make_column_options(uniform)
    assert column == {"initializer": uniform}
    assert one_embedding.make_table_options([column, column]) == {"columns": [column, column]}
    with pytest.raises(ValueError, match="param is 'uniform'.*an initializer, or a list"):
        one_embedding.make_table_options("uniform")


def test_store_options_are_those_of_oneflow() -> None:
    persistent = {"path": "p", "physical_block_size": 4096, "capacity_hint": 10}
    lru = {"policy": "lru", "cache_memory_budget_mb": 5, "value_memory_kind": "device"}
    full = {"policy": "full", "capacity": 10, "value_memory_kind": "device"}
    sizes = {"size_factor": 1, "storage_dim": -1}
    assert one_embedding.make_device_mem_store_options("p", 10) == {
        "kv_store": {"caches": [full], "persistent_table": persistent},
        **sizes,
        "on_full": "error",
    }
    assert one_embedding.make_cached_ssd_store_options(5, "p", 10) == {
        "kv_store": {"caches": [lru], "persistent_table": persistent},
        **sizes,
    }
    assert one_embedding.make_cached_host_mem_store_options(5, "p", 10, on_full="grow") == {
        "kv_store": {
            "caches": [lru, {**full, "value_memory_kind": "host"}],
            "persistent_table": persistent,
        },
        **sizes,
        "on_full": "grow",
    }
    both = one_embedding.make_cached_ssd_store_options(5, "p", host_cache_budget_mb=7)
    assert both["kv_store"]["caches"] == [
        lru,
        {"policy": "lru", "cache_memory_budget_mb": 7, "value_memory_kind": "host"},
    ]
    assert both["kv_store"]["persistent_table"]["capacity_hint"] == 0


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m: m.make_device_mem_store_options("p", 0), "capacity is 0; allowed: .*at least 1"),
        (lambda m: m.make_device_mem_store_options("", 1), "persistent_path is ''"),
        (lambda m: m.make_device_mem_store_options(7, 1), "persistent_path is 7"),
        (lambda m: m.make_device_mem_store_options(["p", 7], 1), "persistent_path is 7"),
        (
            lambda m: m.make_device_mem_store_options("p", 1, physical_block_size=1000),
            "physical_block_size is 1000; allowed: 512, 4096",
        ),
        (lambda m: m.make_device_mem_store_options("p", 1, 0), "size_factor is 0"),
        (lambda m: m.make_device_mem_store_options("p", 1, on_full="evict"), "on_full is 'evict'"),
        (lambda m: m.make_cached_ssd_store_options(0, "p"), "cache_budget_mb is 0"),
        (lambda m: m.make_cached_ssd_store_options(-1, "p"), "cache_budget_mb is -1"),
        (lambda m: m.make_cached_host_mem_store_options(0, "p", 9), "cache_budget_mb is 0"),
        (lambda m: m.make_uniform_initializer(low=2), "lower is 2.0; allowed: less than upper"),
        (lambda m: m.make_normal_initializer(std=-1), "std_dev is -1"),
        (lambda m: m.make_constant_initializer("x"), "value of initializer is 'x'"),
        (lambda m: m.make_column_options({"type": "uniform"}), "the keys type, low, high"),
        (lambda m: m.make_column_options({"type": "xavier"}), "'xavier'; allowed: uniform, normal"),
    ],
)
def test_wrong_options_are_refused(call: Any, problem: str) -> None:
    with pytest.raises((InvalidArgumentError, ArgumentTypeError), match=problem):
        call(one_embedding)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": ""}, "name is ''"),
        ({"dim": 0}, "embedding_dim is 0"),
        ({"dim": [4, 4]}, "use MultiTableMultiColumnEmbedding"),
        ({"key_type": torch.int16}, "key_type is torch.int16; allowed: torch.int64"),
        ({"tables": []}, "tables is \\[\\]"),
        ({"tables": [{"initialiser": 1}]}, "tables\\[0\\] is .*make_table_options"),
        ({"tables": uniform_tables(*[1.0] * 257)}, "len\\(tables\\) is 257"),
        ({"options": {"kv_store": {}}}, "store_options is .*make_device_mem_store_options"),
        ({"options": [1]}, "store_options is \\[1\\]"),
        ({"size_factor": 5}, "size_factor is 5; .*1, 2 or 3.*24 for Adam"),
        ({"padding_idx": 2**31, "key_type": torch.int32}, "padding_idx is 2147483648"),
        ({"gradient_reduction": "max"}, "gradient_reduction is 'max'"),
        ({"default_initializer": 0.5}, "default_initializer is 0.5"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises((InvalidArgumentError, ArgumentTypeError), match=problem):
        make(tmp_path, **change)
    assert list(tmp_path.iterdir()) == []


def test_columns_must_be_as_many_as_widths(tmp_path: Path) -> None:
    column = one_embedding.make_column_options(one_embedding.make_uniform_initializer())
    tables = [one_embedding.make_table_options([column] * 3)]
    with pytest.raises(InvalidArgumentError, match="columns of tables\\[0\\] is 3; allowed: 2"):
        make(
            tmp_path,
            dim=[4, 4],
            tables=tables,
            module=one_embedding.MultiTableMultiColumnEmbedding,
        )


@pytest.mark.parametrize("store", ["device_mem", "cached_host_mem", "cached_ssd"])
def test_options_are_not_changed(tmp_path: Path, store: str) -> None:
    options, tables = store_options(store, tmp_path), uniform_tables(0.1, 0.2)
    before = copy.deepcopy((options, tables))
    embedding = make(tmp_path, options=options, tables=tables)
    train(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1), steps=2)
    embedding.save_snapshot("a")
    embedding.load_snapshot("a")
    embedding.state_dict()
    assert (options, tables) == before


def test_a_name_is_used_once_at_a_time(tmp_path: Path) -> None:
    first = make(tmp_path / "a", name="users")
    with pytest.raises(InvalidArgumentError, match="name is 'users'; allowed: a name that no"):
        make(tmp_path / "b", name="users")
    first.close()
    make(tmp_path / "b", name="users")
