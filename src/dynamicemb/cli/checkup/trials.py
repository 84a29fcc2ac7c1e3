"""Tiny runs of what should work here."""

from __future__ import annotations

import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbDump,
    DynamicEmbLoad,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
)
from dynamicemb.checkpoint.serving import ServingTable
from dynamicemb.cli.checkup.finding import Finding, Status
from dynamicemb.cli.checkup.packages import import_problem
from dynamicemb.tiers import RemoteStore, SsdStore
from dynamicemb.tiers.remote.open import check_url

logger = logging.getLogger(__name__)
DIM, ROWS, BATCH, RATE = 8, 1000, 100, 0.5
MEMORY = 1 << 14  # bytes for rows of a table whose rest is in a store: some 256 of them
IDS = torch.cat(
    [
        torch.tensor([2**63 - 1, -(2**63), -1], device="cpu"),
        torch.arange(ROWS - 3, device="cpu") * 7919,
    ]
)


def trial_findings(folder: Path, redis: str | None) -> Iterator[Finding]:
    """``folder``: where files are written, and removed. ``redis``: the URL of a server to try."""
    with tempfile.TemporaryDirectory(prefix="dynamicemb-doctor-", dir=folder) as made:
        place = Path(made)
        yield _tried("training", train_on_cpu, essential=True)
        yield _tried("a checkpoint and back", lambda: checkpoint(place / "c"), essential=True)
        yield _tried("rows on a disk", lambda: ssd_store(place / "s"), essential=True)
    if torch.cuda.is_available():
        yield _gpu()
    if import_problem("torchrec") is None:
        yield _tried("a TorchRec module", torchrec_module)
    if redis is not None:
        yield _tried("rows in Redis", lambda: redis_store(redis), essential=True)


def _tried(name: str, trial: Callable[[], str], *, essential: bool = False) -> Finding:
    """``trial`` returns what it did, or raises."""
    begin = time.perf_counter()
    try:
        detail = trial()
    except Exception as error:  # whatever happens is what the doctor is asked about
        logger.debug("%s failed", name, exc_info=True)
        text = f"{type(error).__name__}: {error}"
        command = getattr(error, "name", None) if isinstance(error, ImportError) else None
        helps = f"pip install 'dynamicemb[{command}]'" if command == "redis" else ""
        return Finding(name, Status.BROKEN, text, helps, essential)
    return Finding(name, Status.OK, f"{detail}, {time.perf_counter() - begin:.2f} s", "", essential)


def _expect(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.shape != expected.shape or not torch.allclose(found.cpu(), expected.cpu(), atol=1e-6):
        raise AssertionError(f"{what} are not what they must be")


def _module(
    device: str = "cpu", optimizer: str = "sgd", **changes: object
) -> BatchedDynamicEmbeddingTables:
    options = DynamicEmbTableOptions(**({"dim": DIM, "max_capacity": 4096} | changes))  # type: ignore[arg-type]
    return BatchedDynamicEmbeddingTables(
        [options],
        table_names=["t"],
        pooling_mode=DynamicEmbPoolingMode.NONE,
        optimizer=optimizer,
        learning_rate=RATE,
        seed=1,
        device=device,
    )


def _train(module: BatchedDynamicEmbeddingTables, device: str = "cpu") -> None:
    """Steps whose gradient is 1 everywhere; checks that SGD did what it must."""
    ids = IDS.to(device)
    before = []
    for some in ids.split(BATCH):
        rows = module(some, torch.arange(len(some) + 1, device=device))
        rows.backward(torch.ones_like(rows))
        before.append(rows.detach())
    found = module.tables[0].find(ids)
    _expect("the rows after a step", found.embeddings, torch.cat(before) - RATE)


def train_on_cpu() -> str:
    _train(_module())
    return f"{len(IDS)} rows"


def checkpoint(folder: Path) -> str:
    module, other = _module(optimizer="adam"), _module(optimizer="adam")
    module(IDS, torch.arange(len(IDS) + 1, device="cpu")).sum().backward()
    DynamicEmbDump(folder, module, optim=True, progress=False)
    DynamicEmbLoad(folder, other, optim=True, progress=False)
    expected = module.tables[0].find(IDS).embeddings
    _expect("rows that were loaded", other.tables[0].find(IDS).embeddings, expected)
    with ServingTable(folder, verify=True) as serving:
        _expect("rows that were mapped", serving(IDS), expected)
    return f"{len(IDS)} rows written, loaded, mapped"


def ssd_store(folder: Path) -> str:
    module = _module(external_storage=SsdStore.at(folder), local_hbm_for_values=MEMORY)
    _train(module)
    table = module.tables[0]
    table.flush()
    if len(table) != len(IDS):
        raise AssertionError(f"{len(table)} rows of {len(IDS)} are there")
    return f"{len(IDS)} rows, of which few are in memory"


def redis_store(url: str) -> str:
    where = getattr(check_url(url), "where", "the server")
    name = f"dynamicemb-doctor-{uuid.uuid4().hex}"
    module = _module(external_storage=RemoteStore.at(url, table=name), local_hbm_for_values=MEMORY)
    _train(module)
    table = module.tables[0]
    table.flush()
    table.erase(IDS)  # clear() would look at every key of the server
    return f"{len(IDS)} rows written to {where}, read and removed"


def torchrec_module() -> str:
    import torchrec

    from dynamicemb.unsharded import make_dynamic

    config = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=1000, feature_names=["f"]
    )
    module = make_dynamic(torchrec.EmbeddingBagCollection([config]))
    lengths = torch.ones(len(IDS), dtype=torch.int64, device="cpu")
    features = torchrec.KeyedJaggedTensor(keys=["f"], values=IDS, lengths=lengths)
    rows = module(features).to_dict()["f"]
    rows.sum().backward()
    return f"{len(rows)} bags"


def _gpu() -> Finding:
    problem = import_problem("triton")
    if problem is not None:
        return Finding("a GPU table", Status.MISSING, problem, "pip install 'dynamicemb[gpu]'")

    def trial() -> str:
        on_gpu, on_cpu = _module("cuda"), _module()
        _train(on_gpu, "cuda")
        _train(on_cpu)
        _expect(
            "rows of the GPU's table",
            on_gpu.tables[0].find(IDS.cuda()).embeddings,
            on_cpu.tables[0].find(IDS).embeddings,
        )
        return f"{len(IDS)} rows as on the CPU"

    return _tried("a GPU table", trial, essential=True)
