"""A TorchRec model on small static tables, with the rows of all other ids in a parameter server.

    python examples/parameter_server.py                                  in one process, in memory
    python examples/parameter_server.py --url "redis://127.0.0.1:6379/?prefix=example"
    torchrun --nproc-per-node 2 examples/parameter_server.py --url "redis://127.0.0.1:6379/"

Trains on a stream of 64-bit ids of which a tenth fits the table, saves, and goes on in a model that
starts from nothing but the server.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

import torchrec_dynamic_embedding as tde

IDS, DIM = 20_000, 16


class Model(nn.Module):
    """Bags of ids to one number."""

    def __init__(self, configs: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.emb = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.emb(features).values().sum(1)


def spread(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0 .. IDS - 1 as ids over all 64 bits."""
    return numbers * -7046029254386353131


def batches(steps: int, size: int, seed: int) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor]]:
    """(what the model should answer, bags of two ids). An id is worth 1 or -1, by its last bit."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        numbers = (torch.rand(size * 2, generator=generator) ** 2 * IDS).long()
        worth = 1.0 - 2.0 * (numbers % 2)
        features = KeyedJaggedTensor(
            keys=["product"], values=spread(numbers), lengths=torch.full((size,), 2)
        )
        yield worth.view(size, 2).sum(1), features


def build(url: str, data: Any, num_prefetch: int) -> tuple[Any, Any]:
    configs = [
        EmbeddingBagConfig(
            name="products", embedding_dim=DIM, num_embeddings=IDS // 10, feature_names=["product"]
        )
    ]
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    model = DistributedModelParallel(
        Model(configs),
        device=torch.device("cpu"),
        sharders=[EmbeddingBagCollectionSharder(fused)],
    )
    return model, tde.wrap(url, data, model, {"emb": configs}, num_prefetch=num_prefetch)


def train(model: Any, loader: Any, name: str) -> None:
    losses = []
    for target, features in loader:
        loss = ((model(features) - target) ** 2).mean()
        loss.backward()  # TorchRec's optimizer updates the rows
        losses.append(loss.item())
    if dist.get_rank() == 0:
        tenth = max(1, len(losses) // 10)
        first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
        print(f"{name}: loss {first:.3f} in the first tenth, {last:.3f} in the last")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="memory://example", help="of the parameter server")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--num-prefetch", type=int, default=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # TorchRec's planner says much
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    steps, size, rank = arguments.steps, arguments.batch_size, dist.get_rank()
    data = list(batches(steps, size, seed=rank))
    model, loader = build(arguments.url, data, arguments.num_prefetch)
    train(model, loader, f"{IDS // 10:,} rows for {IDS:,} ids")
    tde.save(model)
    dist.barrier()
    again = list(batches(max(1, steps // 10), size, seed=1000 + rank))
    model, loader = build(arguments.url, again, arguments.num_prefetch)
    train(model, loader, "a new model over the same server")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
