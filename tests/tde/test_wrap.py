"""``tde.wrap``: a model on small tables trains as one on full tables; batches, errors, saving."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from static_models import (
    IDS,
    build,
    config,
    data,
    fill_server,
    rows_of,
    spread,
    train,
    weights_of,
    with_spread_ids,
)
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingType

import torchrec_dynamic_embedding as tde
from dynamicemb.errors import DynamicEmbError, StoreError, UsageError
from dynamicemb.tde.ps import tensors_of
from torchrec_dynamic_embedding.dataloader import DataLoader
from torchrec_dynamic_embedding.id_transformer_collection import IDTransformerCollection

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("num_prefetch", [0, 1, 4])
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("sequence", EmbOptimType.EXACT_SGD),
        ("sequence", EmbOptimType.EXACT_ADAGRAD),
        ("bags", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
)
def test_a_tenth_of_the_rows_trains_as_all_of_them(
    memory: str, kind: str, optimizer: EmbOptimType, num_prefetch: int
) -> None:
    torch.manual_seed(3)
    full = build(kind, IDS, optimizer)
    fill_server(memory, full)
    small = build(kind, IDS // 10, optimizer)
    batches = data(60)
    expected = train(full, batches)
    loader = tde.wrap(
        memory, with_spread_ids(batches), small, small.configs, num_prefetch=num_prefetch
    )
    losses = train(small, loader)
    assert losses == pytest.approx(expected, abs=1e-6, rel=1e-6)
    after, reference = rows_of(small, memory), weights_of(full)
    for name, rows in reference.items():
        assert torch.allclose(after[name], rows, atol=1e-6)
    for path in small.configs:  # it was a cache: ids left it
        group = small._id_transformer_group[path]
        assert any(len(one.map) > 80 for one in group._tables.values())


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
)
@pytest.mark.parametrize("sharding", [ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE])
def test_other_shardings(memory: str, sharding: ShardingType, optimizer: EmbOptimType) -> None:
    runs = []
    for slots in (IDS, 100):
        torch.manual_seed(3)
        model = build("bags", slots, optimizer, sharding.value)
        for one in itertools.chain.from_iterable(model.configs.values()):
            one.weight_init_min = one.weight_init_max = 0.5
            one.init_fn = None
        shards = tensors_of("emb1", model.module.emb1, "a")[0].local_shards()
        assert len(shards) == (2 if sharding is ShardingType.COLUMN_WISE else 1)
        url = f"{memory}-{slots}"
        loader = tde.wrap(url, with_spread_ids(data(30)), model, model.configs, num_prefetch=1)
        runs.append(train(model, loader))
    assert runs[0] == pytest.approx(runs[1], abs=1e-6)


def test_prefetching_changes_no_bit(memory: str) -> None:
    runs = []
    for number, num_prefetch in enumerate((0, 1, 2, 4, 7)):
        torch.manual_seed(5)
        model = build("sequence", 120, EmbOptimType.EXACT_ADAGRAD)
        url = f"{memory}-{number}"
        loader = tde.wrap(
            url, with_spread_ids(data(40)), model, model.configs, num_prefetch=num_prefetch
        )
        losses = train(model, loader)
        runs.append((losses, rows_of(model, url)))
    for losses, rows in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(rows[name], runs[0][1][name]) for name in rows)


@pytest.mark.parametrize("num_prefetch", [0, 1, 2, 4, 100])
@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_every_batch_comes_once_and_in_order(memory: str, num_prefetch: int, count: int) -> None:
    model = build("sequence", 2000)
    loader = tde.wrap(memory, data(count), model, model.configs, num_prefetch=num_prefetch)
    assert loader.module is model
    assert len(loader) == count
    for _ in range(2):  # and again
        labels = [label.item() for label, _, _ in loader]
        assert labels == [float(step) for step in range(count)]
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_slots_of_batches_in_flight_are_not_given_away(memory: str) -> None:
    """The rows of a batch are what they were when it was made ready, until it is trained."""
    model = build("sequence", 60)
    originals = with_spread_ids(data(40, batch=3))
    loader = tde.wrap(memory, originals, model, model.configs, num_prefetch=3)
    group = model._id_transformer_group
    for (_, kjt1, _), (_, ids, _) in zip(loader, originals, strict=True):
        sizes = kjt1.length_per_key()
        slots = dict(zip(kjt1.keys(), kjt1.values().split(sizes), strict=True))
        wanted = dict(zip(ids.keys(), ids.values().split(sizes), strict=True))
        for feature, table in (("f", "a"), ("g", "a"), ("h", "b")):
            found = group["emb1"]._tables[table].map.find(wanted[feature])
            assert torch.equal(found, slots[feature])


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_an_error_of_the_data_reaches_the_caller(memory: str, num_prefetch: int) -> None:
    def failing() -> Iterator[Any]:
        yield from data(3)
        raise OSError("the disk is gone")

    model = build("sequence", 1000)
    loader = tde.wrap(memory, failing(), model, model.configs, num_prefetch=num_prefetch)
    iterator = iter(loader)
    assert len(list(itertools.islice(iterator, 3))) == 3
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    with pytest.raises(StopIteration):  # as a generator that raised
        next(iterator)


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_a_batch_that_does_not_fit_is_an_error_and_changes_nothing(
    memory: str, num_prefetch: int
) -> None:
    model = build("sequence", 10)
    large = data(1, batch=60)
    batches = [*data(2, batch=1), *large, *data(1, batch=1)]
    loader = tde.wrap(memory, batches, model, model.configs, num_prefetch=num_prefetch)
    iterator = iter(loader)
    train(model, itertools.islice(iterator, 2))
    with pytest.raises(UsageError, match="find no slot in table 'a'.*num_embeddings"):
        next(iterator)
    iterator.close()
    again = DataLoader(model._id_transformer_group, data(5, batch=1))
    train(model, again)


def test_an_iteration_that_is_given_up(memory: str) -> None:
    model = build("sequence", 200)
    loader = tde.wrap(memory, data(30), model, model.configs, num_prefetch=4)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert len(list(loader)) == 30  # begins anew


def test_save_in_the_middle_writes_what_is_changed_later_too(memory: str) -> None:
    batches = with_spread_ids(data(30))
    model = build("sequence", 500)
    loader = tde.wrap(memory, batches, model, model.configs, num_prefetch=3)
    for number, batch in enumerate(loader):
        train(model, [batch])
        if number % 7 == 0:
            tde.save(model)
    rows = rows_of(model, memory)
    group = model._id_transformer_group["emb1"]._tables["a"]
    pairs = group.map.used_since(None)
    weight = tensors_of("emb1", model.module.emb1, "a")[0].local_shards()[0].tensor
    at = {int(i): n for n, i in enumerate(spread(torch.arange(IDS)).tolist())}
    for id_, slot in pairs.pairs().tolist():
        assert torch.equal(rows["a"][at[id_]], weight[slot])


def test_seed_usage(memory: str) -> None:
    """The example of torchrec_dynamic_embedding's README, with paths chosen by position."""
    model = build("sequence", 300)
    m = model
    config1, config2 = model.configs["emb1"], model.configs["emb2"]
    dataloader: Any = data(5)
    dataloader = tde.wrap(
        memory,
        dataloader,
        m,
        # configs of the embedding collections in the model
        {"emb1": config1, "emb2": config2},
    )
    for label, kjt1, kjt2 in dataloader:
        output = m(kjt1, kjt2)
        output.sum().backward()
        assert label.shape == (1,)


