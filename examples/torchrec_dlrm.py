"""A DLRM on TorchRec with dynamic and static tables: plan, shard, train, evaluate, dump, load.

    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py
    python examples/torchrec_dlrm.py                       one process
    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py --pipeline --steps 500

The data is synthetic: users and items have ids anywhere in the 64-bit range, the day of the week is
0 to 6; a click is a coin whose odds come from hidden effects of the three. Users and items have
dynamic tables (items by frequency of use), the day has a static one of TorchRec's own. At the end
the model is dumped, loaded into a fresh one, and must predict the same.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingBagCollectionSharder

USERS, ITEMS, DAYS = 20_000, 2_000, 7
DIM = 16
DENSE = 4
SPREAD = 0x9E3779B97F4A7C15 - 2**64  # odd: number -> 64-bit id, one to one


@dataclass
class Batch(Pipelineable):
    """Examples of one rank."""

    dense: torch.Tensor
    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.dense, self.labels):
            tensor.record_stream(stream)  # type: ignore[arg-type]
        self.features.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.features.pin_memory(), self.labels.pin_memory())


class Clicks:
    """Batches that depend on (seed, rank, number) alone."""

    def __init__(self, batch_size: int, rank: int) -> None:
        self.batch_size, self.rank = batch_size, rank
        hidden = torch.Generator().manual_seed(0)
        self.user = torch.randn(USERS, generator=hidden)
        self.item = torch.randn(ITEMS, generator=hidden)
        self.day = torch.randn(DAYS, generator=hidden)

    def batch(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * self.rank + number)
        size = self.batch_size

        def draw(count: int, power: int) -> torch.Tensor:
            return (torch.rand(size, generator=generator).pow(power) * count).long()

        user, item, day = draw(USERS, 3), draw(ITEMS, 3), draw(DAYS, 1)
        dense = torch.randn(size, DENSE, generator=generator)
        odds = self.user[user] + self.item[item] + self.day[day] + 0.5 * dense[:, 0]
        labels = (torch.rand(size, generator=generator) < torch.sigmoid(odds)).float()
        features = KeyedJaggedTensor(
            keys=["user", "item", "day"],
            values=torch.cat([user * SPREAD, item * SPREAD, day]),
            lengths=torch.ones(3 * size, dtype=torch.int64),
        )
        return Batch(dense, features, labels)

    def stream(self, steps: int) -> Iterator[Batch]:
        return (self.batch(number) for number in range(steps))


class Dlrm(nn.Module):
    """Embeddings and dense features, their dot products, and a small network."""

    def __init__(self, tables: list[EmbeddingBagConfig], device: torch.device) -> None:
        super().__init__()
        # "meta": no memory for num_embeddings rows before the tables are sharded.
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        vectors = 1 + len(tables)
        self.bottom = nn.Sequential(nn.Linear(DENSE, DIM), nn.ReLU())
        pairs = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.linear = nn.Linear(len(tables) * DIM, 1)
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        for layer in (self.bottom, self.top, self.linear):
            layer.to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, logits)."""
        sparse = self.embeddings(batch.features).values()
        dense = self.bottom(batch.dense)
        vectors = torch.cat([dense, sparse], dim=1).unflatten(1, (-1, DIM))
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([dense, crossed], dim=1)) + self.linear(sparse)
        logits = logits.squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def tables() -> list[EmbeddingBagConfig]:
    """num_embeddings says how many rows a table may have; ids have no limit."""
    return [
        EmbeddingBagConfig(
            num_embeddings=1 << 16, embedding_dim=DIM, name="users", feature_names=["user"]
        ),
        EmbeddingBagConfig(
            num_embeddings=1 << 12, embedding_dim=DIM, name="goods", feature_names=["item"]
        ),
        EmbeddingBagConfig(
            num_embeddings=DAYS, embedding_dim=DIM, name="days", feature_names=["day"]
        ),
    ]


