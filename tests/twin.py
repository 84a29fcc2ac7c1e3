"""The engine's table and the reference side by side: every operation on both, then all compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from dynamicemb.admission import AdmissionStrategy, FrequencyAdmissionStrategy, KVCounter
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from dynamicemb.table import Rows, create_table
from reference import INITIALISED, ONE_BUCKET, REJECTED, U64, Entry, ReferenceTable, Score
from tables import (
    EXTREME_IDS,
    Clock,
    contents,
    debug_value,
    make_options,
    score_list,
    score_tensor,
    tensor,
)

DIM = 3
REJECTED_VALUE = -7.0
MISSING_VALUE = 0.5
OPTIMIZERS = ("ADAGRAD", "ROWWISE_ADAGRAD", "FTRL")  # states of 3, 1 and 6 beside rows of 3
COUNTED = ("hits", "misses", "inserts", "evictions", "failures", "rejections")

# Rows that a table of each bucket width starts with and may have.
SIZES = {
    16: [(16, 16), (16, 64), (32, 64), (16, 80), (None, 48)],
    32: [(32, 32), (32, 128), (1, 96)],
    128: [(128, 128), (128, 256)],
    ONE_BUCKET: [(None, 16), (None, 30), (None, 100)],
}
LIFE = 350  # operations on one table before it is made anew

_REJECTED_ARGS = DynamicEmbInitializerArgs(
    mode=DynamicEmbInitializerMode.CONSTANT, value=REJECTED_VALUE
)


class PickyAdmission(AdmissionStrategy):
    """Admits by the id and the count of the batch: no state, so the twin can do the same."""

    initializer_args = _REJECTED_ARGS

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return torch.tensor(picky(keys.tolist(), frequencies.tolist()), dtype=torch.bool)


def picky(ids: list[int], counts: list[int]) -> list[bool]:
    return [i % 3 != 0 or n > 1 for i, n in zip(ids, counts, strict=True)]


class CountingAdmission:
    """What FrequencyAdmissionStrategy with a counter that forgets nothing does."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.counts: Counter[int] = Counter()

    def __call__(self, ids: list[int], counts: list[int]) -> list[bool]:
        for id_, n in zip(ids, counts, strict=True):
            self.counts[id_] += n
        return [self.counts[i] >= self.threshold for i in ids]