def test_data_info_and_urls_by_table(memory: str) -> None:
    model = build("sequence", 300)
    asked = []

    def url(path: str, table: str) -> str:
        asked.append((path, table))
        return memory

    swapped = [(kjt2, kjt1, label) for label, kjt1, kjt2 in data(4)]
    loader = tde.wrap(
        url, swapped, model, model.configs, data_info={0: "emb2", 1: "emb1"}, parallel=False
    )
    losses = train(model, ((label, kjt1, kjt2) for kjt2, kjt1, label in loader))
    assert len(losses) == 4
    assert asked == [("emb1", "a"), ("emb1", "b"), ("emb2", "c")]


def test_a_table_may_be_left_out(memory: str) -> None:
    """What has no parameter server keeps its ids."""
    model = build("sequence", 300)
    configs = {"emb2": model.configs["emb2"]}
    loader = tde.wrap(memory, data(4), model, configs, data_info={2: "emb2"})
    for (_, kjt1, kjt2), (_, same, other) in zip(loader, data(4), strict=True):
        assert torch.equal(kjt1.values(), same.values())
        assert torch.equal(kjt2.lengths(), other.lengths())


def test_refused(memory: str) -> None:
    model = build("sequence", 300)
    for arguments, message in [
        ({"configs_dict": {"emb3": model.configs["emb1"]}}, "'emb1', 'emb2'"),
        (
            {"configs_dict": {"emb2": [config("sequence", "c", 301, ["k"])]}},
            "num_embeddings of table 'c' is 301; allowed: at most 300",
        ),
        ({"data_info": {0: "emb9"}}, "emb1"),
        ({"num_prefetch": -1}, "at least 0"),
        ({"eviction_config": {"type": "best"}}, "mixed_lru_lfu"),
        ({"ps_config": {"chunk_size": 3}}, "one row"),
        ({"url": "nothing://x"}, "register_io"),
        ({"module": torch.nn.Linear(1, 1)}, "DistributedModelParallel"),
    ]:
        given: dict[str, Any] = {
            "url": memory,
            "dataloader": [],
            "module": model,
            "configs_dict": model.configs,
        }
        with pytest.raises(DynamicEmbError, match=message):
            tde.wrap(**(given | arguments))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tde\.wrap was given"):
        tde.save(model)
    tde.wrap(memory, [], model, model.configs)
    with pytest.raises(UsageError, match="already has a parameter server"):
        tde.wrap(memory, [], model, model.configs)


