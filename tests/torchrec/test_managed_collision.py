"""Our managed collision module, alone and inside TorchRec's collections, in one process."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
    dynamic_threshold_filter,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dynamicemb.errors import DynamicEmbError, UsageError
from dynamicemb.managed_collision import (
    ManagedCollisionModule,
    TTL_EvictionPolicy,
    reset_evicted_rows,
)
from tables import EXTREME_IDS

CPU = torch.device("cpu")
POLICIES = {
    "lru": LRU_EvictionPolicy,
    "lfu": LFU_EvictionPolicy,
    "distance_lfu": DistanceLFU_EvictionPolicy,
    "ttl": lambda: TTL_EvictionPolicy(2),
}


def feature(*ids: int) -> dict[str, JaggedTensor]:
    return {
        "f": JaggedTensor(
            values=torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor([len(ids)])
        )
    }


def slots(module: Any, *ids: int) -> list[int]:
    remapped: list[int] = module(feature(*ids))["f"].values().tolist()
    return remapped


def make(zch_size: int = 4, policy: str = "lru", **options: Any) -> ManagedCollisionModule:
    return ManagedCollisionModule(zch_size, CPU, POLICIES[policy](), **options)


# ---- the module ----


@pytest.mark.parametrize("policy", list(POLICIES))
def test_an_id_is_mapped_at_first_sight_and_exact_until_full(policy: str) -> None:
    module = make(len(EXTREME_IDS) + 1, policy)
    assert slots(module, *EXTREME_IDS) == list(range(len(EXTREME_IDS)))
    module.eval()
    assert slots(module, *reversed(EXTREME_IDS)) == list(reversed(range(len(EXTREME_IDS))))
    assert module.open_slots().tolist() == [0]
    assert module.evict() is None


def test_misses_go_to_the_shared_last_slot() -> None:
    module = make(4)
    assert slots(module, 1, 2, 3, 4, 5) == [0, 1, 2, 3, 3]  # more ids than slots
    module.eval()
    assert slots(module, 9, 1) == [3, 0]
    assert module.open_slots().tolist() == [0]


def test_evicted_slots_are_named_once() -> None:
    module = make(3, output_global_offset=10)
    assert slots(module, 1, 2) == [10, 11]
    assert module.evict() is None  # nobody had these slots before
    slots(module, 3)
    slots(module, 4)
    evicted = module.evict()
    assert evicted is not None
    assert evicted.tolist() == [10, 11]
    assert module.evict() is None
    slots(module, 5)
    module.reset_inference_mode()
    assert module.evict() is None


def test_evaluation_changes_nothing() -> None:
    module = make(3)
    slots(module, 1, 2)
    module.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    slots(module, 2, 3, 4)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_ttl_refuses_until_an_id_is_old_enough() -> None:
    module = make(3, "ttl")
    slots(module, 1, 2)
    assert slots(module, 2, 3) == [1, 2]  # nothing is old: the shared slot
    assert slots(module, 3) == [2]
    assert slots(module, 3) == [0]  # 1 was used three batches ago
    now = [100]
    timed = ManagedCollisionModule(3, CPU, TTL_EvictionPolicy(60, clock=lambda: now[0]))
    slots(timed, 1, 2)
    now[0] = 160
    assert slots(timed, 3) == [2]
    now[0] = 161
    assert slots(timed, 3) == [0]


def test_a_threshold_filter_keeps_rare_ids_out() -> None:
    module = ManagedCollisionModule(
        10, CPU, LFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter)
    )
    # Counts 3, 1, 1: the mean is 5/3.
    assert slots(module, 7, 7, 7, 8, 9) == [0, 0, 0, 9, 9]
    # An id that is in stays in and is counted, however rare it is now.
    assert slots(module, 8, 8, 8, 7) == [1, 1, 1, 0]
    assert module.slot_map.state().counts.tolist() == [4, 3]


def test_a_threshold_filter_counts_over_the_interval() -> None:
    policy = DistanceLFU_EvictionPolicy(
        threshold_filtering_func=lambda counts: dynamic_threshold_filter(
            counts, threshold_skew_multiplier=1.0
        )
    )
    module = ManagedCollisionModule(10, CPU, policy, eviction_interval=3)
    assert slots(module, 5, 6) == [9, 9]  # equal counts: none is above the mean
    assert slots(module, 5, 7) == [0, 9]
    assert slots(module, 8, 7) == [9, 1]  # 5 and 7 came twice, 6 and 8 once: the mean is 1.5
    assert slots(module, 6) == [9]  # its first time is four batches ago
    again = ManagedCollisionModule(10, CPU, policy, eviction_interval=1)
    assert slots(again, 5, 6) == [9, 9]
    assert slots(again, 5, 7) == [9, 9]


def test_input_hash_func_comes_first() -> None:
    module = make(5, input_hash_func=lambda values, size: values % size, input_hash_size=2)
    assert slots(module, 10, 11, 12, 13) == [0, 1, 0, 1]
    assert module.input_size() == 2
    assert make(5).input_size() == 0


def test_several_features_of_one_call_and_other_integers() -> None:
    module = make(5)
    out = module(
        {
            "a": JaggedTensor(values=torch.tensor([4, 5]), lengths=torch.tensor([2])),
            "b": JaggedTensor(values=torch.tensor([5, 6]), lengths=torch.tensor([2])),
        }
    )
    assert [one.values().tolist() for one in out.values()] == [[0, 1], [1, 2]]
    small = {"f": JaggedTensor(torch.tensor([4, 9], dtype=torch.int32), lengths=torch.tensor([2]))}
    assert module(small)["f"].values().tolist() == [0, 3]
    with pytest.raises(DynamicEmbError, match="dtype"):
        module({"f": JaggedTensor(torch.tensor([1.5]), lengths=torch.tensor([1]))})


@pytest.mark.parametrize("policy", list(POLICIES))
def test_state_dict_round_trip(policy: str) -> None:
    generator = torch.Generator().manual_seed(7)
    module = make(50, policy)
    for _ in range(10):
        slots(module, *torch.randint(-99, 99, (20,), generator=generator).tolist())
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = make(50, policy)
    slots(other, 1, 2, 3)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    copied = copy.deepcopy(module)
    assert other.evict() is None
    for _ in range(10):
        batch = torch.randint(-99, 99, (20,), generator=generator).tolist()
        expected = slots(module, *batch)
        assert slots(other, *batch) == expected
        assert slots(copied, *batch) == expected


@pytest.mark.parametrize("policy", ["lru", "lfu", "distance_lfu"])
def test_states_go_to_torchrecs_module_and_back(policy: str) -> None:
    theirs = MCHManagedCollisionModule(6, CPU, POLICIES[policy](), eviction_interval=1)
    slots(theirs, 5, 7, -3, 5)
    ours = make(6, policy)
    ours.load_state_dict(theirs.state_dict())
    theirs.eval()
    assert slots(copy.deepcopy(ours).eval(), 5, 7, -3, 9) == slots(theirs, 5, 7, -3, 9)
    expected = slots(ours, 5, 7, -3, 11)
    back = MCHManagedCollisionModule(6, CPU, POLICIES[policy](), eviction_interval=1)
    back.load_state_dict(ours.state_dict())
    back.eval()
    assert slots(back, 5, 7, -3, 11) == expected
    assert back.open_slots().tolist() == ours.open_slots().tolist() == [1]


def test_a_state_that_does_not_fit_is_refused() -> None:
    module = make(5)
    slots(module, 1, 2)
    good = {name: value.clone() for name, value in module.state_dict().items()}
    for name, at, value in (
        ("_mch_remapped_ids_mapping", 0, 77),
        ("_mch_remapped_ids_mapping", 0, 1),
        ("_mch_sorted_raw_ids", 0, 2),
        ("_mch_last_access_iter", 0, 50),
        ("_output_segments_tensor", 1, 6),
    ):
        bad = {key: one.clone() for key, one in good.items()}
        bad[name][at] = value
        other = make(5)
        slots(other, 8)
        with pytest.raises(DynamicEmbError):
            other.load_state_dict(bad)
        assert other.slot_map.find(torch.tensor([8, 1])).tolist() == [0, -1]


def test_a_shard_has_the_same_options() -> None:
    module = make(100, "distance_lfu", eviction_interval=3, input_hash_size=8, name="x")
    shard = module.rebuild_with_output_id_range((50, 100), [0, 50, 100], CPU)
    assert (shard.output_size(), shard.input_size(), shard.buckets()) == (50, 8, 2)
    assert slots(shard, 1, 2) == [50, 51]
    shard.validate_state()  # nothing was loaded
    assert slots(shard, 2) == [51]
    with pytest.raises(DynamicEmbError):
        module.rebuild_with_output_id_range((5, 5), [0, 5])


def test_a_module_on_the_meta_device_can_be_built_and_sharded() -> None:
    module = ManagedCollisionModule(1000, torch.device("meta"))
    shard = module.rebuild_with_output_id_range((0, 500), [0, 500, 1000], CPU)
    assert slots(shard, 3) == [0]


def test_bad_arguments_are_refused() -> None:
    for arguments in (
        {"zch_size": 1},
        {"eviction_policy": "lru"},
        {"eviction_interval": 0},
        {"input_hash_size": -1},
        {"buckets": -1},
    ):
        with pytest.raises(DynamicEmbError):
            ManagedCollisionModule(**({"zch_size": 8, "device": CPU} | arguments))  # type: ignore[arg-type]
    with pytest.raises(DynamicEmbError):
        TTL_EvictionPolicy(0)
    with pytest.warns(UserWarning, match="ignored"):
        make(8, mch_size=4)


# ---- in TorchRec's collections ----


def features(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([*ids, *ids], dtype=torch.int64),
        lengths=torch.ones(2 * len(ids), dtype=torch.int64),
    )


def collection(bags: bool, policy: str = "lru", zch_size: int = 3) -> Any:
    """Tables "x" (feature a) and "y" (feature b) of constant rows, behind our modules."""

    def ones(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.constant_(tensor, 1.0)

    kind: Any = EmbeddingBagConfig if bags else EmbeddingConfig
    configs = [
        kind(
            name=name,
            embedding_dim=2,
            num_embeddings=zch_size,
            feature_names=[key],
            init_fn=ones,
        )
        for name, key in (("x", "a"), ("y", "b"))
    ]
    managed = ManagedCollisionCollection(
        managed_collision_modules={"x": make(zch_size, policy), "y": make(zch_size, policy)},
        embedding_configs=configs,
    )
    if bags:
        return ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=configs), managed, return_remapped_features=True
        )
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs), managed, return_remapped_features=True
    )


def rows(model: Any, *ids: int) -> torch.Tensor:
    """[ids, 2]: the rows of feature a."""
    out, _ = model(features(*ids))
    first: Any = out["a"]
    return first if isinstance(first, torch.Tensor) else first.values()


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_rows_of_evicted_ids_start_anew(bags: bool, in_backward: bool) -> None:
    model = collection(bags)
    if in_backward:
        apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.5})
        reset_evicted_rows(model)
    else:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5, initial_accumulator_value=0.25)
        reset_evicted_rows(model, optimizer)

    def step(*ids: int) -> torch.Tensor:
        out = rows(model, *ids)
        out.sum().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
        return out.detach().clone()

    first = step(1, 2)
    assert first.tolist() == [[1.0, 1.0]] * 2
    second = step(1)
    assert float(second[0, 0]) < 1.0
    trained = step(1)
    assert step(3).tolist() == [[1.0, 1.0]]  # takes the slot of 2
    assert step(3).tolist() == second.tolist()  # with the state of a new row
    assert step(3).tolist() == trained.tolist()
    model.eval()
    assert rows(model, 1).tolist() != [[1.0, 1.0]]  # the other rows are as they were


def test_without_it_torchrec_hands_the_old_vector_on() -> None:
    model = collection(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows(model, 1, 2).sum().backward()
    optimizer.step()
    old = rows(model, 2).tolist()
    assert rows(model, 3, 2).tolist()[0] != [1.0, 1.0]
    handles = reset_evicted_rows(model)
    assert rows(model, 4, 2).tolist() == [[1.0, 1.0], *old]
    for handle in handles:
        handle.remove()
    with pytest.raises(UsageError, match="ManagedCollision"):
        reset_evicted_rows(torch.nn.Linear(1, 1))


def test_a_graph_that_waits_for_its_backward_survives_a_reset() -> None:
    model = collection(True)
    reset_evicted_rows(model)
    waiting = rows(model, 1, 2)
    rows(model, 3, 4)
    waiting.sum().backward()


def test_collections_report_slots_and_evictions() -> None:
    model = collection(False)
    managed = model._managed_collision_collection
    _, remapped = model(features(5, 6))
    assert remapped.values().tolist() == [0, 1, 0, 1]
    assert {name: one.tolist() for name, one in managed.open_slots().items()} == {
        "x": [0],
        "y": [0],
    }
    managed(features(7))
    assert {name: one.tolist() for name, one in managed.evict().items()} == {"x": [0], "y": [0]}
    assert managed.evict() == {"x": None, "y": None}


def test_whole_models_are_saved_and_loaded() -> None:
    model = collection(True)
    rows(model, 8, 9)
    other = collection(True)
    other.load_state_dict(model.state_dict())
    other.eval()
    _, remapped = other(features(9, 8, 7))
    assert remapped.values().tolist() == [1, 0, 2, 1, 0, 2]


@pytest.mark.parametrize("bags", [True, False])
def test_a_copied_collection_resets_its_own_rows(bags: bool) -> None:
    model = collection(bags)
    reset_evicted_rows(model)
    rows(model, 1, 2)
    copied = copy.deepcopy(model)
    weights = [one._embedding_module.parameters() for one in (model, copied)]
    with torch.no_grad():
        for weight in (weight for of_model in weights for weight in of_model):
            weight.fill_(5.0)
    # 3 evicts an id in the copy, and the row of its slot starts anew there, and only there.
    assert (rows(copied, 3) == 1.0).all()
    assert all((weight == 5.0).all() for weight in model.parameters())


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("bags", [True, False])
def test_an_averaged_model_finds_ids_where_the_model_has_them(bags: bool, reset: bool) -> None:
    """A row averages what its id had; of an id that took the slot of another it is the model's."""
    model = collection(bags, zch_size=5)
    if reset:
        reset_evicted_rows(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: dict[int, float] = {}
    for step in range(8):
        ids = [step // 2 + one for one in range(3)]
        optimizer.zero_grad()
        (rows(model, *ids) * (step + 1)).sum().backward()
        optimizer.step()
        average.update_parameters(model)
        known = range(max(0, step // 2 - 1), step // 2 + 3)  # four ids have slots
        model.eval()
        now = {id_: rows(model, id_).flatten()[0].item() for id_ in known}
        model.train()
        expected = {
            id_: 0.5 * (expected[id_] + row) if id_ in expected else row for id_, row in now.items()
        }
        average.eval()
        found = {id_: rows(average.module, id_).flatten()[0].item() for id_ in known}
        assert found == pytest.approx(expected)
