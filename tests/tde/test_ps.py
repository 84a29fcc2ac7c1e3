"""Rows and optimizer states go to a parameter server and come back."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamicemb.errors import DynamicEmbError, StoreError
from dynamicemb.tde import write_back
from dynamicemb.tde.ps import tensors_of
from dynamicemb.tiers.remote.memory import MemoryRows
from torchrec_dynamic_embedding.ps import PS, PSCollection


def pairs(*rows: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2)


def filled(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(*shape)


def test_a_row_comes_back(memory: str) -> None:
    weight = filled(5, 4)
    ps = PS("t", [weight], memory)
    before = weight.clone()
    ps.evict(pairs((-100, 1), (2**40, 3)))
    weight.zero_()
    ps.fetch(pairs((-100, 1), (2**40, 3)), 0).wait()
    assert torch.equal(weight[[1, 3]], before[[1, 3]])
    assert weight[[0, 2, 4]].abs().sum() == 0


def test_to_another_slot_with_states_of_any_width(memory: str) -> None:
    tensors = [filled(5, 4), filled(5, 4) + 100, filled(5) + 200, filled(5, 1) + 300]
    before = [one.clone() for one in tensors]
    ps = PS("t", tensors, memory)
    ps.evict(pairs((7, 1)))
    ps.fetch(pairs((7, 4)), 0).wait()
    for one, old in zip(tensors, before, strict=True):
        assert torch.equal(one[4], old[1])
        assert torch.equal(one[:4], old[:4])


def test_ids_that_the_server_does_not_have(memory: str) -> None:
    weight, state = filled(5, 4), filled(5) + 9
    ps = PS("t", [weight, state], memory)
    before = weight.clone()
    ps.fetch(pairs((1, 1)), 0).wait()
    assert torch.equal(weight, before)  # as it was
    ps.fetch(pairs((1, 1), (2, 2)), 1, True, -0.5, 0.25).wait()
    assert weight[1:3].min() >= -0.5
    assert weight[1:3].max() <= 0.25
    assert state.tolist() == [9.0, 0.0, 0.0, 12.0, 13.0]
    ps.fetch(pairs((3, 3)), 2, reinit=True, weight_init_min=2.0, weight_init_max=2.0).wait()
    assert weight[3].tolist() == [2.0] * 4


def test_small_chunks(memory: str) -> None:
    weight = filled(100, 4)
    before = weight.clone()
    ps = PS("t", [weight], memory, chunk_size=12)
    ids = torch.stack([torch.arange(100) * 7, torch.arange(100)], 1)
    ps.evict(ids)
    weight.zero_()
    ps.fetch(ids, 0).wait()
    assert torch.equal(weight, before)
    with pytest.raises(ValueError, match="one row"):
        PS("t", [weight], memory, chunk_size=3)


class Failing(MemoryRows):
    """A server that refuses while ``down``."""

    down = False

    def push(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        if Failing.down:
            raise StoreError(None, "the server is down")
        super().push(ids, rows)

    def pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if Failing.down:
            raise StoreError(None, "the server is down")
        return super().pull(ids)


@pytest.fixture
def failing(memory: str, monkeypatch: pytest.MonkeyPatch) -> str:
    from dynamicemb.tiers.remote import open as opening

    monkeypatch.setattr(opening, "MemoryRows", Failing)
    Failing.down = False
    return memory


def test_rows_that_cannot_be_written_are_kept_and_found(failing: str) -> None:
    weight = filled(5, 4)
    before = weight.clone()
    ps = PS("t", [weight], failing)
    Failing.down = True
    ps.put(pairs((7, 1)))
    weight[1] = -1
    ps.put(pairs((7, 1), (8, 2)))  # a newer row of the same id
    with pytest.raises(StoreError, match="down"):
        ps.flush()
    ps.fetch(pairs((7, 3), (8, 4)), 0).wait()  # needs no server
    assert weight[3].tolist() == [-1.0] * 4
    assert torch.equal(weight[4], before[2])
    Failing.down = False
    ps.flush()
    weight.zero_()
    PS("t", [weight], failing).fetch(pairs((7, 0), (8, 1)), 0).wait()
    assert weight[0].tolist() == [-1.0] * 4
    assert torch.equal(weight[1], before[2])


def test_a_fetch_that_failed_is_tried_again_and_never_written_back(failing: str) -> None:
    weight = filled(5, 4)
    ps = PS("t", [weight], failing)
    ps.evict(pairs((7, 1)))
    row = weight[1].clone()
    Failing.down = True
    handle = ps.fetch(pairs((7, 2)), 0)
    with pytest.raises(StoreError, match="down"):
        handle.wait()
    Failing.down = False
    ps.evict(pairs((7, 2)))  # slot 2 holds no row of id 7
    handle.wait()
    assert torch.equal(weight[2], row)
    handle.wait()


def test_errors_in_the_background_are_raised_once_and_tried_again(failing: str) -> None:
    weight = filled(5, 4)
    ps = PS("t", [weight], failing)
    Failing.down = True
    ps.put(pairs((7, 1)))
    failed = threading.Event()
    while not failed.is_set():
        try:
            ps.raise_error()
        except StoreError:
            failed.set()
    Failing.down = False
    ps.flush()
    ps.raise_error()


def test_much_on_its_way_makes_put_wait(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "MAX_BYTES", 100)
    weight = filled(100, 4)
    ps = PS("t", [weight], memory)
    for begin in range(0, 100, 10):
        ids = torch.arange(begin, begin + 10)
        ps.put(torch.stack([ids, ids], 1))
        assert ps._servers[0].behind._bytes <= 100 + 160
    ps.flush()


def test_collection(memory: str) -> None:
    weights = {"a": filled(4, 2), "b": filled(4, 3)}
    plan: dict[str, Any] = {name: (None, [one]) for name, one in weights.items()}
    collection = PSCollection("model.emb", plan, lambda name: memory, {"chunk_size": 100})
    assert collection.table_names() == ["a", "b"]
    collection["b"].evict(pairs((1, 2)))
    PS("model.emb.b", [weights["b"]], memory).fetch(pairs((1, 0)), 0).wait()
    assert torch.equal(weights["b"][0], weights["b"][2])
    with pytest.raises(ValueError, match="chunk_size"):
        PSCollection("p", plan, memory, {"chunks": 1})


@pytest.mark.parametrize(
    ("tensors", "ids"),
    [
        ([], pairs((1, 1))),
        ([torch.zeros(3)[0]], pairs((1, 1))),
        ([torch.zeros(3, 2), torch.zeros(4, 2)], pairs((1, 1))),
        ([torch.zeros(3, 2)], torch.zeros(2, 3).long()),
        ([torch.zeros(3, 2)], torch.zeros(2, 2)),
    ],
)
def test_refused(memory: str, tensors: list[torch.Tensor], ids: torch.Tensor) -> None:
    with pytest.raises(DynamicEmbError, match="allowed"):
        PS("t", tensors, memory).evict(ids)


def test_every_state_with_a_row_per_slot_travels() -> None:
    """As TorchRec names them: Adam's second state is not called momentum2."""
    weight = filled(5, 4)
    states = {
        "t.momentum1": filled(5, 4) + 1,
        "t.exp_avg_sq": filled(5, 4) + 2,
        "t.row_counter": filled(5),
        "t.iter": torch.zeros(1),
    }
    key = "embeddings.t.weight"
    optimizer = SimpleNamespace(state_dict=lambda: {"state": {key: states}})
    module = SimpleNamespace(state_dict=lambda: {key: weight}, fused_optimizer=optimizer)
    found = tensors_of("emb", module, "t")
    assert len(found) == 4
    assert found[0] is weight
    assert found[2] is states["t.exp_avg_sq"]