class Twin:
    """A table and its reference. Each method runs one operation on both and compares everything.

    `admission`: None, "picky" or "frequency". `optimizer`: an OptimizerKind by name, so that rows
    have a state, or None.
    """

    def __init__(
        self,
        strategy: str,
        *,
        max_capacity: int,
        init_capacity: int | None,
        bucket_capacity: int,
        max_load_factor: float = 0.5,
        admission: str | None = None,
        optimizer: str | None = None,
    ) -> None:
        self.strategy = strategy
        self.clock = Clock()
        self.operations = 0
        sizes: dict[str, Any] = {
            "max_capacity": max_capacity,
            "init_capacity": init_capacity,
            "bucket_capacity": bucket_capacity,
            "max_load_factor": max_load_factor,
        }
        admitting: dict[str, Any] = {}
        admit = None
        if admission == "picky":
            admitting, admit = {"admit_strategy": PickyAdmission()}, picky
        elif admission == "frequency":
            admitting = {
                "admit_strategy": FrequencyAdmissionStrategy(3, _REJECTED_ARGS),
                "admission_counter": KVCounter(1 << 16),
            }
            admit = CountingAdmission(3)
        updates = None
        if optimizer is not None:
            arguments = OptimizerArgs(initial_accumulator_value=0.25)
            updates = Optimizer(OptimizerKind[optimizer], arguments)
        self.reference = ReferenceTable(strategy=strategy, clock=self.clock, admit=admit, **sizes)
        self.table = create_table(
            make_options(
                strategy,
                dim=DIM,
                eval_initializer_args=DynamicEmbInitializerArgs(
                    mode=DynamicEmbInitializerMode.CONSTANT, value=MISSING_VALUE
                ),
                **sizes,
                **admitting,
            ),
            optimizer=updates,
            clock=self.clock,
        )
        self.initial_state = [] if updates is None else updates.initial_state(DIM).tolist()
        assert self.table.state_dim == len(self.initial_state)
        if strategy == "CUSTOMIZED":
            self.set_score(1)
        self.check()

    # --- the operations --------------------------------------------------------------------------

    def train(self, ids: Sequence[int], counts: Sequence[int] | None = None) -> None:
        given = None if counts is None else tensor(counts)
        out = self.table.find_or_insert(tensor(ids), counts=given, return_evicted=True)
        slots, evicted = self.reference.find_or_insert(ids, counts)
        assert out.slots.tolist() == slots
        expected = [
            self._row(self.reference.entry(i))[:DIM]
            if slot >= 0
            else [REJECTED_VALUE if slot == REJECTED else 0.0] * DIM
            for i, slot in zip(ids, slots, strict=True)
        ]
        assert out.embeddings.tolist() == expected
        self._compare(out.evicted, evicted)
        self.check()

    def find(self, ids: Sequence[int]) -> None:
        out = self.table.find(tensor(ids))
        entries = self.reference.find(ids)
        assert out.found.tolist() == [e is not None for e in entries]
        assert out.embeddings.tolist() == [
            [MISSING_VALUE] * DIM if e is None else self._row(e)[:DIM] for e in entries
        ]
        found = [e for e in entries if e is not None]
        assert score_list(out.scores[out.found]) == [e.score for e in found]
        assert out.state[out.found].tolist() == [self._row(e)[DIM:] for e in found]
        assert self.table.contains(tensor(ids)).tolist() == self.reference.contains(ids)
        self.check()

    def insert(
        self, ids: Sequence[int], values: Sequence[float], scores: Sequence[Score] | None = None
    ) -> None:
        rows = [self._given(v) for v in values]
        out = self.table.insert(tensor(ids), return_evicted=True, **self._data(rows, scores))
        written, evicted = self.reference.insert(ids, rows, scores)
        assert out.written.tolist() == written
        self._compare(out.evicted, evicted)
        self.check()

    def assign(
        self, ids: Sequence[int], values: Sequence[float], scores: Sequence[Score] | None = None
    ) -> None:
        rows = [self._given(v) for v in values]
        out = self.table.assign(tensor(ids), **self._data(rows, scores))
        assert out.tolist() == self.reference.assign(ids, rows, scores)
        self.check()

    def erase(self, ids: Sequence[int]) -> None:
        assert self.table.erase(tensor(ids)).tolist() == self.reference.erase(ids)
        self.check()

    def clear(self) -> None:
        self.table.clear()
        self.reference.clear()
        self.check()

    def export(self, threshold: int, batch_size: int) -> None:
        batches = list(self.table.export(batch_size=batch_size, score_threshold=threshold))
        assert all(0 < len(b.ids) <= batch_size for b in batches)
        expected = list(self.reference.export(threshold))
        assert sum(len(b.ids) for b in batches) == len(expected)
        if expected:
            self._compare(contents(self.table, score_threshold=threshold), expected)
        self.check()

    def set_score(self, score: int) -> None:
        self.table.set_score(score)
        self.reference.custom_score = score

    # --- comparing -------------------------------------------------------------------------------

    def check(self) -> None:
        """Ids in slot order, rows, scores, sizes and counters are those of the reference."""
        self.operations += 1
        table, reference = self.table, self.reference
        self._compare(contents(table), list(reference.export()))
        assert table.capacity == reference.capacity
        assert table.size() == len(table) == len(reference)
        stats = table.stats()
        assert {k: getattr(stats, k) for k in COUNTED} == {k: reference.stats[k] for k in COUNTED}
        assert (stats.size, stats.capacity) == (len(reference), reference.capacity)

    def _compare(self, rows: Rows, entries: list[Entry]) -> None:
        assert rows.ids.tolist() == [e.id for e in entries]
        assert score_list(rows.scores) == [e.score for e in entries]
        expected = [self._row(e) for e in entries]
        assert rows.embeddings.tolist() == [row[:DIM] for row in expected]
        if self.initial_state:
            assert rows.state.tolist() == [row[DIM:] for row in expected]

    def _row(self, entry: Entry) -> list[float]:
        """Embedding and state of an entry as one list."""
        if entry.row is INITIALISED:
            return [debug_value(entry.id)] * DIM + self.initial_state
        assert isinstance(entry.row, list)
        return entry.row

    def _given(self, value: float) -> list[float]:
        """A row to insert whose elements all differ."""
        return [value + column / 8 for column in range(self._width)]

    def _data(
        self, rows: list[list[float]], scores: Sequence[Score] | None
    ) -> dict[str, torch.Tensor]:
        """The arguments for rows and scores of `insert` and `assign`."""
        both = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), self._width)
        data = {"embeddings": both[:, :DIM].contiguous()}
        if self.initial_state:
            data["state"] = both[:, DIM:].contiguous()
        if scores is not None:
            data["scores"] = score_tensor(scores, words=2 if self.is_pair else 1)
        return data

    @property
    def _width(self) -> int:
        return DIM + len(self.initial_state)

    @property
    def is_pair(self) -> bool:
        return self.strategy == "TIMESTAMP_LFU"


