"""Tables on a GPU with a parameter server: the rows, losses and slots of the CPU.

Where fbgemm-gpu-cpu is all there is of FBGEMM, tests/fbgemm_on_cuda.py stands in for its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from piped_models import model_of, most_distinct, trained
from static_models import (
    IDS,
    build,
    data,
    fill_server,
    moved,
    rows_of,
    train,
    weights_of,
    with_spread_ids,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torchrec_dynamic_embedding as tde
from dynamicemb.tde.ps import tensors_of
from fbgemm_on_cuda import only_on_a_gpu
from torchrec_dynamic_embedding.id_transformer import IDTransformer
from torchrec_dynamic_embedding.ps import PS
from torchrec_dynamic_embedding.tensor_list import TensorList

pytestmark = only_on_a_gpu
BUSY = 50_000_000  # clock cycles that a stream is kept from what comes next


def test_ids_on_a_gpu_get_the_same_slots() -> None:
    here, there = IDTransformer(64), IDTransformer(64)
    generator = torch.Generator("cpu").manual_seed(1)
    for time in range(20):
        ids = torch.randint(-(2**62), 2**62, (2, 5), generator=generator) % 40 * 2**33 + 7
        slots = TensorList([torch.empty_like(ids)])
        on_gpu = TensorList([torch.empty_like(ids, device="cuda")])
        expected = here.transform(TensorList([ids]), slots, time)
        got = there.transform(TensorList([ids.cuda()]), on_gpu, time)
        assert torch.equal(on_gpu[0].cpu(), slots[0])
        assert got.success == expected.success
        assert torch.equal(got.ids_to_fetch, expected.ids_to_fetch)


def test_rows_and_states_come_back(memory: str) -> None:
    weight = torch.rand(9, 4, device="cuda")
    tensors = [weight, torch.rand(9, 4, device="cuda"), torch.rand(9, device="cuda")]
    before = [one.clone() for one in tensors]
    ps = PS("t", tensors, memory)
    ps.evict(torch.tensor([[-5, 1], [2**40, 8]]))
    for one in tensors:
        one.zero_()
    ps.fetch(torch.tensor([[2**40, 2], [-5, 1]], device="cuda")).wait()
    for one, old in zip(tensors, before, strict=True):
        assert torch.equal(one[2], old[8])
        assert torch.equal(one[1], old[1])
        assert one[3:].abs().sum() == 0


def test_rows_are_read_after_what_the_callers_stream_does(memory: str) -> None:
    weight = torch.zeros(4, 4, device="cuda")
    ps = PS("t", [weight], memory)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(BUSY)
        weight += 1
        ps.evict(torch.tensor([[7, 0]]))
        torch.cuda._sleep(BUSY)
        weight += 1
        handle = ps.fetch(torch.tensor([[7, 1]]))  # in another thread, after the addition
        handle.wait()
        weight += 1
    torch.cuda.synchronize()
    assert weight[:, 0].tolist() == [3.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("sequence", EmbOptimType.EXACT_SGD),
        ("sequence", EmbOptimType.EXACT_ADAGRAD),
        ("bags", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
)
def test_training_is_that_of_the_cpu(memory: str, kind: str, optimizer: EmbOptimType) -> None:
    runs = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        model = build(kind, 100, optimizer, device=device)
        torch.manual_seed(5)  # of the rows of new ids
        url = f"{memory}-{device}"
        batches = moved(with_spread_ids(data(40)), device)
        loader = tde.wrap(url, batches, model, model.configs, num_prefetch=2)
        losses = train(model, loader)
        runs.append((losses, rows_of(model, url)))
    (losses, rows), (on_gpu, rows_on_gpu) = runs
    assert on_gpu == pytest.approx(losses, abs=1e-5, rel=1e-5)
    for name, expected in rows.items():
        assert torch.allclose(rows_on_gpu[name], expected, atol=1e-6)


@pytest.mark.parametrize("num_prefetch", [0, 1, 4])
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_tenth_of_the_rows_trains_as_all_of_them_with_adam(
    memory: str, num_prefetch: int, own_stream: bool
) -> None:
    """Adam has two states, the second under another name."""
    torch.manual_seed(3)
    full = build("bags", IDS, EmbOptimType.ADAM, device="cuda")
    assert len(tensors_of("emb1", full.module.emb1, "a")) == 3
    fill_server(memory, full)
    small = build("bags", IDS // 10, EmbOptimType.ADAM, device="cuda")
    expected = train(full, moved(data(60), "cuda"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        loader = tde.wrap(
            memory,
            moved(with_spread_ids(data(60)), "cuda"),
            small,
            small.configs,
            num_prefetch=num_prefetch,
        )
        losses = train(small, slowed(loader) if own_stream else loader)
        after = rows_of(small, memory)
    assert losses == pytest.approx(expected, abs=1e-6, rel=1e-6)
    reference = weights_of(full)
    for name, rows in reference.items():
        assert torch.allclose(after[name], rows, atol=1e-6)


def slowed(loader: Any) -> Iterator[Any]:
    """The batches, with a GPU that is behind the host at every step."""
    for batch in loader:
        torch.cuda._sleep(BUSY // 10)
        yield batch


@pytest.mark.parametrize("num_prefetch", [0, 3])
def test_a_train_pipeline_gets_its_rows(memory: str, num_prefetch: int) -> None:
    """Its streams for copies and for the exchange of ids are not the one that trains."""
    torch.manual_seed(3)
    batches = data(60)
    full = model_of("sequence", IDS, "cuda")
    small = model_of("sequence", most_distinct(batches, 3 + num_prefetch), "cuda")
    fill_server(memory, full)
    device = torch.device("cuda", 0)
    expected = trained(TrainPipelineSparseDist(full, full.fused_optimizer, device), batches)
    loader = tde.wrap(
        memory,
        with_spread_ids(batches),  # in main memory: the pipeline copies them
        small,
        small.configs,
        eviction_config={"type": "lfu"},
        num_prefetch=num_prefetch,
        in_flight=2,
    )
    losses = trained(TrainPipelineSparseDist(small, small.fused_optimizer, device), loader)
    assert losses == pytest.approx(expected, abs=1e-6, rel=1e-6)
    after = rows_of(small, memory)
    for name, rows in weights_of(full).items():
        assert torch.allclose(after[name], rows, atol=1e-6)
