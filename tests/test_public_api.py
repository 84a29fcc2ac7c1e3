"""The public surface, frozen: a change here is a change for users and belongs in the changelog."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

import dynamicemb
from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicEmbInitializerArgs,
    DynamicEmbTableOptions,
    KVCounter,
    OptimizerArgs,
    dcp,
    exchange,
    incremental_dump,
    one_embedding,
    serving,
    tiers,
)
from dynamicemb.table import Table, TableStats, create_table

NAMES = {
    "dump_async",
    "TableLoad",
    "LoadReport",
    "DynamicEmbLoad",
    "DynamicEmbDump",
    "DumpHandle",
    "AdmissionStrategy",
    "ArgumentTypeError",
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "BatchedDynamicEmbeddingTables",
    "BatchedDynamicEmbeddingTablesV2",
    "CheckpointError",
    "CorruptCheckpointError",
    "CorruptStoreError",
    "Counter",
    "DEMB_TABLE_ALIGN_SIZE",
    "DynamicEmbCheckMode",
    "DynamicEmbError",
    "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "EmbOptimType",
    "FrequencyAdmissionStrategy",
    "InsertionError",
    "InvalidArgumentError",
    "KVCounter",
    "MAX_BUCKET_CAPACITY",
    "OptimizerArgs",
    "OutOfMemoryError",
    "ProbabilityAdmissionStrategy",
    "ReplacedCheckpointError",
    "ScoreStrategy",
    "StoreError",
    "UsageError",
    "align_to_table_size",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dyn_emb_to_torch",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "string_to_evict_strategy",
    "text_id",
    "text_ids",
    "torch_to_dyn_emb",
}


def defaults(function: Any) -> dict[str, str]:
    """Parameter names with their defaults; a name that must be given has none."""
    return {
        name: "" if one.default is inspect.Parameter.empty else str(one.default)
        for name, one in inspect.signature(function).parameters.items()
        if name != "self"
    }


def fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_names_of_the_package() -> None:
    assert set(dynamicemb.__all__) == NAMES
    assert len(dynamicemb.__all__) == len(NAMES)
    for name in NAMES:
        assert hasattr(dynamicemb, name)


def test_table_options() -> None:
    assert fields(DynamicEmbTableOptions) == [
        "index_type",
        "embedding_dtype",
        "score_type",
        "device_id",
        "dim",
        "max_capacity",
        "init_capacity",
        "max_load_factor",
        "global_hbm_for_values",
        "local_hbm_for_values",
        "evict_strategy",
        "bucket_capacity",
        "safe_check_mode",
        "block_size",
        "io_block_size",
        "io_by_cpu",
        "use_constant_memory",
        "reserved_key_start_bit",
        "num_of_buckets_per_alloc",
        "initializer_args",
        "score_strategy",
        "eval_initializer_args",
        "training",
        "caching",
        "external_storage",
        "dist_type",
        "admit_strategy",
        "admission_counter",
    ]
    options = DynamicEmbTableOptions()
    shown = {name: str(getattr(options, name)) for name in fields(DynamicEmbTableOptions)}
    initial = "DynamicEmbInitializerArgs(mode={}, mean=0.0, std_dev=1.0, lower=None, upper=None, "
    assert shown == {
        "index_type": "None",
        "embedding_dtype": "None",
        "score_type": "torch.uint64",
        "device_id": "None",
        "dim": "None",
        "max_capacity": "None",
        "init_capacity": "None",
        "max_load_factor": "0.5",
        "global_hbm_for_values": "0",
        "local_hbm_for_values": "0",
        "evict_strategy": "DynamicEmbEvictStrategy.LRU",
        "bucket_capacity": "128",
        "safe_check_mode": "2",
        "block_size": "128",
        "io_block_size": "1024",
        "io_by_cpu": "False",
        "use_constant_memory": "False",
        "reserved_key_start_bit": "0",
        "num_of_buckets_per_alloc": "1",
        "initializer_args": initial.format("<DynamicEmbInitializerMode.UNIFORM: 'uniform'>")
        + "value=0.0)",
        "score_strategy": "0",
        "eval_initializer_args": initial.format("<DynamicEmbInitializerMode.CONSTANT: 'constant'>")
        + "value=0.0)",
        "training": "True",
        "caching": "False",
        "external_storage": "None",
        "dist_type": "roundrobin",
        "admit_strategy": "None",
        "admission_counter": "None",
    }


def test_other_option_classes() -> None:
    assert fields(DynamicEmbInitializerArgs) == [
        "mode",
        "mean",
        "std_dev",
        "lower",
        "upper",
        "value",
    ]
    assert fields(KVCounter) == ["capacity", "bucket_capacity", "key_type"]
    assert {"learning_rate", "eps", "beta1", "beta2", "weight_decay", "momentum"} <= set(
        fields(OptimizerArgs)
    )
    assert fields(TableStats) == [
        "hits",
        "misses",
        "inserts",
        "evictions",
        "failures",
        "rejections",
        "dropped_gradients",
        "size",
        "capacity",
        "load_factor",
        "bytes",
    ]


SIMPLE = {
    "padding_idx": "None",
    "max_capacity": "None",
    "dtype": "None",
    "output_dtype": "None",
    "optimizer": "None",
    "optimizer_args": "None",
    "options": "None",
    "init_std": "None",
    "init_range": "None",
    "seed": "None",
    "name": "rows",
    "device": "None",
}


def test_module_arguments() -> None:
    assert defaults(DynamicEmbedding.__init__) == {"embedding_dim": "", **SIMPLE}
    assert defaults(DynamicEmbeddingBag.__init__) == {
        "embedding_dim": "",
        "mode": "mean",
        "include_last_offset": "False",
        **SIMPLE,
    }
    assert defaults(BatchedDynamicEmbeddingTables.__init__) == {
        "table_options": "",
        "table_names": "None",
        "feature_table_map": "None",
        "use_index_dedup": "False",
        "prefetch_pipeline": "False",
        "pooling_mode": "0",
        "output_dtype": "torch.float32",
        "device": "None",
        "enforce_hbm": "False",
        "bounds_check_mode": "None",
        "optimizer": "sgd",
        "separate_step": "False",
        "seed": "None",
        "optimizer_args": "",
    }


def test_module_methods() -> None:
    forward = {"offsets": "None", "per_sample_weights": "None"}
    assert defaults(DynamicEmbedding.forward) == {"input": ""}
    assert defaults(DynamicEmbeddingBag.forward) == {"input": "", **forward}
    module = BatchedDynamicEmbeddingTables
    assert defaults(module.forward) == {
        "indices": "",
        "offsets": "",
        "per_sample_weights": "None",
        "feature_requires_grad": "None",
        "batch_size_per_feature_per_rank": "None",
        "total_unique_indices": "None",
    }
    assert defaults(module.prefetch) == {
        "indices": "",
        "offsets": "",
        "forward_stream": "None",
        "batch_size_per_feature_per_rank": "None",
        "frequency_counters": "None",
    }
    assert defaults(module.set_score) == {"named_score": ""}
    assert defaults(module.get_score) == {}
    assert defaults(module.set_learning_rate) == {"lr": ""}
    assert defaults(module.incremental_dump) == {"named_thresholds": "", "pg": "None"}
    assert defaults(module.export_keys_values) == {
        "table_name": "",
        "device": "cpu",
        "batch_size": "65536",
    }
    assert defaults(module.step) == defaults(module.flush) == {}


def test_table_methods() -> None:
    assert defaults(create_table) == {
        "options": "",
        "optimizer": "None",
        "name": "table",
        "seed": "None",
        "clock": "None",
        "device": "None",
    }
    assert defaults(Table.find) == defaults(Table.contains) == {"ids": ""}
    assert defaults(Table.find_or_insert) == {
        "ids": "",
        "counts": "None",
        "return_evicted": "False",
    }
    assert defaults(Table.insert) == {
        "ids": "",
        "embeddings": "",
        "state": "None",
        "scores": "None",
        "return_evicted": "False",
    }
    assert defaults(Table.assign) == {
        "ids": "",
        "embeddings": "",
        "state": "None",
        "scores": "None",
    }
    assert defaults(Table.export) == {
        "batch_size": "65536",
        "score_threshold": "None",
        "changed_since": "None",
    }
    assert defaults(Table.log_removals) == {"limit": "None"}


def test_incremental_dump() -> None:
    assert set(incremental_dump.__all__) == {
        "Delta",
        "Published",
        "apply_delta",
        "dump_delta",
        "get_score",
        "incremental_dump",
        "is_valid_score_threshold",
        "publish",
        "set_score",
        "track_removals",
    }
    assert defaults(incremental_dump.incremental_dump) == {
        "model": "",
        "score_threshold": "",
        "pg": "None",
        "removed": "False",
    }
    assert list(defaults(incremental_dump.dump_delta)) == [
        "path",
        "model",
        "table_names",
        "optim",
        "pg",
        "counter",
        "compact",
        "removal_limit",
        "progress",
    ]
    assert list(defaults(incremental_dump.apply_delta)) == ["path", "target", "pg", "progress"]
    assert defaults(incremental_dump.get_score) == {"model": ""}
    assert defaults(incremental_dump.set_score) == {"model": "", "table_score": ""}
    assert defaults(incremental_dump.track_removals) == {"model": "", "limit": "None"}


def test_tiers() -> None:
    assert set(tiers.__all__) == {
        "BoundedStore",
        "CacheStats",
        "CachedTable",
        "HostStore",
        "RemoteStore",
        "RowLayout",
        "SsdStore",
        "Stack",
        "Store",
        "StoreStats",
    }


def test_torchrec_dynamic_embedding() -> None:
    tde = pytest.importorskip("torchrec_dynamic_embedding")
    pytest.importorskip("torchrec")
    assert set(tde.__all__) == {"save", "wrap"}
    assert defaults(tde.wrap) == {
        "url": "",
        "dataloader": "",
        "module": "",
        "configs_dict": "",
        "data_info": "None",
        "eviction_config": "None",
        "transform_config": "None",
        "ps_config": "None",
        "parallel": "True",
        "num_prefetch": "0",
        "in_flight": "0",
    }
    assert defaults(tde.save) == {"module": ""}


def test_serving() -> None:
    assert set(serving.__all__) == {
        "HttpTable",
        "PublishedTable",
        "ServingTable",
        "build_serving_index",
    }
    assert defaults(serving.HttpTable) == {"url": "", "name": "", "timeout": "30.0"}
    assert defaults(serving.PublishedTable) == {
        "url": "",
        "name": "",
        "dim": "",
        "dtype": "torch.float32",
    }
    assert defaults(incremental_dump.publish) == {"url": "", "model": "", "table_names": "None"}
    assert defaults(serving.ServingTable) == {
        "path": "",
        "table_name": "None",
        "collection": "None",
        "rank": "None",
        "missing": "0.0",
        "verify": "False",
        "preload": "False",
    }


def test_dcp() -> None:
    assert set(dcp.__all__) == {"DynamicTables", "dense_state_dict"}
    assert defaults(dcp.DynamicTables) == {
        "model": "",
        "saved_in": "None",
        "pg": "None",
        "name": "tables",
    }


def test_exchange() -> None:
    assert set(exchange.__all__) == {"Imported", "export_table", "import_rows", "import_table"}
    assert list(defaults(exchange.export_table)) == [
        "source",
        "path",
        "table_name",
        "format",
        "state",
        "scores",
        "batch_size",
    ]
    assert list(defaults(exchange.import_table)) == [
        "target",
        "path",
        "table_name",
        "format",
        "names",
        "state",
        "scores",
        "batch_size",
    ]
    assert list(defaults(exchange.import_rows)) == ["target", "ids", "embeddings", "table_name"]


def test_dump_and_load() -> None:
    given = {"path": "", "model": "", "table_names": "None", "optim": "False", "pg": "None"}
    dumping = {"counter": "False", "allow_overwrite": "False", "scores": "True", "compact": "False"}
    dumping["serving_index"] = "False"
    assert defaults(dynamicemb.DynamicEmbDump) == given | dumping | {"progress": "None"}
    assert defaults(dynamicemb.dump_async) == given | dumping
    assert defaults(dynamicemb.DynamicEmbLoad) == given | {
        "counter": "False",
        "scores": "True",
        "clear": "False",
        "verify_first": "True",
        "progress": "None",
    }
    assert fields(dynamicemb.TableLoad) == ["rows", "did_not_fit", "optimizer_state", "counter"]
    assert fields(dynamicemb.LoadReport) == ["tables", "missing"]


def test_one_embedding() -> None:
    assert set(one_embedding.__all__) == {
        "Adagrad",
        "Adam",
        "Embedding",
        "Ftrl",
        "MultiTableEmbedding",
        "MultiTableMultiColumnEmbedding",
        "Optimizer",
        "SGD",
        "SmartDecayAdam",
        "make_cached_host_mem_store_options",
        "make_cached_remote_store_options",
        "make_cached_ssd_store_options",
        "make_column_options",
        "make_constant_initializer",
        "make_device_mem_store_options",
        "make_normal_initializer",
        "make_persistent_table_reader",
        "make_persistent_table_writer",
        "make_table",
        "make_table_options",
        "make_trunc_normal_initializer",
        "make_uniform_initializer",
    }
    of_oneflow = {"name": "", "embedding_dim": "", "dtype": "", "key_type": "", "tables": ""}
    of_oneflow |= {"store_options": "", "default_initializer": "None", "padding_idx": "None"}
    assert defaults(one_embedding.MultiTableEmbedding) == of_oneflow | {
        "seed": "0",
        "share_ids": "True",
        "resume": "None",
        "gradient_reduction": "sum",
        "process_group": "None",
        "device": "None",
    }
    assert defaults(one_embedding.MultiTableMultiColumnEmbedding) == defaults(
        one_embedding.MultiTableEmbedding
    )
    where = {"persistent_path": "", "capacity": ""}
    sizes = {"size_factor": "1", "storage_dim": "-1", "physical_block_size": "4096"}
    budget, full = {"cache_budget_mb": ""}, {"on_full": "error"}
    assert defaults(one_embedding.make_device_mem_store_options) == where | sizes | full
    assert defaults(one_embedding.make_cached_host_mem_store_options) == (
        budget | where | sizes | full
    )
    assert defaults(one_embedding.make_cached_ssd_store_options) == (
        budget | where | {"capacity": "None"} | sizes | {"host_cache_budget_mb": "0"}
    )
    assert defaults(one_embedding.make_cached_remote_store_options) == (
        budget | {"url": "", "persistent_path": ""} | sizes | {"host_cache_budget_mb": "0"}
    )
    assert defaults(one_embedding.Ftrl) == {
        "params": "",
        "lr": "0.001",
        "weight_decay": "0.0",
        "lr_power": "-0.5",
        "initial_accumulator_value": "0.1",
        "lambda1": "0.0",
        "lambda2": "0.0",
        "beta": "0.0",
    }
    persistent = ["paths", "snapshot_name", "key_type", "value_type", "storage_dim"]
    for make in (
        one_embedding.make_persistent_table_reader,
        one_embedding.make_persistent_table_writer,
    ):
        assert list(defaults(make)) == [*persistent, "physical_block_size"]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("dynamicemb_config", ["DynamicEmbTableOptions", "DynamicEmbScoreStrategy"]),
        ("batched_dynamicemb_tables", ["BatchedDynamicEmbeddingTables"]),
        (
            "batched_dynamicemb_tables",
            ["encode_checkpoint_file_path", "encode_meta_json_file_path"],
        ),
        ("dump_load", ["DynamicEmbDump", "DynamicEmbLoad", "get_dynamic_emb_module"]),
        ("optimizer", ["EmbOptimType", "OptimizerArgs"]),
        ("types", ["AdmissionStrategy", "Counter", "DynamicEmbDataType"]),
        ("embedding_admission", ["FrequencyAdmissionStrategy", "KVCounter"]),
        ("initializer", ["BaseDynamicEmbInitializer", "create_initializer_from_args"]),
    ],
)
def test_import_paths_of_existing_code(module: str, names: list[str]) -> None:
    imported = importlib.import_module(f"dynamicemb.{module}")
    for name in names:
        assert hasattr(imported, name)
        if name in NAMES:
            assert getattr(imported, name) is getattr(dynamicemb, name)


def test_it_imports_with_torch_alone() -> None:
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchrec", "fbgemm_gpu"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch, dynamicemb
rows = dynamicemb.DynamicEmbedding(4)
rows(torch.tensor([1, 2])).sum().backward()
torch.optim.SGD(rows.parameters(), lr=0.1).step()
assert "torchrec" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # the library prints nothing
    assert "Warning" not in done.stderr