class RandomOperations:
    """Random operations on a twin, a pure function of the seed."""

    def __init__(self, twin: Twin, seed: int) -> None:
        self.twin = twin
        self.random = Random(seed)
        rng = self.random
        pool = int(1.5 * twin.reference.max_buckets * twin.reference.bucket_capacity) + 8
        self.pool = [*EXTREME_IDS, *range(2, pool // 2)]
        self.pool += [rng.randrange(-(2**63), 2**63) for _ in range(pool - len(self.pool))]

    def ids(self) -> list[int]:
        rng = self.random
        if rng.random() < 0.02:
            return []
        most = 40 if rng.random() < 0.1 else 8
        ids = [rng.choice(self.pool) for _ in range(rng.randint(1, most))]
        if rng.random() < 0.05:
            ids.append(rng.randrange(-(2**63), 2**63))
        return ids

    def scores(self, count: int) -> list[Score] | None:
        rng = self.random
        if rng.random() < 0.3:
            return None
        # Counts stay below 2^63, so that training can add to them.
        most = 2**62 if "LFU" in self.twin.strategy else U64
        words = 2 if self.twin.is_pair else 1
        top = rng.choice((1, 5, most))
        return [tuple(rng.randint(0, top) for _ in range(words)) for _ in range(count)]

    def run(self, operations: int) -> None:
        twin, rng = self.twin, self.random
        end = twin.operations + operations
        while twin.operations < end:
            twin.clock.time += rng.choice((0, 0, 1, 3))
            choice = rng.random()
            ids = self.ids()
            if choice < 0.55:
                counts = [rng.randint(1, 4) for _ in ids] if rng.random() < 0.25 else None
                twin.train(ids, counts)
            elif choice < 0.65:
                twin.find(ids)
            elif choice < 0.78:
                values = [float(rng.randrange(1000)) for _ in ids]
                twin.insert(ids, values, self.scores(len(ids)))
            elif choice < 0.85:
                values = [float(rng.randrange(1000)) for _ in ids]
                twin.assign(ids, values, self.scores(len(ids)))
            elif choice < 0.94:
                twin.erase(ids)
            elif choice < 0.98:
                twin.export(rng.choice((0, 1, 3, 2**63, U64)), rng.randint(1, 40))
            elif choice < 0.985:
                twin.clear()
            elif twin.strategy == "CUSTOMIZED":
                twin.set_score((twin.reference.custom_score or 1) + rng.choice((1, 2)))
            elif twin.strategy == "TIMESTAMP" and rng.random() < 0.02:
                twin.clock.time = 2**63 - 2  # the next readings cross the sign bit


def width_name(width: int) -> str:
    return "one" if width == ONE_BUCKET else str(width)


def random_lives(strategy: str, width: int, operations: int, seed: int) -> None:
    """`operations` operations in all, on a fresh table of another shape every LIFE of them."""
    done = 0
    rng = Random(seed)
    while done < operations:
        init_capacity, max_capacity = rng.choice(SIZES[width])
        twin = Twin(
            strategy,
            max_capacity=max_capacity,
            init_capacity=init_capacity,
            bucket_capacity=width,
            max_load_factor=rng.choice((0.5, 0.5, 0.75, 0.9, 1.0, 0.0)),
            admission=rng.choice((None, None, None, "picky", "frequency")),
            optimizer=rng.choice((None, None, *OPTIMIZERS)),
        )
        RandomOperations(twin, rng.randrange(2**32)).run(min(LIFE, operations - done))
        done += twin.operations
