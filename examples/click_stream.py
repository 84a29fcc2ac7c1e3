"""Train a click model on a stream of ids that nobody counted beforehand.

The stream is synthetic and seeded. Users and items have ids anywhere in the 64-bit range. Every day
new ones appear and the popularity of the old ones falls by a constant factor, until they are gone.
An example is a user, the item shown, and the items the user saw before it. Every id has hidden
effects, drawn once; a click is a coin whose odds are the sum of the effects.

Two models read the same examples in the same order, with the same dense layers, the same optimizer
(torch.optim.Adagrad) and the same bytes of embeddings, optimizer state and index:

dynamic   BatchedDynamicEmbeddingTables: an id gets a row of its own when it first comes. When a
          table is full, the least recently used row of a bucket makes room.
hashed    nn.EmbeddingBag with a fixed number of rows, and ids hashed to them. It needs no index, so
          the same bytes buy it some more rows.

Why the dynamic tables win here (the two reasons are not measured apart):

collisions  Over the days more ids come than there are rows. Ids that hash to the same row share
            one vector, and the effect of one is noise for the other.
stale ids   A hashed row remembers ids that are gone. A new id starts from what the last one left
            behind, and Adagrad's sum of squared gradients, which never falls, keeps it there. A new
            dynamic row starts fresh.

Where they do not: with rows for every id that ever comes there is little to win. With --days 8
--rows 4000000 the two AUCs differ by about 0.001 (the hashed tables then take 1.2 GB, the dynamic
ones what their rows need). The learning rate is the best for the hashed model of 0.02, 0.05, 0.1
and 0.2; the dynamic one does not care.

AUC is progressive: every example is predicted before the models are trained on it. "ceiling" is the
AUC of the true odds, which no model can beat but by luck.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
)

FEATURES = ("user", "item", "seen")
TABLES = ("users", "items")
FEATURE_TABLE = (0, 1, 1)  # the items shown and the items seen before share a table
INITIAL_STD = 0.01

# Said aloud, for torch warns otherwise when a sparse gradient is made.
torch.sparse.check_sparse_tensor_invariants.disable()


# ---- the stream ----


@dataclass
class Batch:
    """Examples as feature-major bags: ``offsets`` has len(FEATURES) * size + 1 entries."""

    ids: torch.Tensor
    offsets: torch.Tensor
    labels: torch.Tensor
    odds: np.ndarray  # the true log odds of a click

    @property
    def size(self) -> int:
        return len(self.labels)


class Population:
    """Ids that are born, fade and go. ``effects`` are what a model has to find out."""

    def __init__(self, rng: np.random.Generator, *, births: int, fade: float, effects: int) -> None:
        self._rng, self._births, self._fade, self._effects = rng, births, fade, effects
        self.ids = np.empty(0, dtype=np.int64)
        self.effects = np.empty((0, effects), dtype=np.float32)
        self._weights = np.empty(0)
        for _ in range(int(np.ceil(np.log(0.01) / np.log(fade)))):  # the days before the first
            self.next_day()

    def next_day(self) -> None:
        """Everybody fades, who is below 1 % of the start is gone, and new ids come."""
        weights = self._weights * self._fade
        born = 1.0 / np.arange(1, self._births + 1)  # Zipf
        born_ids = self._rng.integers(-(2**63), 2**63 - 1, self._births, endpoint=True)
        born_effects = self._rng.normal(size=(self._births, self._effects)).astype(np.float32)
        stay = slice(self._births, None) if self._gone() else slice(None)
        self._weights = np.concatenate([weights[stay], born])
        self.ids = np.concatenate([self.ids[stay], born_ids])
        self.effects = np.concatenate([self.effects[stay], born_effects])
        self._cumulative = np.cumsum(self._weights) / self._weights.sum()

    def _gone(self) -> bool:
        """Whether the oldest day's ids go today."""
        return len(self._weights) > 0 and self._weights[0] * self._fade < 0.01

    def draw(self, count: int) -> np.ndarray:
        """Places of ``count`` ids, by popularity."""
        places = np.searchsorted(self._cumulative, self._rng.random(count), side="right")
        return np.minimum(places, len(self.ids) - 1)


