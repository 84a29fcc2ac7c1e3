"""The option classes: documented defaults, value equality, refusals that say what is allowed."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb import dynamicemb_config, types
from dynamicemb.admission import (
    AdmissionStrategy,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilityAdmissionStrategy,
)
from dynamicemb.errors import (
    ArgumentTypeError,
    DynamicEmbError,
    InsertionError,
    InvalidArgumentError,
    OutOfMemoryError,
    UsageError,
)
from dynamicemb.options import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    GroupedHKVConfig,
    HKVConfig,
    align_to_table_size,
    get_evict_strategy,
    get_eviction_score_strategy,
    get_physical_score_order,
    normalize_score_strategy,
    score_dump_permutation,
    score_load_permutation,
    score_strategy_has_timestamp_column,
    string_to_evict_strategy,
    validate_score_strategy,
    warning_for_cstm_score,
)

TIMESTAMP = DynamicEmbScoreStrategy.TIMESTAMP
STEP = DynamicEmbScoreStrategy.STEP
CUSTOMIZED = DynamicEmbScoreStrategy.CUSTOMIZED
LFU = DynamicEmbScoreStrategy.LFU
NO_EVICTION = DynamicEmbScoreStrategy.NO_EVICTION
MODE = DynamicEmbInitializerMode
EVICT = DynamicEmbEvictStrategy


def members(kind: Any) -> dict[str, Any]:
    return {member.name: member.value for member in kind}


def test_enum_members_and_values() -> None:
    assert members(DynamicEmbCheckMode) == {"ERROR": 0, "WARNING": 1, "IGNORE": 2}
    assert members(MODE) == {
        "NORMAL": "normal",
        "TRUNCATED_NORMAL": "truncated_normal",
        "UNIFORM": "uniform",
        "CONSTANT": "constant",
        "DEBUG": "debug",
    }
    assert members(DynamicEmbScoreStrategy) == {
        "TIMESTAMP": 0,
        "STEP": 1,
        "CUSTOMIZED": 2,
        "LFU": 3,
        "NO_EVICTION": 4,
    }
    assert members(EVICT) == {
        "LRU": 0,
        "LFU": 1,
        "EPOCH_LRU": 2,
        "EPOCH_LFU": 3,
        "CUSTOMIZED": 4,
    }
    assert members(DynamicEmbPoolingMode) == {"SUM": 0, "MEAN": 1, "NONE": 2}


def test_option_defaults_are_the_documented_ones() -> None:
    assert dataclasses.asdict(DynamicEmbTableOptions()) == {
        "index_type": None,
        "embedding_dtype": None,
        "score_type": torch.uint64,
        "device_id": None,
        "dim": None,
        "max_capacity": None,
        "init_capacity": None,
        "max_load_factor": 0.5,
        "global_hbm_for_values": 0,
        "local_hbm_for_values": 0,
        "evict_strategy": EVICT.LRU,
        "bucket_capacity": 128,
        "safe_check_mode": DynamicEmbCheckMode.IGNORE,
        "block_size": 128,
        "io_block_size": 1024,
        "io_by_cpu": False,
        "use_constant_memory": False,
        "reserved_key_start_bit": 0,
        "num_of_buckets_per_alloc": 1,
        "initializer_args": dataclasses.asdict(DynamicEmbInitializerArgs(MODE.UNIFORM)),
        "score_strategy": TIMESTAMP,
        "eval_initializer_args": dataclasses.asdict(DynamicEmbInitializerArgs(MODE.CONSTANT)),
        "training": True,
        "caching": False,
        "external_storage": None,
        "dist_type": "roundrobin",
        "admit_strategy": None,
        "admission_counter": None,
    }
    assert issubclass(DynamicEmbTableOptions, HKVConfig)
    assert issubclass(HKVConfig, GroupedHKVConfig)


def test_constants() -> None:
    assert dynamicemb_config.BUCKET_ALIGNMENT == dynamicemb_config.DEMB_TABLE_ALIGN_SIZE == 16
    assert dynamicemb_config.MAX_BUCKET_CAPACITY == 2**63 - 1
    assert dynamicemb_config.DEFAULT_INDEX_TYPE is torch.int64
    assert dynamicemb_config.DEFAULT_BUCKET_CAPACITY == 128
    assert dynamicemb_config.DEBUG_EMB_INITIALIZER_MOD == 100000
    assert dynamicemb_config.BATCH_SIZE_PER_DUMP == 65536
    assert dynamicemb_config.DynamicEmbKernel == "DynamicEmb"
    assert dynamicemb_config.SUPPORTED_DIST_TYPES == ("continuous", "roundrobin", "hash_roundrobin")


def test_two_options_never_share_an_initializer() -> None:
    first, second = DynamicEmbTableOptions(), DynamicEmbTableOptions()
    first.initializer_args.value = 3.0
    assert second.initializer_args.value == 0.0


@pytest.mark.parametrize(
    ("name", "value", "error", "allowed"),
    [
        ("dim", 0, InvalidArgumentError, "at least 1|from 1"),
        ("dim", -2, InvalidArgumentError, "from 1"),
        ("dim", 4.0, ArgumentTypeError, "an integer"),
        ("dim", True, ArgumentTypeError, "an integer"),
        ("dim", "8", ArgumentTypeError, "an integer"),
        ("max_capacity", 0, InvalidArgumentError, "from 1"),
        ("max_capacity", math.nan, ArgumentTypeError, "an integer"),
        ("max_capacity", 2**63, InvalidArgumentError, "from 1"),
        ("init_capacity", -5, InvalidArgumentError, "from 1"),
        ("max_load_factor", math.nan, InvalidArgumentError, "<= 1.0"),
        ("max_load_factor", 1.5, InvalidArgumentError, "<= 1.0"),
        ("max_load_factor", "half", ArgumentTypeError, "<= 1.0"),
        ("bucket_capacity", 17, InvalidArgumentError, "multiple of 16, or MAX_BUCKET_CAPACITY"),
        ("bucket_capacity", 0, InvalidArgumentError, "multiple of 16"),
        ("bucket_capacity", -16, InvalidArgumentError, "multiple of 16"),
        ("bucket_capacity", 128.0, ArgumentTypeError, "an integer"),
        ("embedding_dtype", torch.float64, InvalidArgumentError, "float32.*float16.*bfloat16"),
        ("embedding_dtype", "fp32", ArgumentTypeError, "float32.*float16.*bfloat16"),
        ("index_type", torch.int32, InvalidArgumentError, "int64.*uint64"),
        ("score_type", torch.float32, InvalidArgumentError, "int64.*uint64"),
        ("device_id", -1, InvalidArgumentError, "at least 0"),
        ("global_hbm_for_values", -1, InvalidArgumentError, "at least 0"),
        ("local_hbm_for_values", 1.5, ArgumentTypeError, "at least 0"),
        ("safe_check_mode", 1, ArgumentTypeError, "ERROR, WARNING, IGNORE"),
        ("evict_strategy", "LRU", ArgumentTypeError, "LRU, LFU, EPOCH_LRU"),
        ("score_strategy", 0, ArgumentTypeError, "TIMESTAMP, STEP, CUSTOMIZED, LFU, NO_EVICTION"),
        ("score_strategy", None, ArgumentTypeError, "TIMESTAMP, STEP"),
        ("score_strategy", (), InvalidArgumentError, r"\(TIMESTAMP, LFU\)"),
        ("score_strategy", (LFU, LFU), InvalidArgumentError, r"\(LFU, LFU\).*\(TIMESTAMP, LFU\)"),
        ("score_strategy", (STEP, LFU), InvalidArgumentError, r"\(STEP, LFU\)"),
        ("dist_type", "random", InvalidArgumentError, "continuous, roundrobin, hash_roundrobin"),
        ("dist_type", None, ArgumentTypeError, "continuous, roundrobin, hash_roundrobin"),
        ("training", 1, ArgumentTypeError, "True or False"),
        ("caching", "yes", ArgumentTypeError, "True or False"),
        ("external_storage", 3, ArgumentTypeError, "class"),
        ("initializer_args", "uniform", ArgumentTypeError, "DynamicEmbInitializerArgs"),
        ("eval_initializer_args", None, ArgumentTypeError, "DynamicEmbInitializerArgs"),
        ("eval_initializer_args", DynamicEmbInitializerArgs(), InvalidArgumentError, "CONSTANT"),
        ("admit_strategy", 3, ArgumentTypeError, "AdmissionStrategy"),
        ("block_size", 0, InvalidArgumentError, "at least 1"),
        ("io_block_size", "1k", ArgumentTypeError, "at least 1"),
        ("io_by_cpu", 0, ArgumentTypeError, "True or False"),
        ("use_constant_memory", 0, ArgumentTypeError, "True or False"),
        ("reserved_key_start_bit", 63, InvalidArgumentError, "from 0 to 62"),
        ("num_of_buckets_per_alloc", 0, InvalidArgumentError, "at least 1"),
    ],
)
def test_refusal_names_the_argument_and_what_is_allowed(
    name: str, value: Any, error: type[Exception], allowed: str
) -> None:
    with pytest.raises(error, match=f"(?s){name}.*(?:{allowed})"):
        DynamicEmbTableOptions(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dim", 1),
        ("dim", np.int64(16)),
        ("bucket_capacity", 16),
        ("bucket_capacity", 48),
        ("bucket_capacity", MAX_BUCKET_CAPACITY),
        ("max_load_factor", 0.0),
        ("max_load_factor", -1),
        ("max_load_factor", 1),
        ("embedding_dtype", torch.bfloat16),
        ("index_type", torch.uint64),
        ("external_storage", dict),
        ("dist_type", "hash_roundrobin"),
        ("score_strategy", NO_EVICTION),
    ],
)
def test_allowed_values_are_kept(name: str, value: Any) -> None:
    assert getattr(DynamicEmbTableOptions(**{name: value}), name) == value


def test_dim_minus_one_means_not_set() -> None:
    assert DynamicEmbTableOptions(dim=-1).dim is None


def test_init_capacity_may_not_exceed_max_capacity() -> None:
    DynamicEmbTableOptions(init_capacity=128, max_capacity=128)
    with pytest.raises(InvalidArgumentError, match="init_capacity is 256.*at most 128"):
        DynamicEmbTableOptions(init_capacity=256, max_capacity=128)


def test_validate_sees_a_field_that_was_changed_later() -> None:
    options = DynamicEmbTableOptions(dim=4)
    options.dim = 0
    with pytest.raises(InvalidArgumentError, match="dim"):
        options.validate()
    options = DynamicEmbTableOptions()
    options.initializer_args.std_dev = math.nan
    with pytest.raises(InvalidArgumentError, match="std_dev"):
        options.validate()


def test_options_compare_and_hash_by_value() -> None:
    first = DynamicEmbTableOptions(dim=8, admit_strategy=ProbabilityAdmissionStrategy(0.5))
    second = DynamicEmbTableOptions(dim=8, admit_strategy=ProbabilityAdmissionStrategy(0.5))
    assert first == second
    assert hash(first) == hash(second)
    assert {first: "group"}[second] == "group"
    assert first != DynamicEmbTableOptions(dim=16, admit_strategy=first.admit_strategy)
    assert first != DynamicEmbTableOptions(dim=8)
    other: object = 3
    assert (first == other) is False


def test_options_copy_and_pickle() -> None:
    options = DynamicEmbTableOptions(
        dim=8,
        score_strategy=(LFU, TIMESTAMP),
        admit_strategy=FrequencyAdmissionStrategy(2),
        admission_counter=KVCounter(1024),
    )
    assert copy.deepcopy(options) == options
    assert pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, dim=16).dim == 16


# --- scores -----------------------------------------------------------------------------------


def test_score_strategy_is_normalised() -> None:
    assert DynamicEmbTableOptions(score_strategy=(LFU,)).score_strategy is LFU
    as_list: Any = [TIMESTAMP, LFU]
    assert DynamicEmbTableOptions(score_strategy=as_list).score_strategy == (TIMESTAMP, LFU)
    assert normalize_score_strategy((LFU, TIMESTAMP)) == (LFU, TIMESTAMP)
    validate_score_strategy(STEP)
    with pytest.raises(InvalidArgumentError):
        validate_score_strategy((TIMESTAMP, LFU, STEP))


def test_pair_is_kept_as_timestamp_then_count() -> None:
    for pair in ((TIMESTAMP, LFU), (LFU, TIMESTAMP)):
        assert get_physical_score_order(pair) == (TIMESTAMP, LFU)
        assert get_eviction_score_strategy(pair) is LFU
        assert score_strategy_has_timestamp_column(pair)
        kept = torch.tensor([[100, 7]])
        dumped = kept[:, list(score_dump_permutation(pair))]
        assert dumped.tolist() == ([[100, 7]] if pair[0] is TIMESTAMP else [[7, 100]])
        assert torch.equal(dumped[:, list(score_load_permutation(pair))], kept)


@pytest.mark.parametrize(
    ("strategy", "evict"),
    [
        (TIMESTAMP, EVICT.LRU),
        (STEP, EVICT.CUSTOMIZED),
        (CUSTOMIZED, EVICT.CUSTOMIZED),
        (LFU, EVICT.LFU),
        (NO_EVICTION, EVICT.CUSTOMIZED),
        ((LFU, TIMESTAMP), EVICT.LFU),
    ],
)
def test_evict_strategy_is_derived(strategy: Any, evict: EVICT) -> None:
    assert get_evict_strategy(strategy) is evict
    for given in (EVICT.LRU, evict):
        options = DynamicEmbTableOptions(score_strategy=strategy, evict_strategy=given)
        assert options.score_strategy == strategy


def test_evict_strategy_lfu_alone_asks_for_lfu() -> None:
    assert DynamicEmbTableOptions(evict_strategy=EVICT.LFU).score_strategy is LFU


@pytest.mark.parametrize(
    ("strategy", "evict"),
    [
        (STEP, EVICT.LFU),
        (TIMESTAMP, EVICT.CUSTOMIZED),
        (TIMESTAMP, EVICT.EPOCH_LRU),
        (LFU, EVICT.EPOCH_LFU),
    ],
)
def test_contradicting_evict_strategy_is_refused(
    strategy: DynamicEmbScoreStrategy, evict: EVICT
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"evict_strategy is {evict.name}.*LRU"):
        DynamicEmbTableOptions(score_strategy=strategy, evict_strategy=evict)


def test_string_to_evict_strategy() -> None:
    names = ["KLru", "KLfu", "KEpochLru", "KEpochLfu", "KCustomized"]
    assert [string_to_evict_strategy(name) for name in names] == list(EVICT)
    with pytest.raises(ValueError, match="'lru'.*KLru, KLfu, KEpochLru, KEpochLfu, KCustomized"):
        string_to_evict_strategy("lru")


def test_score_warning_is_silenced_by_zero_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMICEMB_CSTM_SCORE_CHECK", raising=False)
    assert warning_for_cstm_score()
    monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", "1")
    assert warning_for_cstm_score()
    monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", "0")
    assert not warning_for_cstm_score()


# --- admission --------------------------------------------------------------------------------


def test_a_counter_needs_a_strategy_and_frequency_needs_a_counter() -> None:
    with pytest.raises(InvalidArgumentError, match="admission_counter.*admit_strategy is None"):
        DynamicEmbTableOptions(admission_counter=KVCounter(1024))
    with pytest.raises(InvalidArgumentError, match="admission_counter is None.*KVCounter"):
        DynamicEmbTableOptions(admit_strategy=FrequencyAdmissionStrategy(3))
    with pytest.raises(ArgumentTypeError, match="admission_counter is 5.*KVCounter"):
        DynamicEmbTableOptions(
            admit_strategy=FrequencyAdmissionStrategy(3),
            admission_counter=5,  # type: ignore[arg-type]
        )
    DynamicEmbTableOptions(admit_strategy=ProbabilityAdmissionStrategy(0.1))
    DynamicEmbTableOptions(
        admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=KVCounter(1024)
    )


def test_a_strategy_of_the_user_is_accepted_and_compared_by_identity() -> None:
    class Even(AdmissionStrategy):
        def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
            return keys % 2 == 0

    strategy = Even()
    options = DynamicEmbTableOptions(admit_strategy=strategy)
    assert options == DynamicEmbTableOptions(admit_strategy=strategy)
    assert options != DynamicEmbTableOptions(admit_strategy=Even())


# --- the rest ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "aligned"), [(-3, 16), (0, 16), (1, 16), (16, 16), (17, 32), (2**40 + 1, 2**40 + 16)]
)
def test_align_to_table_size(rows: int, aligned: int) -> None:
    assert align_to_table_size(rows) == aligned


def test_align_to_table_size_takes_an_alignment() -> None:
    assert align_to_table_size(129, 128) == 256
    assert align_to_table_size(0, 128) == 128
    with pytest.raises(InvalidArgumentError, match="alignment is 0"):
        align_to_table_size(1, 0)


def test_dtype_names() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint64):
        assert types.dyn_emb_to_torch(types.torch_to_dyn_emb(dtype)) is dtype
    assert types.dtype_to_bytes(torch.bfloat16) == 2
    with pytest.raises(ValueError, match="torch.float64.*torch.float32"):
        types.torch_to_dyn_emb(torch.float64)


def test_torchrec_data_types_are_matched_by_name() -> None:
    assert types.data_type_to_dtype(SimpleNamespace(name="BF16")) is torch.bfloat16
    with pytest.raises(ValueError, match="DataType.*FP32, FP16, BF16"):
        types.data_type_to_dtype(SimpleNamespace(name="INT4"))
    torchrec_types = pytest.importorskip("torchrec.types")
    assert types.data_type_to_dtype(torchrec_types.DataType.FP16) is torch.float16
    assert (
        types.data_type_to_dyn_emb(torchrec_types.DataType.FP32) is types.DynamicEmbDataType.Float32
    )


def test_errors_are_the_builtin_ones_too() -> None:
    for error, builtin in (
        (InvalidArgumentError, ValueError),
        (ArgumentTypeError, TypeError),
        (InsertionError, RuntimeError),
        (OutOfMemoryError, MemoryError),
        (UsageError, RuntimeError),
    ):
        assert issubclass(error, DynamicEmbError)
        assert issubclass(error, builtin)


def test_imports_without_torchrec_and_fbgemm() -> None:
    names = "errors options optimizers admission types dynamicemb_config optimizer"
    code = (
        "import importlib, sys\n"
        f"for name in '{names} embedding_admission'.split():\n"
        "    module = importlib.import_module('dynamicemb.' + name)\n"
        "    names = set(getattr(module, '__all__', [])) - {'EmbOptimType'}  # fbgemm's\n"
        "    assert all(hasattr(module, one) for one in names)\n"
        "assert not {'torchrec', 'fbgemm_gpu'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
