"""The score that a training batch of a table writes, of whatever strategy."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence

from dynamicemb.errors import UsageError, check_integer, wrong_type
from dynamicemb.options import (
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    warning_for_cstm_score,
)

_clock_lock = threading.Lock()
_last_reading = 0


def timestamp_clock() -> int:
    """Nanoseconds since the epoch, never the same and never less than before in this process."""
    return _readings(1)


def _readings(count: int) -> int:
    """The first of ``count`` readings of the clock, each one more than that before."""
    global _last_reading
    with _clock_lock:
        first = max(_last_reading + 1, time.time_ns())
        _last_reading = first + count - 1
        return first


def batch_scores(tables: Sequence[ScoredTable]) -> list[tuple[int, int]]:
    """:meth:`ScoredTable.batch_score` of each table."""
    for table in tables:
        if table._clock_function is not timestamp_clock or not table.by_time:
            return [one.batch_score() for one in tables]
    first = _readings(len(tables))
    return [(first + t, 0) for t in range(len(tables))]


class ScoredTable:
    """The part of a table that knows its next score."""

    name: str
    options: DynamicEmbTableOptions

    def _start_scores(self, clock: Callable[[], int] | None) -> None:
        if clock is not None and not callable(clock):
            raise wrong_type("clock", clock, "None or a function that returns nanoseconds")
        self._clock_function = timestamp_clock if clock is None else clock
        self.by_time = self.options.score_strategy is DynamicEmbScoreStrategy.TIMESTAMP
        self._step = 1
        self._custom_score: int | None = None

    def get_score(self) -> int:
        """The score the next training batch will write (the clock's reading for TIMESTAMP and the
        pair, 1 for LFU, 0 for NO_EVICTION and for CUSTOMIZED before ``set_score``)."""
        strategy = self.options.score_strategy
        if isinstance(strategy, tuple) or strategy is DynamicEmbScoreStrategy.TIMESTAMP:
            return self._clock()
        if strategy is DynamicEmbScoreStrategy.STEP:
            return self._step
        if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
            return self._custom_score or 0
        return 1 if strategy is DynamicEmbScoreStrategy.LFU else 0

    def _clock(self) -> int:
        reading = self._clock_function()
        if type(reading) is int and 0 <= reading < 2**64:  # read in every batch
            return reading
        name = f"the clock of table {self.name!r}"
        return check_integer(name, reading, minimum=0, maximum=2**64 - 1)

    def set_score(self, score: int) -> None:
        """The score of the training batches from now on; only with CUSTOMIZED.

        A score below the one before warns, unless DYNAMICEMB_CSTM_SCORE_CHECK=0.
        """
        score = self.check_score(score)
        before = self._custom_score or 0
        if score < before and warning_for_cstm_score():
            warnings.warn(
                f"score of table {self.name!r} goes down from {before} to {score}: "
                "rows touched from now on are evicted first",
                UserWarning,
                stacklevel=2,
            )
        self._custom_score = score

    def check_score(self, score: int) -> int:
        """Raise unless :meth:`set_score` would take ``score``."""
        if self.options.score_strategy is not DynamicEmbScoreStrategy.CUSTOMIZED:
            raise UsageError(
                f"set_score on table {self.name!r}, whose score_strategy is "
                f"{self.options.score_strategy!r}; allowed: only with CUSTOMIZED"
            )
        return check_integer("score", score, minimum=1, maximum=2**64 - 1)

    def check_can_score(self) -> None:
        """Raise where a training batch would: CUSTOMIZED without a score."""
        customized = self.options.score_strategy is DynamicEmbScoreStrategy.CUSTOMIZED
        if customized and self._custom_score is None:
            raise UsageError(
                f"table {self.name!r} has score_strategy CUSTOMIZED and no score yet: call "
                "set_score before training"
            )

    def batch_score(self) -> tuple[int, int]:
        """(score, timestamp) for the batch that is about to be written."""
        strategy = self.options.score_strategy
        if strategy is DynamicEmbScoreStrategy.TIMESTAMP:
            return self._clock(), 0
        if strategy is DynamicEmbScoreStrategy.STEP:
            return self._step, 0
        if isinstance(strategy, tuple):
            return 0, self._clock()
        self.check_can_score()
        if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
            assert self._custom_score is not None
            return self._custom_score, 0
        return 0, 0

    def advance_step(self) -> None:
        """A training batch is done: STEP counts it."""
        self._step += 1
        if self._step == 2**64:
            warnings.warn(f"the step of table {self.name!r} starts again from 0", stacklevel=2)
            self._step = 0

    @property
    def step(self) -> int:
        """The STEP score of the next training batch."""
        return self._step

    def restore_scores(self, *, step: int, custom_score: int | None) -> None:
        """Continue the score of a saved table."""
        self._step = check_integer("step", step, minimum=0, maximum=2**64 - 1)
        self._custom_score = custom_score

    @property
    def custom_score(self) -> int | None:
        """What ``set_score`` was given last."""
        return self._custom_score