class ClickStream:
    """The examples, day after day."""

    def __init__(self, *, births: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._users = Population(self._rng, births=births // 2, fade=0.7, effects=1)
        self._items = Population(self._rng, births=births, fade=0.5, effects=2)

    def day(self, examples: int, batch_size: int) -> Iterator[Batch]:
        """The examples of the next day in batches."""
        for begin in range(0, examples, batch_size):
            yield self._batch(min(batch_size, examples - begin))
        self._users.next_day()
        self._items.next_day()

    def _batch(self, size: int) -> Batch:
        users, items = self._users, self._items
        user, item = users.draw(size), items.draw(size)
        lengths = self._rng.integers(1, 6, size)
        seen = items.draw(int(lengths.sum()))
        bag = np.repeat(np.arange(size), lengths)
        seen_effect = np.bincount(bag, items.effects[seen, 1], minlength=size) / lengths
        odds = -0.5 + users.effects[user, 0] + items.effects[item, 0] + seen_effect
        labels = self._rng.random(size) < 1.0 / (1.0 + np.exp(-odds))
        all_lengths = np.concatenate([np.ones(2 * size, dtype=np.int64), lengths])
        offsets = np.concatenate([[0], np.cumsum(all_lengths)])
        ids = np.concatenate([users.ids[user], items.ids[item], items.ids[seen]])
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(offsets),
            torch.from_numpy(labels.astype(np.float32)),
            odds,
        )


# ---- the models ----


class ClickModel(nn.Module):
    """Pooled rows of the features, then two dense layers; logits out."""

    def __init__(self, embeddings: nn.Module, dim: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = nn.Sequential(nn.Linear(len(FEATURES) * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embeddings(ids, offsets)).squeeze(1)


class HashedEmbeddings(nn.Module):
    """A fixed number of rows per table; ids are hashed to them."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="mean", sparse=True, include_last_offset=True)
            for _ in TABLES
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=INITIAL_STD)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        mixed = ids * -7046029254386353131  # odd: a bijection of the 64-bit integers
        rows = (mixed ^ (mixed >> 32)) % self.rows
        size = (len(offsets) - 1) // len(FEATURES)
        pooled = []
        for feature, table in enumerate(FEATURE_TABLE):
            bags = offsets[feature * size : (feature + 1) * size + 1]
            pooled.append(self.tables[table](rows[bags[0] : bags[-1]], bags - bags[0]))
        return torch.cat(pooled, dim=1)


def dynamic_embeddings(args: argparse.Namespace) -> BatchedDynamicEmbeddingTables:
    admission = {}
    if args.admit_after > 1:
        admission = {
            "admit_strategy": FrequencyAdmissionStrategy(threshold=args.admit_after),
            "admission_counter": KVCounter(capacity=4 * args.rows),
        }
    options = DynamicEmbTableOptions(
        dim=args.dim,
        init_capacity=min(1024, args.rows),
        max_capacity=args.rows,
        score_strategy=DynamicEmbScoreStrategy.STEP,  # least recently used, by number of batch
        initializer_args=DynamicEmbInitializerArgs(
            mode=DynamicEmbInitializerMode.NORMAL, std_dev=INITIAL_STD
        ),
        **admission,
    )
    return BatchedDynamicEmbeddingTables(
        [options] * len(TABLES),
        table_names=list(TABLES),
        feature_table_map=FEATURE_TABLE,
        pooling_mode=DynamicEmbPoolingMode.MEAN,
        separate_step=True,  # torch.optim updates the rows, as it does the dense layers
        seed=args.seed,
    )


def hashed_rows(args: argparse.Namespace) -> int:
    """Rows of a hashed table with as many bytes as a full dynamic one.

    Both keep a row and Adagrad's sums in float32; a dynamic slot has 25 bytes of index beside it
    (digest, id, score) and, with admission, counters (25 bytes each, four per row).
    """
    row = 2 * 4 * args.dim
    index = 25 + (4 * 25 if args.admit_after > 1 else 0)
    return args.rows * (-(-row // 16) * 16 + index) // row


class Trainer:
    """A model, its optimizer, and what it did today."""

    def __init__(self, embeddings: nn.Module, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)  # equal dense layers
        self.model = ClickModel(embeddings, args.dim)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=args.learning_rate)
        self.start_day()

    def start_day(self) -> None:
        self.seconds = 0.0
        self.loss_sum = 0.0
        self.predictions: list[np.ndarray] = []

    def train(self, batch: Batch) -> None:
        begin = time.perf_counter()
        logits = self.model(batch.ids, batch.offsets)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds += time.perf_counter() - begin
        self.loss_sum += loss.item() * batch.size
        self.predictions.append(logits.detach().numpy())


# ---- the report ----


def auc(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The share of (click, no click) pairs in the right order, ties counting half: exactly, from
    the ranks of the clicks."""
    _, inverse, counts = np.unique(predictions, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    rank = (last_rank - (counts - 1) / 2)[inverse]  # ties share the mean of their ranks
    clicks = labels > 0.5
    positive = int(clicks.sum())
    negative = len(labels) - positive
    if positive == 0 or negative == 0:
        return float("nan")
    return float((rank[clicks].sum() - positive * (positive + 1) / 2) / (positive * negative))


def print_tables(embeddings: BatchedDynamicEmbeddingTables) -> None:
    """One line per table, about the day that ends; the counts start again."""
    for table in embeddings.tables:
        stats = table.stats()
        hit_rate = stats.hits / max(1, stats.hits + stats.misses)
        line = (
            f"         {table.name}: {stats.size:,} rows of {stats.capacity:,} "
            f"(load {stats.load_factor:.2f}), hit rate {hit_rate:.3f}, "
            f"{stats.inserts:,} new, {stats.evictions:,} evicted"
        )
        if stats.rejections:
            line += f", {stats.rejections:,} not admitted"
        print(line)
        table.reset_stats()


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    stream = ClickStream(births=args.new_ids, seed=args.seed)
    rows = hashed_rows(args)
    tables = dynamic_embeddings(args)
    trainers = {
        "dynamic": Trainer(tables, args),
        "hashed": Trainer(HashedEmbeddings(rows, args.dim), args),
    }
    print(
        f"{args.days} days of {args.examples_per_day:,} examples, {args.new_ids:,} new items and "
        f"{args.new_ids // 2:,} new users a day, seed {args.seed}, {args.threads} threads"
    )
    print(
        f"dynamic: {args.rows:,} rows per table at most, dim {args.dim}; "
        f"hashed: {rows:,} rows per table, the same bytes"
    )
    ever = 0
    history: dict[str, list[float]] = {name: [] for name in (*trainers, "ceiling")}
    for day in range(1, args.days + 1):
        for trainer in trainers.values():
            trainer.start_day()
        labels, odds = [], []
        for batch in stream.day(args.examples_per_day, args.batch_size):
            for trainer in trainers.values():
                trainer.train(batch)
            labels.append(batch.labels.numpy())
            odds.append(batch.odds)
        day_labels = np.concatenate(labels)
        history["ceiling"].append(auc(day_labels, np.concatenate(odds)))
        for name, trainer in trainers.items():
            history[name].append(auc(day_labels, np.concatenate(trainer.predictions)))
            prefix = f"day {day:3}:" if name == "dynamic" else " " * 8
            print(
                f"{prefix} {name:8} loss {trainer.loss_sum / args.examples_per_day:.4f}, "
                f"AUC {history[name][-1]:.4f}, "
                f"{args.examples_per_day / trainer.seconds:,.0f} examples/s"
            )
        ever += sum(table.stats().inserts for table in tables.tables)
        print_tables(tables)
    report(args, tables, rows, history, ever)


def report(
    args: argparse.Namespace,
    tables: BatchedDynamicEmbeddingTables,
    rows: int,
    history: dict[str, list[float]],
    ever: int,
) -> None:
    second_half = slice(args.days // 2, None)
    mean = {name: float(np.mean(values[second_half])) for name, values in history.items()}
    dynamic_bytes = sum(table.stats().bytes for table in tables.tables)
    hashed_bytes = len(TABLES) * rows * 2 * 4 * args.dim
    print(
        f"bytes: dynamic {dynamic_bytes:,} (index, rows, optimizer state), hashed {hashed_bytes:,} "
        f"(rows, optimizer state); {ever:,} rows were made in {len(TABLES)} x {args.rows:,} slots"
    )
    won = mean["dynamic"] - mean["hashed"]
    to_win = mean["ceiling"] - mean["hashed"]
    print(
        f"progressive AUC, mean of days {args.days // 2 + 1} to {args.days}: dynamic "
        f"{mean['dynamic']:.4f}, hashed {mean['hashed']:.4f}, ceiling {mean['ceiling']:.4f}"
    )
    print(
        f"the dynamic tables {'won' if won >= 0 else 'lost'} {abs(won):.4f} AUC in no more memory: "
        f"{100 * abs(won) / to_win:.0f} % of what the hashed table leaves below the ceiling"
    )


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a click model on a synthetic stream, with dynamic and hashed tables."
    )

    def positive(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{value}; allowed: at least 1")
        return value

    add = parser.add_argument
    add("--days", type=positive, default=20)
    add("--examples-per-day", type=positive, default=400_000)
    add("--batch-size", type=positive, default=2048)
    add("--new-ids", type=positive, default=40_000, help="items born per day; half as many users")
    add("--rows", type=positive, default=65_536, help="rows per dynamic table at most")
    add("--dim", type=positive, default=16, help="columns of a row")
    add("--learning-rate", type=float, default=0.1)
    add(
        "--admit-after",
        type=positive,
        default=1,
        help="occurrences before an id gets a row; 1 admits at once",
    )
    add(
        "--threads",
        type=positive,
        default=1,
        help="threads of torch and of the tables; the batches are too small to gain much from more",
    )
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # a line per day, also into a pipe
    run(parse_args())
