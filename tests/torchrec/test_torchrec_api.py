"""The names and signatures that existing code for TorchRec uses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.mc_modules import ManagedCollisionModule as TorchRecModule
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.get_planner import get_planner
from dynamicemb.managed_collision import ManagedCollisionModule, reset_evicted_rows
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from dynamicemb.shard import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
)
from dynamicemb.shard.embedding import DynamicEmbeddingCollectionContext
from dynamicemb.unsharded import make_dynamic


def parameters(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {
        name: "required" if one.default is inspect.Parameter.empty else one.default
        for name, one in found.items()
        if name != "self"
    }


def test_constraints_add_two_fields_to_torchrecs() -> None:
    assert issubclass(DynamicEmbParameterConstraints, ParameterConstraints)
    own = [one.name for one in fields(DynamicEmbParameterConstraints)]
    theirs = [one.name for one in fields(ParameterConstraints)]
    assert own == [*theirs, "use_dynamicemb", "dynamicemb_options"]
    made = DynamicEmbParameterConstraints()
    assert made.use_dynamicemb is False
    assert made.dynamicemb_options == DynamicEmbTableOptions()
    assert made.dynamicemb_options is not DynamicEmbParameterConstraints().dynamicemb_options


def test_enumerator() -> None:
    assert issubclass(DynamicEmbeddingEnumerator, EmbeddingEnumerator)
    assert parameters(DynamicEmbeddingEnumerator) == {
        "topology": "required",
        "batch_size": 512,
        "constraints": None,
        "estimator": None,
        "use_exact_enumerate_order": False,
        "charge_memory": True,
    }


def test_planner() -> None:
    expected = {"eb_configs": "required", "topology": None, "batch_size": None}
    names = "enumerator storage_reservation proposer partitioner performance_model stats"
    expected |= dict.fromkeys([*names.split(), "constraints"])
    assert parameters(DynamicEmbeddingShardingPlanner) == expected | {"debug": True}
    assert list(parameters(DynamicEmbeddingShardingPlanner)) == [*expected, "debug"]
    plan = DynamicEmbeddingShardingPlanner.collective_plan
    assert parameters(plan) == {"module": "required", "sharders": None, "pg": None}


def test_sharders() -> None:
    assert issubclass(DynamicEmbeddingCollectionSharder, EmbeddingCollectionSharder)
    assert issubclass(DynamicEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder)
    assert parameters(DynamicEmbeddingCollectionSharder) == {
        "fused_params": None,
        "qcomm_codecs_registry": None,
        "use_index_dedup": False,
    }
    sharder = DynamicEmbeddingCollectionSharder()
    assert sharder.sharded_module_type is ShardedDynamicEmbeddingCollection
    bags = DynamicEmbeddingBagCollectionSharder()
    assert bags.sharded_module_type is ShardedDynamicEmbeddingBagCollection
    assert ShardedDynamicEmbeddingCollection.is_dynamic_collection
    assert DynamicEmbeddingCollectionContext().frequency_counters == []
    assert DynamicEmbParameterSharding().customized_compute_kernel == "DynamicEmb"


def test_helpers() -> None:
    assert parameters(get_planner) == {
        "eb_configs": "required",
        "data_parallel_embedding_table_names": "required",
        "dynamicemb_options_dict": "required",
        "device": "required",
        "pipeline_type": "none",
        "ddr_cap": 512 * 1024**3,
        "intra_host_bw": 450e9,
        "inter_host_bw": 25e9,
    }
    assert list(parameters(make_dynamic))[:2] == ["model", "tables"]


@pytest.mark.parametrize("module", ["planner", "shard", "get_planner", "unsharded"])
def test_without_torchrec_an_import_says_what_to_install(module: str) -> None:
    code = f"""
import sys
sys.modules["torchrec"] = None
import dynamicemb
try:
    import dynamicemb.{module}
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert "needs torchrec: pip install 'dynamicemb[torchrec]'" in done.stdout


def test_managed_collision_takes_the_arguments_of_torchrecs_module() -> None:
    theirs = parameters(MCHManagedCollisionModule)
    ours = parameters(ManagedCollisionModule)
    assert list(ours) == list(theirs)
    changed = {name: (theirs[name], ours[name]) for name in ours if ours[name] != theirs[name]}
    assert changed == {
        "eviction_policy": ("required", None),
        "eviction_interval": ("required", 1),
        "input_hash_size": (2**63 - 1, 0),
        "buckets": (1, 0),
    }
    missing = {name for name in vars(TorchRecModule) if not name.startswith("_")} - set(
        dir(ManagedCollisionModule)
    )
    assert missing == set()
    assert parameters(reset_evicted_rows) == {"model": "required", "optimizers": ()}
