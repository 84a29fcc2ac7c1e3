"""AUC on a stream whose ids change: managed collision (ours, TorchRec's) against static hashing.

    python benchmarks/drifting_stream.py --plot docs/managed_collision_auc.svg      about a minute
    python benchmarks/drifting_stream.py --days 3                                   a first look

A click depends on a user and an item: logit = strength of the user + strength of the item, both
drawn from a normal distribution by the id. Users and items come by Zipf 1.05 from 40,000 ids each;
at the end of every day (50 batches of 2,048) 4,000 ids of each leave for ever and as many new ones
take their places in the ranking. A model has two tables of 20,000 rows of 8 (half of the ids that
are about at a time, whatever the contender), adds them up and puts a linear layer on top;
torch.optim.Adagrad, learning rate 0.1, for all. Every batch is scored before it is trained on; the
AUC of a day is over these scores.

    ours        ManagedCollisionModule, LFU or LRU; rows of evicted ids start anew
    MCH         TorchRec's MCHManagedCollisionModule, the same policy, eviction interval 10
    hashing     row = hash of the id mod 20,000
    best        the logit itself: no model can do better
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynamicemb.cli.machine import environment

ROWS, IDS, DIM = 20_000, 40_000, 8
BATCH, BATCHES, LEAVING = 2048, 50, 4000
KEYS = ("user", "item")


def mixed(ids: torch.Tensor, salt: int) -> torch.Tensor:
    """63 well mixed bits of every id."""
    ids = (ids + salt) * -7046029254386353131
    ids = (ids ^ (ids >> 29)) * -4658895280553007687
    return (ids ^ (ids >> 32)) & (2**63 - 1)


def strength(ids: torch.Tensor, salt: int) -> torch.Tensor:
    """A number from the standard normal distribution for every id."""
    uniform = (mixed(ids, salt).double() + 0.5) / 2.0**63
    return torch.special.ndtri(uniform).float()


class Stream:
    """Batches of (ids int64 [2, BATCH], clicks, logits)."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        weights = torch.arange(1, IDS + 1, dtype=torch.float64) ** -1.05
        self.cdf = weights.cumsum(0) / weights.sum()
        self.ids = torch.arange(2 * IDS).reshape(2, IDS)
        self.next = 2 * IDS

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        draw = torch.rand(2, BATCH, generator=self.generator, dtype=torch.float64)
        ranks = torch.searchsorted(self.cdf, draw).clamp_(max=IDS - 1)
        ids = self.ids.gather(1, ranks)
        logits = strength(ids[0], 11) + strength(ids[1], 12)
        clicks = torch.rand(BATCH, generator=self.generator) < torch.sigmoid(logits)
        return mixed(ids, 5), clicks.float(), logits

    def end_of_day(self) -> None:
        for feature in range(2):
            places = torch.randperm(IDS, generator=self.generator)[:LEAVING]
            self.ids[feature, places] = torch.arange(self.next, self.next + LEAVING)
            self.next += LEAVING


class Model(nn.Module):
    """Two tables of ROWS rows and a linear layer; ``module`` makes a table's collision module."""

    def __init__(self, module: Any) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
        from torchrec.modules.mc_modules import ManagedCollisionCollection

        super().__init__()
        torch.manual_seed(1)
        configs = [
            EmbeddingBagConfig(
                name=key, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key]
            )
            for key in KEYS
        ]
        self.hashed = module is None
        self.bags: Any = EmbeddingBagCollection(tables=configs)
        if module is not None:
            managed = ManagedCollisionCollection({key: module() for key in KEYS}, configs)
            self.bags = ManagedCollisionEmbeddingBagCollection(self.bags, managed)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from torchrec import KeyedJaggedTensor

        values = ids.flatten() % ROWS if self.hashed else ids.flatten()
        features = KeyedJaggedTensor(
            keys=list(KEYS), values=values, lengths=torch.ones(2 * BATCH, dtype=torch.int64)
        )
        pooled = self.bags(features)
        pooled = pooled if self.hashed else pooled[0]
        logits: torch.Tensor = self.top(pooled["user"] + pooled["item"]).squeeze(1)
        return logits