def test_wrong_batches(memory: str) -> None:
    model = build("sequence", 300)
    kjt = data(1)[0][2]
    loader = tde.wrap(memory, [(kjt, kjt, kjt), {"a": kjt}], model, model.configs)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="KeyedJaggedTensors of a batch is 3"):
        next(iterator)


def test_the_server_fails_and_training_goes_on(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamicemb.tiers.remote import memory as in_memory

    state = {"calls": 0}

    def sometimes(work: Any) -> Any:
        def do(*arguments: Any) -> Any:
            state["calls"] += 1
            if state["calls"] % 5 == 0:
                raise StoreError(None, "the server is down")
            return work(*arguments)

        return do

    plain = build("sequence", 100)
    torch.manual_seed(2)
    expected = train(
        plain, tde.wrap(f"{memory}-2", with_spread_ids(data(30)), plain, plain.configs)
    )
    monkeypatch.setattr(in_memory.MemoryRows, "push", sometimes(in_memory.MemoryRows.push))
    monkeypatch.setattr(in_memory.MemoryRows, "pull", sometimes(in_memory.MemoryRows.pull))
    model = build("sequence", 100)
    torch.manual_seed(2)
    loader = tde.wrap(memory, with_spread_ids(data(30)), model, model.configs, num_prefetch=2)
    iterator = iter(loader)
    losses: list[float] = []
    failures = 0
    while len(losses) < 30:
        try:
            batch = next(iterator)
        except StoreError:
            failures += 1
            continue
        losses += train(model, [batch])
    assert failures > 3
    assert losses == expected


def test_a_collection_without_a_server() -> None:
    """Slots alone, without a process group or a model."""
    collection = IDTransformerCollection(
        [config("bags", "a", 8, []), config("bags", "b", 8, ["g"])]
    )
    kjt = KeyedJaggedTensor(
        keys=["a", "x", "g"],
        values=torch.tensor([10, 20, 10, 5, 10]),
        lengths=torch.tensor([2, 1, 1, 0, 1, 0]),
        weights=torch.arange(5.0),
    )
    out, handles = collection.transform(kjt)
    assert handles == []
    assert out.keys() == kjt.keys()
    assert out.values().tolist() == [0, 1, 0, 5, 0]
    assert torch.equal(out.lengths(), kjt.lengths())
    assert torch.equal(out.weights(), kjt.weights())
    with pytest.raises(ValueError, match="a name of its own"):
        IDTransformerCollection([config("bags", "a", 8, ["f"]), config("bags", "a", 8, ["g"])])
    with pytest.raises(ValueError, match="of one table"):
        IDTransformerCollection([config("bags", "a", 8, ["f"]), config("bags", "b", 8, ["f"])])
