"""Ids become slots: known answers, failures, evictions, what is saved."""

from __future__ import annotations

import pytest
import torch

from dynamicemb.errors import DynamicEmbError
from torchrec_dynamic_embedding.id_transformer import IDTransformer
from torchrec_dynamic_embedding.tensor_list import TensorList


def transform(transformer: IDTransformer, ids: list[int], time: int) -> tuple[bool, list[int]]:
    slots = TensorList([torch.full((len(ids),), -7)])
    result = transformer.transform(TensorList([torch.tensor(ids)]), slots, time)
    return result.success, slots[0].tolist()


@pytest.mark.parametrize("kind", ["naive", "cacheline"])
def test_new_ids_take_the_lowest_slots(kind: str) -> None:
    transformer = IDTransformer(16, transform_config={"type": kind})
    assert transform(transformer, [100, 101, 100, 102, 101], 0) == (True, [0, 1, 0, 2, 1])


def test_several_tensors_and_what_to_fetch() -> None:
    transformer = IDTransformer(16)
    ids = TensorList([torch.tensor([5, -6]), torch.tensor([[7], [5]]), torch.empty(0).long()])
    slots = TensorList([torch.empty_like(one) for one in ids])
    success, to_fetch = transformer.transform(ids, slots, 3)
    assert success
    assert [one.tolist() for one in slots] == [[0, 1], [[2], [0]], []]
    assert to_fetch.tolist() == [[5, 0], [-6, 1], [7, 2]]


def test_a_full_table_and_eviction() -> None:
    transformer = IDTransformer(4)
    success, slots = transform(transformer, [100, 101, 102, 103, 104], 0)
    assert not success
    assert slots == [0, 1, 2, 3, -7]  # left as it was
    transform(transformer, [101, 103], 1)
    assert transformer.evict(2).tolist() == [[100, 0], [102, 2]]
    assert transform(transformer, [101, 102, 103, 104], 2) == (True, [1, 0, 3, 2])


def test_ids_that_come_often_stay() -> None:
    transformer = IDTransformer(4, {"type": "mixed_lru_lfu", "min_used_freq_power": 0})
    for time in range(50):
        transform(transformer, [1, 2], time)
    transform(transformer, [3, 4], 50)
    assert sorted(transformer.evict(2)[:, 0].tolist()) == [3, 4]


@pytest.mark.parametrize(("kind", "first"), [("lru", 2), ("lfu", 1)])
def test_other_orders(kind: str, first: int) -> None:
    transformer = IDTransformer(4, {"type": kind})
    transform(transformer, [2, 2, 2], 0)
    transform(transformer, [1], 1)
    assert transformer.evict(1)[0, 0].item() == first


def test_save_has_what_was_used_since() -> None:
    transformer = IDTransformer(8)
    transform(transformer, [1, 2, 3], 0)
    assert transformer.save().tolist() == [[1, 0], [2, 1], [3, 2]]
    assert transformer.save().tolist() == []
    transform(transformer, [3, 9], 1)
    assert transformer.save().tolist() == [[3, 2], [9, 3]]


def test_every_id_has_its_own_slot() -> None:
    ids = [7, 7 + 2**32, -7, 2**63 - 1, -(2**63), 0, -1]
    assert transform(IDTransformer(16), ids, 0) == (True, list(range(7)))


def test_results_are_the_callers_own() -> None:
    transformer = IDTransformer(8)
    first = transformer.transform(
        TensorList([torch.tensor([1])]), TensorList([torch.zeros(1).long()]), 0
    ).ids_to_fetch
    transform(transformer, [2, 3], 1)
    assert first.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "arguments",
    [
        (0,),
        (4, {"type": "random"}),
        (4, {}),
        (4, {"type": "lru", "speed": 1}),
        (4, {"type": "mixed_lru_lfu", "min_used_freq_power": 32}),
        (4, None, {"type": "other"}),
        (4, "lru"),
    ],
)
def test_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(DynamicEmbError, match="allowed"):
        IDTransformer(*arguments)  # type: ignore[arg-type]


def test_time_does_not_go_back() -> None:
    transformer = IDTransformer(4)
    transform(transformer, [1], 5)
    with pytest.raises(ValueError, match="cannot go back"):
        transform(transformer, [1], 4)
    with pytest.raises(ValueError, match="shape"):
        transformer.transform(
            TensorList([torch.tensor([1])]), TensorList([torch.zeros(2).long()]), 6
        )