def sharded_model(device: torch.device, learning_rate: float) -> DistributedModelParallel:
    configs = tables()
    constraints = {
        "users": DynamicEmbParameterConstraints(
            use_dynamicemb=True,
            sharding_types=["row_wise"],
            dynamicemb_options=DynamicEmbTableOptions(init_capacity=1024),
        ),
        "goods": DynamicEmbParameterConstraints(
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.LFU),
        ),
        "days": DynamicEmbParameterConstraints(),  # static
    }
    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        compute_device=device.type,
    )
    planner = DynamicEmbeddingShardingPlanner(
        eb_configs=configs,
        topology=topology,
        constraints=constraints,
        enumerator=DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
        debug=True,
    )
    fused_params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": learning_rate,
    }
    sharders: list[Any] = [DynamicEmbeddingBagCollectionSharder(fused_params=fused_params)]
    torch.manual_seed(1)  # the same dense layers on every rank
    model = Dlrm(configs, device)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


@torch.no_grad()
def evaluate(model: DistributedModelParallel, clicks: Clicks, batches: int) -> tuple[float, float]:
    """(loss, AUC) over batches that no step has trained on, of all ranks."""
    model.eval()
    scores, labels, losses = [], [], []
    for number in range(batches):
        one = clicks.batch(10_000_000 + number).to(next(model.parameters()).device)
        loss, logits = model(one)
        losses.append(loss)
        scores.append(logits)
        labels.append(one.labels)
    model.train()
    found = torch.stack([torch.cat(scores), torch.cat(labels)])
    parts = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, found)
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    score, label = torch.cat(parts, dim=1)
    rank = torch.empty_like(score)
    rank[score.argsort()] = torch.arange(1, len(score) + 1, device=score.device).to(score.dtype)
    positives = label.sum()
    area = (rank[label == 1].sum() - positives * (positives + 1) / 2) / (
        positives * (len(label) - positives)
    )
    return mean.item() / dist.get_world_size(), area.item()


def start() -> torch.device:
    """The process group: torchrun's, or one process of its own."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=512, help="examples of a rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--pipeline", action="store_true", help="with TrainPipelineSparseDist")
    parser.add_argument("--path", type=Path, help="where to dump (a temporary folder)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = start()
    rank = dist.get_rank()
    logging.basicConfig(level=logging.ERROR, format="%(message)s", force=True)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    if rank == 0:  # the planner's summary
        logging.getLogger("dynamicemb").setLevel(logging.INFO)

    model = sharded_model(device, options.learning_rate)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.01),
    )
    # The rows of the tables are updated in backward; this one sets their learning rate.
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    clicks = Clicks(options.batch_size, rank)
    if rank == 0:
        print("before training: loss {:.4f}, AUC {:.4f}".format(*evaluate(model, clicks, 8)))
    else:
        evaluate(model, clicks, 8)
    stream = clicks.stream(options.steps)
    if options.pipeline:
        pipeline = TrainPipelineSparseDist(model, optimizer, device)
        for _ in range(options.steps):
            pipeline.progress(stream)
    else:
        for batch in stream:
            optimizer.zero_grad()
            loss, _ = model(batch.to(device))
            loss.backward()
            optimizer.step()
    if options.pipeline:
        pipeline.detach()
    loss_after, area = evaluate(model, clicks, 8)
    for module in model.module.embeddings.dynamic_modules():
        for table in module.tables:
            stats = table.stats()
            print(f"rank {rank}: {table.name} {stats.size} rows, {stats.bytes / 2**20:.1f} MiB")
    if rank == 0:
        print(f"after {options.steps} steps: loss {loss_after:.4f}, AUC {area:.4f}")

    # Rows by DynamicEmbDump; everything else is an ordinary state_dict.
    folder = [str(options.path or tempfile.mkdtemp(prefix="torchrec_dlrm_"))]
    dist.broadcast_object_list(folder, src=0)
    DynamicEmbDump(folder[0], model, optim=True)
    rest = model.state_dict()
    fresh = sharded_model(device, options.learning_rate)
    fresh.load_state_dict(rest)
    DynamicEmbLoad(folder[0], fresh, optim=True)
    again = evaluate(fresh, clicks, 8)
    if rank == 0:
        print(f"loaded from {folder[0]}: loss {again[0]:.4f}, AUC {again[1]:.4f}")
    if abs(again[0] - loss_after) > 1e-6:
        raise SystemExit(f"the loaded model has loss {again[0]}, the trained one {loss_after}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
