"""Plans: what they hold, what they cost, and what is refused with which words."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import DataType

from dynamicemb import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    get_sharded_table_capacity,
    get_table_value_bytes,
)
from dynamicemb.dynamicemb_config import get_constraint_capacity
from dynamicemb.errors import ArgumentTypeError, InvalidArgumentError
from dynamicemb.get_planner import get_planner
from dynamicemb.optimizers import Optimizer
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    DynamicEmbParameterSharding,
)
from dynamicemb.shard import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)
from dynamicemb.tiers import SsdStore
from dynamicemb.tiers.sizing import rows_within, table_bytes

META = torch.device("meta")


def config(name: str = "users", rows: int = 1000, **more: Any) -> EmbeddingConfig:
    return EmbeddingConfig(
        num_embeddings=rows, embedding_dim=16, name=name, feature_names=[f"{name}_id"], **more
    )


def dynamic(**options: Any) -> DynamicEmbParameterConstraints:
    return DynamicEmbParameterConstraints(
        use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions(**options)
    )


def sharders(**fused_params: Any) -> list[Any]:
    return [
        DynamicEmbeddingCollectionSharder(fused_params=fused_params),
        DynamicEmbeddingBagCollectionSharder(fused_params=fused_params),
    ]


def plan(
    tables: list[Any], constraints: dict[str, Any], world_size: int = 2, **more: Any
) -> dict[str, Any]:
    topology = more.pop("topology", Topology(world_size=world_size, compute_device="cpu"))
    planner = DynamicEmbeddingShardingPlanner(
        tables, topology=topology, constraints=constraints, debug=False, **more
    )
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=tables, device=META)})
    return dict(planner.plan(model, sharders()).plan["ec"])


# ---- capacity ----


@pytest.mark.parametrize(
    ("rows", "world_size", "bucket", "expected"),
    [
        (1000, 1, 128, 1024),
        (1000, 2, 128, 512),
        (1025, 1, 128, 2048),
        (10, 1, 128, 128),
        (1, 8, 16, 16),
        (100, 1, 48, 144),
        (1000, 1, MAX_BUCKET_CAPACITY, 1024),
        (3, 1, MAX_BUCKET_CAPACITY, 16),
    ],
)
def test_capacity_is_a_power_of_two_in_whole_buckets(
    rows: int, world_size: int, bucket: int, expected: int
) -> None:
    assert get_sharded_table_capacity(config(rows=rows), world_size, bucket) == expected


def test_value_bytes_count_all_ranks_and_the_state() -> None:
    table = config(rows=1000)
    assert get_table_value_bytes(table, EmbOptimType.SGD, 2) == 2 * 512 * 16 * 4
    assert get_table_value_bytes(table, EmbOptimType.ADAM, 2) == 2 * 512 * 3 * 16 * 4
    rowwise = get_table_value_bytes(table, EmbOptimType.EXACT_ROWWISE_ADAGRAD, 1)
    assert rowwise == 1024 * (16 * 4 + 4)
    half = get_table_value_bytes(config(data_type=DataType.FP16), EmbOptimType.SGD, 1)
    assert half == 1024 * 16 * 2


def test_rows_that_fit_into_memory() -> None:
    assert get_constraint_capacity(100_000, torch.float32, 16, EmbOptimType.SGD, 128) == 1536
    with pytest.warns(UserWarning, match="less than one bucket of 128"):
        assert get_constraint_capacity(10, torch.float32, 16, EmbOptimType.SGD, 128) == 128


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="world_size is 0"):
        get_sharded_table_capacity(config(), 0, 128)
    with pytest.raises(InvalidArgumentError, match="bucket_capacity is 100"):
        get_sharded_table_capacity(config(), 1, 100)


# ---- plans ----


def test_a_plan_holds_complete_options_for_a_rank() -> None:
    table = config(rows=1000, data_type=DataType.BF16)
    options = DynamicEmbTableOptions(init_capacity=100, global_hbm_for_values=1001)
    constraint = DynamicEmbParameterConstraints(
        use_dynamicemb=True, sharding_types=["row_wise"], dynamicemb_options=options
    )
    before = (copy.deepcopy(table), copy.deepcopy(options))
    found = plan([table], {"users": constraint})["users"]
    assert isinstance(found, DynamicEmbParameterSharding)
    assert (found.sharding_type, found.compute_kernel) == ("row_wise", "customized_kernel")
    assert (found.customized_compute_kernel, found.dist_type) == ("DynamicEmb", "roundrobin")
    made = found.dynamicemb_options
    assert (made.dim, made.max_capacity, made.init_capacity) == (16, 512, 100)
    assert (made.embedding_dtype, made.index_type) == (torch.bfloat16, torch.int64)
    assert made.local_hbm_for_values == 501
    bound = (1 / 1000) ** 0.5
    assert (made.initializer_args.lower, made.initializer_args.upper) == (-bound, bound)
    assert [shard.shard_sizes for shard in found.sharding_spec.shards] == [[512, 16]] * 2
    assert [shard.shard_offsets for shard in found.sharding_spec.shards] == [[0, 0], [512, 0]]
    # The caller's objects are as they were.
    assert (table.num_embeddings, table.feature_names) == (1000, ["users_id"])
    assert (before[0].name, before[1]) == (table.name, options)
    assert pickle.loads(pickle.dumps(found)).dynamicemb_options == made


def test_what_the_user_set_is_kept() -> None:
    table = config(rows=1000, weight_init_min=-0.25, weight_init_max=0.75)
    args = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM, upper=2.0)
    made = plan([table], {"users": dynamic(max_capacity=4096, initializer_args=args)})["users"]
    assert made.dynamicemb_options.max_capacity == 4096
    assert made.dynamicemb_options.initializer_args.lower == -0.25
    assert made.dynamicemb_options.initializer_args.upper == 2.0


def test_static_tables_stay_torchrecs() -> None:
    tables = [config("users"), config("goods", rows=50)]
    constraints = {
        "users": dynamic(),
        "goods": DynamicEmbParameterConstraints(sharding_types=["table_wise"]),
    }
    found = plan(tables, constraints)
    assert isinstance(found["users"], DynamicEmbParameterSharding)
    assert not isinstance(found["goods"], DynamicEmbParameterSharding)
    assert found["goods"].sharding_type == "table_wise"


def test_memory_is_charged_to_the_users_topology() -> None:
    table = config(rows=1 << 20)
    mib = 1 << 20
    needed = (25 + 64) * mib  # one rank: index and rows of 16 floats
    small = Topology(world_size=1, compute_device="cpu", ddr_cap=needed)
    with pytest.raises(PlannerError):
        plan([table], {"users": dynamic()}, topology=small)
    enough = Topology(world_size=1, compute_device="cpu", ddr_cap=2 * needed)
    plan([table], {"users": dynamic()}, topology=enough)
    # Adam triples the rows.
    planner = DynamicEmbeddingShardingPlanner(
        [table], topology=enough, constraints={"users": dynamic()}, debug=False
    )
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=[table], device=META)})
    with pytest.raises(PlannerError):
        planner.plan(model, sharders(optimizer=EmbOptimType.ADAM))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_table_really_takes_is_charged(device: str) -> None:
    """The cache to the device, also one that is larger than its budget, and the rows below it to
    main memory; a budget without ``caching`` means nothing."""
    table = config(rows=1 << 20)
    optimizer = Optimizer.from_emb_optim_type("adam")

    def charged(**options: Any) -> tuple[int, int]:
        constraints = {"users": dynamic(**options)}
        topology = Topology(world_size=1, compute_device=device)
        found = []
        for charge in (False, True):
            enumerator = DynamicEmbeddingEnumerator(
                topology=topology, constraints=constraints, charge_memory=charge
            )
            model = EmbeddingCollection(tables=[table], device=META)
            (option,) = enumerator.enumerate(model, sharders(optimizer="adam"))
            found.append(option.shards[0].storage)
        return found[1].hbm - found[0].hbm, found[1].ddr - found[0].ddr

    def taken(on_device: int, below: int) -> tuple[int, int]:
        return (on_device, below) if device == "cuda" else (0, on_device + below)

    rows = DynamicEmbTableOptions(dim=16, max_capacity=1 << 20)
    whole = table_bytes(1 << 20, rows, optimizer, device=device)
    below = table_bytes(1 << 20, rows, optimizer)
    bucket = table_bytes(128, rows, optimizer, device=device)
    budget = 1 << 20
    cache = table_bytes(rows_within(budget, rows, optimizer, device=device), rows, optimizer,
                        device=device)  # fmt: skip
    small = {"global_hbm_for_values": 1000}
    assert charged() == charged(**small) == taken(whole, 0)
    assert charged(caching=True, global_hbm_for_values=budget) == taken(cache, below)
    assert charged(caching=True, **small) == taken(bucket, below)
    assert charged(external_storage=SsdStore.at("x"), **small) == taken(bucket, 0)
    assert charged(caching=True, global_hbm_for_values=1 << 40) == taken(whole, 0)
    counted = charged(
        admission_counter=KVCounter(1024), admit_strategy=FrequencyAdmissionStrategy(2)
    )
    assert counted == taken(whole + 1024 * 25, 0)


def test_without_a_topology_nothing_is_charged() -> None:
    table = config(rows=1 << 40)
    with pytest.warns(RuntimeWarning, match="topology is None"):
        planner = DynamicEmbeddingShardingPlanner(
            [table], constraints={"users": dynamic(max_capacity=128)}, debug=False
        )
    model = EmbeddingCollection(tables=[table], device=META)
    found = planner.collective_plan(model, sharders()).plan[""]["users"]
    assert found.num_embeddings == 1 << 40


def test_a_summary_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tables = [config("users"), config("goods")]
    constraints = {"users": dynamic(dist_type="continuous"), "goods": dynamic()}
    constraints["goods"] = DynamicEmbParameterConstraints()
    for debug in (True, False):
        caplog.clear()
        planner = DynamicEmbeddingShardingPlanner(
            tables,
            topology=Topology(world_size=2, compute_device="cpu"),
            constraints=constraints,
            debug=debug,
        )
        with caplog.at_level(logging.INFO, logger="dynamicemb.planner.planner"):
            planner.plan(EmbeddingCollection(tables=tables, device=META), sharders())
        text = "\n".join(
            one.message for one in caplog.records if one.name == "dynamicemb.planner.planner"
        )
        assert ("users" in text) is debug
        if debug:
            assert "continuous" in text
            assert "512" in text
            assert "static tables: goods" in text


def test_an_enumerator_of_the_users_own() -> None:
    tables = [config("users")]
    constraints = {"users": dynamic()}
    topology = Topology(world_size=2, compute_device="cpu")
    enumerator = DynamicEmbeddingEnumerator(topology=topology, constraints=constraints)
    options = enumerator.enumerate(EmbeddingCollection(tables=tables, device=META), sharders())
    assert [one.sharding_type for one in options] == ["row_wise"]
    assert options[0].shards[0].storage.ddr >= 512 * (25 + 64)
    found = plan(tables, constraints, topology=topology, enumerator=enumerator)
    assert isinstance(found["users"], DynamicEmbParameterSharding)


def test_get_planner_sorts_tables_into_three_kinds() -> None:
    tables = [
        EmbeddingBagConfig(
            num_embeddings=100, embedding_dim=8, name=name, feature_names=[name + "_id"]
        )
        for name in ("users", "days", "goods")
    ]
    planner = get_planner(
        tables, ["days"], {"users": DynamicEmbTableOptions()}, torch.device("cpu")
    )
    model = EmbeddingBagCollection(tables=tables, device=META)
    found = planner.plan(model, sharders()).plan[""]
    assert isinstance(found["users"], DynamicEmbParameterSharding)
    assert found["days"].sharding_type == "data_parallel"
    assert not isinstance(found["goods"], DynamicEmbParameterSharding)
    with pytest.raises(InvalidArgumentError, match="pipeline_type is 'fast'"):
        get_planner(tables, [], {}, torch.device("cpu"), pipeline_type="fast")
    with pytest.raises(InvalidArgumentError, match="a table in dynamicemb_options_dict is 'x'"):
        get_planner(tables, [], {"x": DynamicEmbTableOptions()}, torch.device("cpu"))
    with pytest.raises(InvalidArgumentError, match="not in data_parallel"):
        get_planner(tables, ["days"], {"days": DynamicEmbTableOptions()}, torch.device("cpu"))


# ---- refusals ----


@pytest.mark.parametrize(
    ("constraints", "error", "words"),
    [
        (None, ArgumentTypeError, "constraints is None"),
        ({}, InvalidArgumentError, "constraints has no entry for users"),
        (
            {"users": dynamic(), "x": dynamic()},
            InvalidArgumentError,
            "constraints has x, which eb_configs does not have; allowed: users",
        ),
        (
            {"users": ParameterConstraints()},
            ArgumentTypeError,
            "allowed: DynamicEmbParameterConstraints, also for a static table",
        ),
        (
            {
                "users": DynamicEmbParameterConstraints(
                    use_dynamicemb=True, sharding_types=["table_wise"]
                )
            },
            InvalidArgumentError,
            "allowed: None or ['row_wise'] for a dynamic table",
        ),
        (
            {
                "users": DynamicEmbParameterConstraints(
                    use_dynamicemb=True, compute_kernels=["dense"]
                )
            },
            InvalidArgumentError,
            "compute_kernels is ['dense']",
        ),
        (
            {"users": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=None)},
            InvalidArgumentError,
            "dynamicemb_options is None; allowed: DynamicEmbTableOptions(...)",
        ),
        (
            {"users": DynamicEmbParameterConstraints(use_dynamicemb="yes")},
            ArgumentTypeError,
            "use_dynamicemb is 'yes'",
        ),
        ({"users": dynamic(dim=8)}, InvalidArgumentError, "allowed: None or 16"),
    ],
)
def test_wrong_constraints(constraints: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        DynamicEmbeddingShardingPlanner(
            [config()],
            topology=Topology(world_size=1, compute_device="cpu"),
            constraints=constraints,
        )
    assert words in str(caught.value)


def test_wrong_configs() -> None:
    topology = Topology(world_size=1, compute_device="cpu")
    with pytest.raises(ArgumentTypeError, match="eb_configs is None"):
        DynamicEmbeddingShardingPlanner(None, topology=topology, constraints={})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="tables with different names"):
        DynamicEmbeddingShardingPlanner(
            [config(), config()], topology=topology, constraints={"users": dynamic()}
        )
    with pytest.raises(InvalidArgumentError, match="FP32, FP16 or BF16"):
        DynamicEmbeddingShardingPlanner(
            [config(data_type=DataType.INT64)],
            topology=topology,
            constraints={"users": dynamic()},
        )


def test_the_model_and_the_configs_must_have_the_same_tables() -> None:
    topology = Topology(world_size=1, compute_device="cpu")
    planner = DynamicEmbeddingShardingPlanner(
        [config()], topology=topology, constraints={"users": dynamic()}, debug=False
    )
    more = EmbeddingCollection(tables=[config(), config("goods")], device=META)
    with pytest.raises(InvalidArgumentError, match="a table 'goods' that eb_configs does not have"):
        planner.plan(more, sharders())
    other = DynamicEmbeddingShardingPlanner(
        [config(), config("goods")],
        topology=topology,
        constraints={"users": DynamicEmbParameterConstraints(), "goods": dynamic()},
        debug=False,
    )
    with pytest.raises(InvalidArgumentError, match="found in no collection"):
        other.plan(EmbeddingCollection(tables=[config()], device=META), sharders())


def test_a_topology_for_other_ranks() -> None:
    planner = DynamicEmbeddingShardingPlanner(
        [config()],
        topology=Topology(world_size=3, compute_device="cpu"),
        constraints={"users": dynamic()},
        debug=False,
    )
    model = EmbeddingCollection(tables=[config()], device=META)
    with pytest.raises(InvalidArgumentError, match="topology.world_size is 3; allowed: 1"):
        planner.collective_plan(model, sharders())


def test_an_init_capacity_above_the_share_is_cut_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="init_capacity of table 'users' is 5000"):
        found = plan([config()], {"users": dynamic(init_capacity=5000)})["users"]
    assert found.dynamicemb_options.init_capacity == 512
