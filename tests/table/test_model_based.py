"""Random operations on a table and on the pure-Python reference: no difference, ever.

Tables are tiny, so that growth, eviction and failure happen all the time. The state machine finds
short failing sequences and shrinks them; the seeded runs reach the number of operations. After
every operation the whole content, slots, scores and counters are compared (`twin.Twin`).
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from reference import ONE_BUCKET, STRATEGIES, U64, Score
from tables import EXTREME_IDS
from twin import OPTIMIZERS, SIZES, RandomOperations, Twin, random_lives, width_name

OPERATIONS = 100_000


@pytest.mark.parametrize("width", SIZES, ids=width_name)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_operations_agree_with_the_reference(strategy: str, width: int) -> None:
    random_lives(strategy, width, OPERATIONS // (len(STRATEGIES) * len(SIZES)) + 1, seed=1)


@pytest.mark.parametrize(
    ("width", "init_capacity", "max_capacity", "ids"),
    [
        (16, 16, 1 << 15, 30_000),  # many doublings
        (16, 1024, 100_000, 60_000),  # the last step is no doubling: buckets are cut anew
        (128, 128, 17 * 128, 6_000),
        (128, None, 8192, 30_000),
        (2048, 2048, 3 * 2048, 9_000),  # wide buckets, and more than one of them
        (ONE_BUCKET, None, 3000, 6_000),
    ],
)
@pytest.mark.parametrize("strategy", ["TIMESTAMP", "LFU", "NO_EVICTION"])
def test_large_batches_agree_with_the_reference(
    strategy: str, width: int, init_capacity: int | None, max_capacity: int, ids: int
) -> None:
    """Batches that are split over threads: slots and evictions are still the serial ones."""
    torch.set_num_threads(2)
    twin = Twin(
        strategy,
        max_capacity=max_capacity,
        init_capacity=init_capacity,
        bucket_capacity=width,
        max_load_factor=0.8,
    )
    rng = Random(ids)
    spread = [rng.randrange(-(2**63), 2**63) for _ in range(ids)]
    for size in (100, ids // 8, ids // 2, ids // 2):
        twin.clock.time += 1
        twin.train([spread[int(len(spread) * rng.random() ** 2)] for _ in range(size)])


def test_wide_buckets_agree_with_the_reference() -> None:
    """Buckets too wide to scan have an index of their own."""
    rng = Random(4)
    for width, max_capacity in ((1040, 1040), (1040, 3120), (ONE_BUCKET, 1500), (2048, 4096)):
        for strategy in ("LFU", "TIMESTAMP", "NO_EVICTION"):
            twin = Twin(
                strategy, max_capacity=max_capacity, init_capacity=None, bucket_capacity=width
            )
            operations = RandomOperations(twin, rng.randrange(2**32))
            for _ in range(3):
                twin.train([rng.choice(operations.pool) for _ in range(max_capacity)])
                operations.run(15)


small_ids = st.one_of(
    st.integers(0, 40),
    st.sampled_from(EXTREME_IDS),
    st.integers(-(2**63), 2**63 - 1),
)
batches = st.lists(small_ids, max_size=24)


class TableMachine(RuleBasedStateMachine):
    """Every rule is one operation on the table and the reference, followed by the comparison."""

    twin: Twin

    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        width=st.sampled_from([16, 16, 32, ONE_BUCKET]),
        size=st.integers(0, 9),
        max_load_factor=st.sampled_from([0.5, 0.0, 0.75, 1.0]),
        admission=st.sampled_from([None, "picky", "frequency"]),
        optimizer=st.sampled_from([None, *OPTIMIZERS]),
    )
    def start(self, strategy: str, width: int, size: int, **options: Any) -> None:
        init_capacity, max_capacity = SIZES[width][size % len(SIZES[width])]
        self.twin = Twin(
            strategy,
            max_capacity=max_capacity,
            init_capacity=init_capacity,
            bucket_capacity=width,
            **options,
        )

    @rule(ids=batches)
    def train(self, ids: list[int]) -> None:
        self.twin.train(ids)

    @rule(counted=st.lists(st.tuples(small_ids, st.integers(1, 5)), max_size=12))
    def train_with_counts(self, counted: list[tuple[int, int]]) -> None:
        self.twin.train([i for i, _ in counted], [n for _, n in counted])

    @rule(start=st.integers(-(2**63), 2**63 - 65), count=st.integers(20, 64))
    def train_many(self, start: int, count: int) -> None:
        self.twin.train(range(start, start + count))

    @rule(ids=batches)
    def find(self, ids: list[int]) -> None:
        self.twin.find(ids)

    @rule(given=st.lists(st.tuples(small_ids, st.integers(0, 99)), max_size=24), data=st.data())
    def insert(self, given: list[tuple[int, int]], data: st.DataObject) -> None:
        ids, values = [i for i, _ in given], [float(v) for _, v in given]
        self.twin.insert(ids, values, data.draw(self._scores(len(ids))))

    @rule(given=st.lists(st.tuples(small_ids, st.integers(0, 99)), max_size=12), data=st.data())
    def assign(self, given: list[tuple[int, int]], data: st.DataObject) -> None:
        ids, values = [i for i, _ in given], [float(v) for _, v in given]
        self.twin.assign(ids, values, data.draw(self._scores(len(ids))))

    @rule(ids=batches)
    def erase(self, ids: list[int]) -> None:
        self.twin.erase(ids)

    @rule()
    def clear(self) -> None:
        self.twin.clear()

    @rule(threshold=st.sampled_from([0, 1, 2, 2**63, U64]), batch_size=st.integers(1, 40))
    def export(self, threshold: int, batch_size: int) -> None:
        self.twin.export(threshold, batch_size)

    @rule(ticks=st.integers(0, 3))
    def tick(self, ticks: int) -> None:
        self.twin.clock.time += ticks

    @precondition(lambda self: self.twin.strategy == "CUSTOMIZED")
    @rule(by=st.integers(0, 3))
    def set_score(self, by: int) -> None:
        self.twin.set_score((self.twin.reference.custom_score or 1) + by)

    def _scores(self, count: int) -> st.SearchStrategy[list[Score] | None]:
        top = 2**62 if "LFU" in self.twin.strategy else U64
        word = st.one_of(st.integers(0, 4), st.integers(0, top))
        score = st.tuples(word, word) if self.twin.is_pair else st.tuples(word)
        return st.one_of(st.none(), st.lists(score, min_size=count, max_size=count))


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(
    settings.get_profile("tests"), max_examples=150, stateful_step_count=40
)
