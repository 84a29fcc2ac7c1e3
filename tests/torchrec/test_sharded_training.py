"""Sharded dynamic tables: what must hold for any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sharded
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dynamicemb
from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    UsageError,
)
from dynamicemb.dump_load import get_dynamic_emb_module
from dynamicemb.nn.discovery import find_collections
from dynamicemb.shard import ShardedDynamicEmbeddingBagCollection
from ranks import Ranks

BATCH = 12


# ---- W ranks are one rank ----


def trained_rows(
    rank: int, world_size: int, *, bags: bool, dist_types: list[str], dedup: bool
) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 + rank)  # new rows must follow the first rank's seed
    options = {
        name: DynamicEmbTableOptions(dist_type=one)
        for name, one in zip(sharded.FEATURES, dist_types, strict=True)
    }
    net = sharded.Net(sharded.configs(bags))
    torch.manual_seed(5 if rank == 0 else rank)
    model = sharded.dynamic_model(net, sharded.SGD, world_size, dedup=dedup, options=options)
    sizes = sharded.even(BATCH, world_size)
    batches = [sharded.share(sharded.wide(sharded.batch(s, BATCH)), sizes, rank) for s in range(10)]
    losses = torch.stack(sharded.train(model, batches))
    rows = sharded.dynamic_rows(model, sharded.wide_ids(torch.arange(sharded.ROWS)))
    # The same tensors for every sender: results travel to the parent as numbers.
    return {"losses": losses, **rows}


@pytest.mark.parametrize(
    ("bags", "dist_types", "dedup"),
    [
        (False, ["roundrobin", "roundrobin"], False),
        (False, ["hash_roundrobin", "continuous"], True),
        (True, ["continuous", "hash_roundrobin"], False),
    ],
)
def test_any_number_of_ranks_gives_the_same_tables(
    ranks: Ranks, bags: bool, dist_types: list[str], dedup: bool
) -> None:
    results = {
        world_size: ranks.run(
            world_size, trained_rows, bags=bags, dist_types=dist_types, dedup=dedup
        )
        for world_size in (1, 2, 4)
    }
    one = results[1][0]
    assert one["users"].abs().sum() > 0
    for world_size in (2, 4):
        for of_rank in results[world_size]:
            torch.testing.assert_close(of_rank, one, rtol=1e-6, atol=1e-6)


def adam(rank: int, world_size: int) -> None:
    tables = sharded.configs(False)
    start = sharded.rows_at_start(tables)
    sizes = sharded.even(BATCH, world_size)
    # Every id in every batch, so that a dense optimizer does the same.
    whole = [sharded.batch(step, BATCH, longest=40, high=16) for step in range(20)]
    numbers = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
    model = sharded.dynamic_model(
        sharded.Net(tables),
        {"optimizer": EmbOptimType.ADAM, **numbers},
        world_size,
        dedup=True,
    )
    sharded.insert_owned(model, start)
    losses = sharded.train(model, [sharded.share(one, sizes, rank) for one in whole])
    dense = sharded.Net(tables)
    dense.collection.to_empty(device="cpu")
    for name, rows in start.items():
        dense.collection.embeddings[name].weight.data.copy_(rows)
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.05, betas=(0.8, 0.95), eps=1e-6)
    expected = []
    for one in whole:
        optimizer.zero_grad()
        loss = dense(one)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    rows = sharded.dynamic_rows(model, torch.arange(16))
    for name in start:
        weight = dense.collection.embeddings[name].weight[:16]
        torch.testing.assert_close(rows[name], weight.detach(), rtol=1e-5, atol=2e-6)


def test_adam_equals_a_dense_reference(ranks: Ranks) -> None:
    ranks.run(2, adam)


# ---- counts ----


def counted(rank: int, world_size: int, *, bags: bool, dedup: bool) -> None:
    tables = sharded.configs(bags)
    options = {
        "users": DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.LFU),
        "goods": DynamicEmbTableOptions(
            admit_strategy=FrequencyAdmissionStrategy(threshold=30),
            admission_counter=KVCounter(capacity=1024),
        ),
    }
    model = sharded.dynamic_model(
        sharded.Net(tables), sharded.SGD, world_size, dedup=dedup, options=options
    )
    whole = [sharded.batch(step, BATCH) for step in range(8)]
    sizes = sharded.even(BATCH, world_size)
    sharded.train(model, [sharded.share(one, sizes, rank) for one in whole])
    seen = {}
    for name, features in sharded.FEATURES.items():
        ids = [one[feature].values() for one in whole for feature in features]
        seen[name] = torch.bincount(torch.cat(ids), minlength=sharded.ROWS)
    own = sharded.dynamic_tables(model)
    ids = torch.arange(sharded.ROWS)
    found = own["users"].find(ids)
    scores = torch.where(found.found, found.scores, torch.zeros((), dtype=torch.int64))
    dist.all_reduce(scores)
    assert torch.equal(scores, seen["users"])
    stored = own["goods"].contains(ids).long()
    dist.all_reduce(stored)
    assert torch.equal(stored.bool(), seen["goods"] >= 30)
    assert stored.any()
    assert not stored.all()


def test_frequencies_and_admission_are_exact(ranks: Ranks) -> None:
    for bags, dedup in ((False, False), (False, True), (True, False)):
        ranks.run(2, counted, bags=bags, dedup=dedup)


# ---- frozen tables ----


def frozen(rank: int, world_size: int, *, bags: bool, dedup: bool) -> None:
    model = sharded.dynamic_model(
        sharded.Net(sharded.configs(bags)), sharded.SGD, world_size, dedup=dedup
    )
    sizes = sharded.even(BATCH, world_size)
    batches = [sharded.share(sharded.batch(step, BATCH), sizes, rank) for step in range(3)]
    sharded.train(model, batches[:2])
    tables = sharded.dynamic_tables(model)

    def everything() -> Any:
        return {
            name: (table.stats(), {k: v.tolist() for k, v in table.state_dict().items()})
            for name, table in tables.items()
        }

    model.requires_grad_(False)
    before = everything()
    out = model(batches[2])
    assert not out.requires_grad
    assert everything() == before
    model.eval()
    assert torch.equal(model(batches[2]), out)
    model.train()
    model.requires_grad_(True)
    sharded.train(model, batches[2:])
    assert everything() != before
    # The modules themselves, as they are found.
    modules = get_dynamic_emb_module(model)
    for module in modules:
        module.requires_grad_(False)
    before = everything()
    out = model(batches[0])
    assert not out.requires_grad
    assert everything() == before
    model.requires_grad_(False)
    model.requires_grad_(True)
    assert torch.equal(model(batches[0]), out)
    assert everything() == before
    for module in modules:
        module.requires_grad_(True)
    sharded.train(model, batches[:1])
    assert everything() != before
    one = next(iter(model.parameters()))
    one.requires_grad_(False)
    before = everything()
    model.eval()
    assert model(batches[2]).shape == out.shape  # evaluation reads, whoever is frozen
    assert everything() == before
    model.train()
    try:
        model(batches[2])
    except UsageError as error:
        assert "allowed: all of them or none" in str(error)  # noqa: PT017
    else:
        raise AssertionError("one frozen table of two was not refused")


@pytest.mark.parametrize(("bags", "dedup"), [(True, False), (False, True)])
def test_frozen_tables_only_read(ranks: Ranks, bags: bool, dedup: bool) -> None:
    ranks.run(2, frozen, bags=bags, dedup=dedup)


# ---- mixtures ----


def mixed(rank: int, world_size: int, *, bags: bool) -> None:
    """One table static, one dynamic, against both static; each with an optimizer of its own."""
    tables = sharded.configs(bags)
    start = sharded.rows_at_start(tables)
    sizes = sharded.even(BATCH, world_size)
    batches = [sharded.share(sharded.batch(step, BATCH), sizes, rank) for step in range(10)]

    def net() -> sharded.Net:
        made = sharded.Net(tables)
        collection: Any = made.collection
        modules = collection.embedding_bags if bags else collection.embeddings
        _apply_optimizer_in_backward(
            torch.optim.Adagrad, [modules["users"].weight], {"lr": 0.2, "eps": 1e-6}
        )
        _apply_optimizer_in_backward(RowWiseAdagrad, [modules["goods"].weight], {"lr": 0.1})
        return made

    static = sharded.static_model(net(), {}, world_size)
    sharded.set_static(static, start)
    expected = sharded.train(static, batches)
    expected_rows = sharded.static_rows(static)
    for dynamic in ("users", "goods", "both"):
        names = [one for one in sharded.FEATURES if dynamic not in (one, "both")]
        for dedup in (False,) if bags else (False, True):
            model = sharded.dynamic_model(net(), {}, world_size, static=names, dedup=dedup)
            sharded.insert_owned(model, start)
            for key, value in model.state_dict().items():
                table = key.split(".")[-2]
                if table not in names:
                    assert value.shape == (0, start[table].shape[1])
                elif hasattr(value, "local_shards"):
                    for shard in value.local_shards():
                        rows, columns = shard.metadata.shard_offsets
                        size = shard.metadata.shard_sizes
                        part = start[table][rows : rows + size[0], columns : columns + size[1]]
                        shard.tensor.copy_(part)
                else:
                    value.copy_(start[table])
            losses = sharded.train(model, batches)
            torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
            rows = sharded.dynamic_rows(model, torch.arange(sharded.ROWS))
            for name, found in rows.items():
                torch.testing.assert_close(found, expected_rows[name], rtol=1e-6, atol=1e-6)


def test_static_and_dynamic_tables_in_one_collection(ranks: Ranks) -> None:
    ranks.run(2, mixed, bags=False)
    ranks.run(2, mixed, bags=True)


# ---- optimizers ----


def scheduled(rank: int, world_size: int) -> None:
    tables = sharded.configs(False)
    start = sharded.rows_at_start(tables)
    sizes = sharded.even(BATCH, world_size)
    batches = [sharded.share(sharded.batch(step, BATCH), sizes, rank) for step in range(9)]
    results = []
    for kind in ("static", "dynamic"):
        net = sharded.Net(tables)
        if kind == "static":
            model = sharded.static_model(net, sharded.SGD, world_size)
            sharded.set_static(model, start)
        else:
            model = sharded.dynamic_model(net, sharded.SGD, world_size)
            sharded.insert_owned(model, start)
        assert dict(in_backward_optimizer_filter(model.named_parameters())) == {}
        dense = KeyedOptimizerWrapper(
            {"dense": nn.Parameter(torch.zeros(1))}, lambda params: torch.optim.SGD(params, lr=0.1)
        )
        optimizer = CombinedOptimizer([model.fused_optimizer, dense])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        losses = []
        for one in batches:
            optimizer.zero_grad()
            loss = model(one)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        results.append(losses)
    torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=1e-6)
    rate = sharded.dynamic_tables(model)["users"].optimizer.args.learning_rate
    assert rate == pytest.approx(0.3 * 0.5**4)


def test_learning_rate_schedulers_act(ranks: Ranks) -> None:
    ranks.run(1, scheduled)


# ---- as a module ----


def as_module(rank: int, world_size: int, *, bags: bool) -> None:
    tables = sharded.configs(bags)
    debug = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.DEBUG)
    options = {
        name: DynamicEmbTableOptions(initializer_args=debug, index_type=torch.uint64)
        for name in sharded.FEATURES
    }
    net = sharded.Net(tables)
    pg = dist.new_group(list(range(world_size)))
    before = copy.deepcopy(options)
    model = sharded.dynamic_model(net, sharded.SGD, world_size, options=options, pg=pg)
    assert options == before
    assert list(find_collections(model)) == ["model.collection"]
    (found,) = find_collections(model).values()
    assert {table.name for module in found for table in module.tables} == set(sharded.FEATURES)
    for module in found:
        assert module.process_group is not None
        assert all(one.rank == rank for one in module.routings.values())
    # Evaluation inserts nothing, in whatever order modules are switched.
    one = sharded.share(
        sharded.wide(sharded.batch(0, BATCH)), sharded.even(BATCH, world_size), rank
    )
    model.eval()
    model(one)
    assert all(len(table) == 0 for table in sharded.dynamic_tables(model).values())
    model.train()
    with torch.no_grad():
        model(one)
    sizes = {name: len(table) for name, table in sharded.dynamic_tables(model).items()}
    assert sum(sizes.values()) > 0
    # uint64 ids are the same ids; int32 ids are signed ones.
    unsigned = KeyedJaggedTensor(
        keys=one.keys(), values=one.values().view(torch.uint64), lengths=one.lengths()
    )
    model(unsigned)
    assert sizes == {name: len(table) for name, table in sharded.dynamic_tables(model).items()}
    narrow = KeyedJaggedTensor(
        keys=one.keys(),
        values=(torch.arange(len(one.values())) % 5 - 3).to(torch.int32),
        lengths=one.lengths(),
    )
    model(narrow)
    ids = torch.arange(-3, 2)
    for module in found:
        for table in module.tables:
            owned = module.routings[table.name].owned(ids)
            assert torch.equal(table.contains(ids), owned)
            rows = table.find(ids[owned]).embeddings[:, 0]
            expected = [float(one % 2**64 % 100000) for one in ids[owned].tolist()]
            assert rows.tolist() == expected
    # Names, and a round trip of the state that is not in the tables.
    state = model.state_dict()
    prefix = "embedding_bags" if bags else "embeddings"
    assert set(state) == {f"collection.{prefix}.{name}.weight" for name in sharded.FEATURES}
    assert all(len(value) == 0 for value in state.values())
    assert not model.load_state_dict(state).missing_keys
    assert not model.load_state_dict({}).missing_keys  # libraries leave empty tensors out
    assert {name for name, _ in model.named_parameters()} == set(state)
    assert set(model.fused_optimizer.params) == set(state)
    assert dict(in_backward_optimizer_filter(model.named_parameters())) == {}
    full = {key: torch.zeros(sharded.ROWS, value.shape[1]) for key, value in state.items()}
    with pytest.warns(UserWarning, match="is dynamic and does not take them"):
        model.load_state_dict(full)
    # A collection that is not on "meta" is sharded too; its rows are not a dynamic table's.
    loaded = sharded.Net(tables, device="cpu")
    sharded.dynamic_model(loaded, sharded.SGD, world_size)
    # An environment made from a process group.
    again = sharded.dynamic_model(sharded.Net(tables), sharded.SGD, world_size)
    env = ShardingEnv.from_process_group(pg)
    other = DistributedModelParallel(
        sharded.Net(tables), env=env, device=sharded.CPU, plan=again.plan, sharders=again.sharders
    )
    other(one).backward()


def test_a_sharded_model_is_a_module_like_torchrecs(ranks: Ranks) -> None:
    ranks.run(2, as_module, bags=False)
    ranks.run(2, as_module, bags=True)


def weights_are_needed(rank: int, world_size: int) -> None:
    tables = sharded.configs(True)
    model = sharded.dynamic_model(sharded.Net(tables, weighted=True), sharded.SGD, world_size)
    assert isinstance(model.module.collection, ShardedDynamicEmbeddingBagCollection)
    with pytest.raises(ValueError, match="a weighted collection needs a weight for every id"):
        model(sharded.batch(0, 4))
    with pytest.raises(ValueError, match="unknown argument 'learning_rat'; did you mean"):
        sharded.dynamic_model(sharded.Net(tables), {"learning_rat": 0.1}, world_size)
    with pytest.raises(ValueError, match="optimizer type is"):
        sharded.dynamic_model(sharded.Net(tables), {"optimizer": EmbOptimType.LAMB}, world_size)


def named_by_a_string(rank: int, world_size: int) -> None:
    """A member or a string names the optimizer of the static table beside a dynamic one too."""
    for optimizer in (dynamicemb.EmbOptimType.EXACT_ADAGRAD, "exact_adagrad"):
        model = sharded.dynamic_model(
            sharded.Net(sharded.configs(False)),
            {"optimizer": optimizer, "learning_rate": 0.1},
            world_size,
            static=["goods"],
        )
        sharded.train(model, [sharded.batch(0, 4)])
    with pytest.raises(ValueError, match="optimizer of the static table 'goods' is 'FTRL'"):
        sharded.dynamic_model(
            sharded.Net(sharded.configs(False)),
            {"optimizer": "ftrl"},
            world_size,
            static=["goods"],
        )


def test_optimizers_named_by_a_string(ranks: Ranks) -> None:
    ranks.run(1, named_by_a_string)


def test_mistakes_are_named(ranks: Ranks) -> None:
    ranks.run(1, weights_are_needed)
