"""What ranks do in tests, in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from embeddings import DIM, make, store_options, uniform_tables

from dynamicemb import DynamicEmbDump, DynamicEmbLoad, one_embedding
from dynamicemb.errors import CheckpointError, StoreError

IDS, STEPS, BATCH = 300, 6, 60
TABLES = uniform_tables(0.1, 0.2)
EXTREME = [-1, -(2**63), 2**63 - 1, 10**15]


def call(rank: int, world_size: int, work: Any, given: tuple[Any, ...]) -> Any:
    """For :class:`ranks.Ranks`."""
    return work(rank, *given)


def batch_of(step: int) -> torch.Tensor:
    """The ids of all ranks together: [BATCH, 2]; no id is in both tables."""
    ids = torch.randint(0, IDS, (BATCH, 2), generator=torch.Generator().manual_seed(step))
    ids[:, 1] += 1000
    ids[0] = torch.tensor(EXTREME[:2])
    ids[1] = torch.tensor(EXTREME[2:])
    return ids


def adam(embedding: one_embedding.Embedding) -> torch.optim.Adam:
    return torch.optim.Adam(embedding.parameters(), lr=0.05, eps=1e-3)


def train(
    embedding: one_embedding.Embedding,
    steps: range,
    *,
    rank: int = 0,
    ranks: int = 1,
    uneven: bool = False,
) -> None:
    """Every rank takes its part of the batches; if ``uneven``, the last has nothing."""
    optimizer = adam(embedding)
    for step in steps:
        ids = batch_of(step)
        parts = max(1, ranks - 1) if uneven else ranks
        mine = ids[rank::parts] if rank < parts else ids[:0]
        optimizer.zero_grad()
        ((embedding(mine) - (mine % 7)[..., None]) ** 2).sum().backward()
        optimizer.step()


def content(embedding: one_embedding.Embedding) -> dict[int, tuple[list[float], list[float]]]:
    """{id: (row, state)} of this rank."""
    return {
        int(id_): (row.tolist(), state.tolist())
        for rows in embedding.tables[0].export()
        for id_, row, state in zip(rows.ids, rows.embeddings, rows.state, strict=True)
    }


def options(path: str, store: str, ranks: int, apart: bool) -> dict[str, Any]:
    """``apart``: a list of folders instead of one."""
    folders = [str(Path(path) / f"rank {rank} of {ranks}") for rank in range(ranks)]
    return store_options(store, folders if apart else path, size_factor=3)


def open_embedding(path: str, store: str, *, apart: bool = False, **more: Any) -> Any:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return make(
        path, options=options(path, store, ranks, apart), tables=TABLES, name="rows", **more
    )


def train_and_save(
    rank: int, path: str, store: str, apart: bool, uneven: bool
) -> tuple[dict[int, Any], Any]:
    embedding = open_embedding(path, store, apart=apart)
    ranks = embedding.world_size
    train(embedding, range(STEPS), rank=rank, ranks=ranks, uneven=uneven)
    embedding.save_snapshot("a")
    saved = content(embedding)
    train(embedding, range(STEPS, STEPS + 2), rank=rank, ranks=ranks, uneven=uneven)
    embedding.eval()
    ids = torch.tensor([[5, 10**9], [7, 7]])
    evaluated = embedding(ids).tolist()
    embedding.load_snapshot("a")
    assert content(embedding) == saved
    embedding.close()
    return saved, evaluated


def load_and_go_on(
    rank: int, path: str, store: str, old: list[str] | None, resume: bool
) -> tuple[dict[int, Any], dict[int, Any]]:
    embedding = open_embedding(path, store, apart=old is not None, resume=resume)
    embedding.load_snapshot("a", persistent_path=old)
    loaded = content(embedding)
    train(embedding, range(STEPS, STEPS + 2), rank=rank, ranks=embedding.world_size)
    embedding.save_snapshot("b")
    embedding.close()
    return loaded, content(embedding) if store != "cached_ssd" else {}


def average(rank: int, path: str, reduction: str) -> list[float]:
    embedding = make(path, name="rows", gradient_reduction=reduction)
    sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding(torch.tensor([3])).detach()
    embedding(torch.tensor([3])).sum().backward()
    sgd.step()
    embedding.eval()
    moved: list[float] = (before - embedding(torch.tensor([3]))).mean().tolist()
    return [moved]


def beside_a_dense_model(rank: int, path: str) -> list[float]:
    """DistributedDataParallel around the dense part; losses of the whole batch."""
    torch.manual_seed(1)
    embedding = make(path, name="rows", gradient_reduction="mean")
    top: Any = torch.nn.Linear(DIM, 1)
    ranks = 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
        top = torch.nn.parallel.DistributedDataParallel(top)
    sgd = torch.optim.SGD([*embedding.parameters(), *top.parameters()], lr=0.5)
    losses = []
    for step in range(5):
        ids = batch_of(step).view(-1)
        mine = ids[rank::ranks]
        sgd.zero_grad()
        loss = ((top(embedding(mine)).squeeze(1) - mine % 3) ** 2).mean()
        loss.backward()
        sgd.step()
        whole = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(whole)
        losses.append(whole.item())
    return losses


def save_on_some_ranks(rank: int, path: str) -> list[str]:
    """The second snapshot fails on rank 1: nobody may come back to it."""
    embedding = open_embedding(path, "device_mem")
    train(embedding, range(2), rank=rank, ranks=2)
    embedding.save_snapshot("a")
    then = content(embedding)
    train(embedding, range(2, 4), rank=rank, ranks=2)
    if rank == 1:

        def fail(*_: Any) -> None:
            raise StoreError(28, "No space left on device")

        store = embedding._snapshots.store
        store.snapshot = fail
    messages = []
    try:
        embedding.save_snapshot("a")
    except (StoreError, CheckpointError) as error:
        messages.append(str(error))
    if rank == 1:
        del store.snapshot
    embedding.load_snapshot("a")
    assert content(embedding) == then
    try:
        embedding.load_snapshot("gone")
    except StoreError as error:
        messages.append(str(error))
    train(embedding, range(2, 4), rank=rank, ranks=2)
    embedding.save_snapshot("a")
    embedding.close()
    messages.append(str(len(list(Path(path, f"{rank}-2/rows/snapshots").iterdir()))))
    return messages


def dump(rank: int, path: str, folder: str) -> dict[int, Any]:
    model = torch.nn.ModuleDict({"rows": open_embedding(path, "device_mem")})
    train(model["rows"], range(3), rank=rank, ranks=2)  # type: ignore[arg-type]
    DynamicEmbDump(folder, model, optim=True)
    return content(model["rows"])  # type: ignore[arg-type]


def load_dump(rank: int, path: str, folder: str) -> dict[int, Any]:
    model = torch.nn.ModuleDict({"rows": open_embedding(path, "device_mem")})
    DynamicEmbLoad(folder, model, optim=True)
    return content(model["rows"])  # type: ignore[arg-type]
