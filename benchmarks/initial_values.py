"""What rows should start from: the AUC of one small model for every initial distribution.

    python benchmarks/initial_values.py ml-100k/ml-100k.inter        about five minutes
    python benchmarks/initial_values.py ml-100k/ml-100k.inter --seeds 1 --json out.json

The file is MovieLens-100k as RecBole ships it: tab-separated, a line of column names, then user,
film, rating and time of 100,000 ratings. The label is a rating of 4 or more. The second task is
the click stream of ``dynamicemb train``, 2 days of 40,000 examples, of which the user and the item
are used. Both are in the order of time; the last fifth is held out, and ids that only it has read
zeros.

The model adds the product of the user's and the item's row to an MLP of both. Batches of 256 of the
first four fifths, in random order. A figure is the mean over the seeds, of the model, of the rows
and of the order; "spread" is the largest difference between two seeds in any line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dynamicemb import (
    DynamicEmbedding,
    DynamicEmbInitializerArgs,
    DynamicEmbTableOptions,
)
from dynamicemb.cli.machine import environment
from dynamicemb.cli.training.metrics import auc
from dynamicemb.cli.training.stream import ClickStream

DIM, BATCH, EPOCHS = 16, 256, 3
STDS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam, lr 0.003": lambda parameters: torch.optim.Adam(parameters, lr=0.003),
    "Adagrad, lr 0.05": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}

#: (the number of ids, a seed) -> an embedding.
Make = Callable[[int, int], nn.Module]


class Task(NamedTuple):
    """Examples in the order of time; users and items are numbered from 0."""

    users: torch.Tensor
    items: torch.Tensor
    labels: torch.Tensor


def movielens(path: Path) -> Task:
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    rows.sort(key=lambda row: float(row[3]))
    columns = [torch.tensor([float(row[place]) for row in rows]) for place in range(3)]
    return Task(_numbered(columns[0]), _numbered(columns[1]), (columns[2] >= 4).float())


def clicks() -> Task:
    stream = ClickStream(days=2, examples_per_day=40_000, new_ids=2_000, seed=1)
    users, items, labels = [], [], []
    for batch in stream.batches(0, 4_000):  # the first two features have one id each
        users.append(batch.ids[: batch.size])
        items.append(batch.ids[batch.size : 2 * batch.size])
        labels.append(batch.labels)
    return Task(_numbered(torch.cat(users)), _numbered(torch.cat(items)), torch.cat(labels))


def _numbered(ids: torch.Tensor) -> torch.Tensor:
    return torch.unique(ids, return_inverse=True)[1]


class Model(nn.Module):
    """The product of two rows, and an MLP of both."""

    def __init__(self, make: Make, task: Task, seed: int) -> None:
        super().__init__()
        self.users = make(int(task.users.max()) + 1, 2 * seed)
        self.items = make(int(task.items.max()) + 1, 2 * seed + 1)
        self.layers = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        user, item = self.users(users), self.items(items)
        together: torch.Tensor = self.layers(torch.cat([user, item], 1))
        return (user * item).sum(1) + together.squeeze(1)


def aucs(
    task: Task, make: Make, optimizer: Callable[[Any], torch.optim.Optimizer], seed: int
) -> list[float]:
    """Of the held-out examples, after each epoch."""
    torch.manual_seed(seed)
    model = Model(make, task, seed)
    step = optimizer(model.parameters())
    end = len(task.labels) * 4 // 5
    found = []
    for _ in range(EPOCHS):
        model.train()
        for places in torch.randperm(end).split(BATCH):
            step.zero_grad()
            logits = model(task.users[places], task.items[places])
            nn.functional.binary_cross_entropy_with_logits(logits, task.labels[places]).backward()
            step.step()
        model.eval()
        with torch.no_grad():
            logits = model(task.users[end:], task.items[end:])
        found.append(auc(task.labels[end:].numpy(), logits.numpy()))
    return found


def starts() -> dict[str, Make]:
    """How rows start, by the name of it."""

    def dynamic(**how: Any) -> Make:
        return lambda ids, seed: DynamicEmbedding(DIM, seed=seed, **how)

    def dense(std: float) -> Make:
        def make(ids: int, seed: int) -> nn.Module:
            embedding = nn.Embedding(ids, DIM)
            nn.init.normal_(embedding.weight, std=std)
            return embedding

        return make

    uniform = DynamicEmbTableOptions(
        init_capacity=1024, initializer_args=DynamicEmbInitializerArgs()
    )
    return {
        "`nn.Embedding`: N(0, 1)": dense(1.0),
        "`nn.Embedding`, N(0, 0.05)": dense(0.05),
        "U(0, 1), the options' own": dynamic(options=uniform),
        **{f"N(0, {std:g})": dynamic(init_std=std) for std in STDS},
        "U(-0.1, 0.1)": dynamic(init_range=0.1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="ml-100k.inter")
    parser.add_argument("--seeds", type=int, default=3, help="3")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {"MovieLens-100k": movielens(arguments.data), "click stream": clicks()}
    rows, spread = [], 0.0
    for start, make in starts().items():
        for name, task in tasks.items():
            for rule, optimizer in OPTIMIZERS.items():
                runs = [aucs(task, make, optimizer, seed) for seed in range(arguments.seeds)]
                by_epoch = list(zip(*runs, strict=True))
                means = [round(sum(one) / len(one), 4) for one in by_epoch]
                spread = max(spread, *(max(one) - min(one) for one in by_epoch))
                rows.append({"start": start, "task": name, "optimizer": rule, "auc": means})
                print(f"{start:28} {name:16} {rule:18} {means}", flush=True)
    print(f"largest difference between two seeds: {spread:.4f}")
    if arguments.json is not None:
        result = {
            "environment": environment(),
            "seeds": arguments.seeds,
            "spread": round(spread, 4),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