def contenders() -> dict[str, tuple[Model, torch.optim.Optimizer]]:
    from torchrec.modules.mc_modules import (
        LFU_EvictionPolicy,
        LRU_EvictionPolicy,
        MCHManagedCollisionModule,
    )

    from dynamicemb.managed_collision import ManagedCollisionModule, reset_evicted_rows

    cpu = torch.device("cpu")
    models = {"hashing": Model(None)}
    for name, policy in (("LFU", LFU_EvictionPolicy), ("LRU", LRU_EvictionPolicy)):
        models[f"ours, {name}"] = Model(
            lambda policy=policy: ManagedCollisionModule(ROWS, cpu, policy())
        )
        models[f"MCH, {name}"] = Model(
            lambda policy=policy: MCHManagedCollisionModule(ROWS, cpu, policy(), 10)
        )
    made = {}
    for name, model in models.items():
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        if name.startswith("ours"):
            reset_evicted_rows(model, optimizer)
        made[name] = (model, optimizer)
    return made


def auc(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    """The chance that a click scores above no click; ties count half."""
    values, places = torch.unique(scores, return_inverse=True)
    ones = torch.zeros(len(values), dtype=torch.float64).index_add_(0, places, clicks.double())
    zeros = torch.zeros_like(ones).index_add_(0, places, 1.0 - clicks.double())
    below = zeros.cumsum(0) - zeros
    return float((ones * (below + zeros / 2)).sum() / (ones.sum() * zeros.sum()))


def run(days: int) -> dict[str, list[float]]:
    models = contenders()
    stream = Stream()
    curves: dict[str, list[float]] = {name: [] for name in ("best", *models)}
    loss_of = nn.BCEWithLogitsLoss()
    for day in range(days):
        clicks: list[torch.Tensor] = []
        scores: dict[str, list[torch.Tensor]] = {name: [] for name in curves}
        for _ in range(BATCHES):
            ids, clicked, logits = stream.batch()
            clicks.append(clicked)
            scores["best"].append(logits)
            for name, (model, optimizer) in models.items():
                output = model(ids)
                scores[name].append(output.detach())
                optimizer.zero_grad()
                loss_of(output, clicked).backward()
                optimizer.step()
        stream.end_of_day()
        for name, parts in scores.items():
            curves[name].append(auc(torch.cat(parts), torch.cat(clicks)))
        line = ", ".join(f"{name} {curve[-1]:.4f}" for name, curve in curves.items())
        print(f"day {day + 1}: {line}", flush=True)
    return curves


COLORS = {
    "best": "#888888",
    "ours, LFU": "#c0392b",
    "ours, LRU": "#e59866",
    "MCH, LFU": "#1f618d",
    "MCH, LRU": "#7fb3d5",
    "hashing": "#229954",
}


def plot(curves: dict[str, list[float]]) -> str:
    """An SVG of the curves, AUC against days."""
    width, height, left, top, right, bottom = 720, 400, 60, 20, 140, 45
    low = min(min(curve) for curve in curves.values()) - 0.005
    high = max(max(curve) for curve in curves.values()) + 0.005
    days = len(next(iter(curves.values())))

    def x(day: float) -> float:
        return left + (width - left - right) * (day - 1) / max(1, days - 1)

    def y(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i in range(6):
        value = low + (high - low) * i / 5
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#dddddd"/><text x="{left - 8}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:.3f}</text>'
        )
    for day in range(1, days + 1, max(1, days // 10)):
        parts.append(
            f'<text x="{x(day):.1f}" y="{height - bottom + 18}" text-anchor="middle">{day}</text>'
        )
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">day</text>')
    parts.append(f'<text x="14" y="{top + 10}">AUC</text>')
    ends = sorted(curves, key=lambda name: -curves[name][-1])
    at = 0.0
    for name in ends:
        points = " ".join(f"{x(d):.1f},{y(v):.1f}" for d, v in enumerate(curves[name], 1))
        color = COLORS[name]
        at = max(at + 15, y(curves[name][-1]) + 4)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{width - right + 8}" y="{at:.1f}" fill="{color}">{name} '
            f"{curves[name][-1]:.3f}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=20)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    curves = run(arguments.days)
    if arguments.plot:
        arguments.plot.write_text(plot(curves))
    if arguments.json:
        report = {"environment": environment(), "auc_by_day": curves}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
