"""An embedding on a GPU gives the bits of one on the CPU, in every store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from embeddings import DIM, STORES, make, store_options, uniform_tables

from dynamicemb import one_embedding
from dynamicemb.errors import InsertionError, InvalidArgumentError
from dynamicemb.tiers import CachedTable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KINDS = [*STORES, "host_and_ssd"]


def _train(embedding: one_embedding.Embedding, optimizer: Any, steps: range) -> list[list[float]]:
    """Gradients that need no sum over a row, so that other kernels than ours change no bit."""
    outputs = []
    for step in steps:
        draw = torch.Generator("cpu").manual_seed(step)
        ids = torch.randint(0, 30_000, (400, 2), generator=draw, device="cpu").to(embedding.device)
        optimizer.zero_grad()
        out = embedding(ids)
        out.backward(out.detach() - (ids % 7)[..., None])
        optimizer.step()
        outputs.append(out.detach().double().sum((0, 1)).tolist())
    return outputs


def _content(embedding: one_embedding.Embedding) -> tuple[torch.Tensor, ...]:
    ids = torch.cat([rows.ids for rows in embedding.tables[0].export()])
    ids = torch.sort(ids).values
    found = embedding.tables[0].find(ids)
    return ids.cpu(), found.embeddings.cpu(), found.state.cpu()


def _adam(embedding: one_embedding.Embedding) -> torch.optim.Adam:
    return torch.optim.Adam(embedding.parameters(), lr=0.05)


@pytest.mark.parametrize("store", KINDS)
@pytest.mark.parametrize("moved", [False, True])
def test_the_same_rows_as_on_the_cpu(tmp_path: Path, store: str, moved: bool) -> None:
    contents, tables = [], uniform_tables(0.1, 0.2)
    for device in ("cpu", "cuda"):
        embedding = make(
            tmp_path / device,
            store,
            dim=4 * DIM,
            size_factor=3,
            tables=tables,
            device="cpu" if moved else device,
        )
        if moved:
            _train(embedding, _adam(embedding), range(3))
            embedding.to(device)
        assert embedding.device.type == device
        assert embedding.handle.device.type == device
        _train(embedding, _adam(embedding), range(3, 40))
        if store != "device_mem":
            cached = embedding.tables[0]
            assert isinstance(cached, CachedTable)
            assert cached.cache_stats().brought_up > 0
        embedding.save_snapshot("a")
        contents.append(_content(embedding))
        _train(embedding, _adam(embedding), range(40, 42))
        embedding.load_snapshot("a")
        contents.append(_content(embedding))
        embedding.close()
    for other in contents[1:]:
        for one, two in zip(contents[0], other, strict=True):
            assert torch.equal(one, two)


def test_a_snapshot_moves_between_devices(tmp_path: Path) -> None:
    embedding = make(tmp_path, size_factor=3, device="cuda")
    _train(embedding, _adam(embedding), range(5))
    embedding.save_snapshot("a")
    then = _content(embedding)
    embedding.close()
    other = make(tmp_path, "cached_ssd", size_factor=3, device="cpu")
    for one, two in zip(then, _content(other), strict=True):
        assert torch.equal(one, two)


def test_evaluation_padding_and_capacity(tmp_path: Path) -> None:
    options = store_options("device_mem", tmp_path, capacity=1000)
    embedding = make(
        tmp_path,
        options=options,
        tables=uniform_tables(0.001, 100.0),
        padding_idx=-1,
        device="cuda",
        share_ids=False,
    )
    ids = torch.arange(1000, device="cuda").view(-1, 2)
    embedding.eval()
    first = embedding(ids)
    assert len(embedding.tables[0]) == 0
    embedding.train()
    assert torch.equal(embedding(ids), first)
    assert (embedding(torch.tensor([[-1, 1]], device="cuda"))[0, 0] == 0).all()
    with pytest.raises(InsertionError, match="2 new ids would make 1002 rows"):
        embedding(torch.tensor([[5000, 5001]], device="cuda"))
    with pytest.raises(InvalidArgumentError, match="ids.device is 'cpu'"):
        embedding(torch.tensor([[1, 2]], device="cpu"))


def test_an_optimizer_without_a_kernel_is_refused(tmp_path: Path) -> None:
    options = store_options("device_mem", tmp_path, storage_dim=3 * DIM + 2)
    with pytest.raises(InvalidArgumentError, match="SMART_DECAY_ADAM"):
        make(tmp_path, options=options, device="cuda")
