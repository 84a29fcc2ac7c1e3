"""One run from its start, or from its last checkpoint, to its end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamicemb.cli.training.batch import Batch, Source
from dynamicemb.cli.training.history import History, Point, TableMeter, together
from dynamicemb.cli.training.learner import Learner, dynamic_learner, hashed_learner
from dynamicemb.cli.training.metrics import Window
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.cli.training.saving import Checkpoints, load_tables
from dynamicemb.cli.training.sharded import sharded_learner
from dynamicemb.cli.training.tables import tables_of
from dynamicemb.cli.training.timer import Timer
from dynamicemb.errors import CheckpointError, UsageError
from dynamicemb.nn.expiry import expire_rows

logger = logging.getLogger(__name__)

#: The names of predictors. CEILING knows the true odds, which only a synthetic stream has.
DYNAMIC, HASHED, CEILING = "dynamic", "hashed", "ceiling"


class Run:
    """The models, the metrics, and the place in the stream.

    ``steps`` and ``examples`` count what was trained on; ``resumed_from`` is the step of the
    checkpoint this process began with.
    """

    def __init__(
        self,
        options: TrainOptions,
        source: Source,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.options, self.source, self.device = options, source, device
        self.ranks = ranks or Ranks()
        self.folder = Path(options.out)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", options.keep, self.ranks)
        self.steps = self.examples = 0
        self.finished = False
        self.resumed_from: int | None = None
        self._seconds_before = 0.0
        if not self._continue():
            self._begin({})
            self._empty_stores()
        if options.lifetime:
            expire_rows(self.model, **options.lifetime)  # type: ignore[arg-type]
        self._started = self._saved_at = time.monotonic()

    # ---- the state ----

    def _begin(self, start: dict[str, int]) -> None:
        """Make everything anew; ``start``: the capacity of tables that will be loaded."""
        schema = self.source.schema
        if self.ranks.size > 1:
            dynamic = sharded_learner(self.options, schema, self.ranks.size, start)
        else:
            dynamic = dynamic_learner(self.options, schema, self.device, start)
        self.learners: dict[str, Learner] = {DYNAMIC: dynamic}
        if self.options.baseline and self.ranks.first:  # it is small; one rank is enough
            self.learners[HASHED] = hashed_learner(self.options, schema, self.device)
        self.tables = tables_of(self.learners[DYNAMIC].model)
        self.meter = TableMeter(self.tables)
        self.history = History()
        self.timer = Timer(self.device)
        self.window: Window | None = None
        self.recent: deque[Batch] = deque()

    @property
    def model(self) -> torch.nn.Module:
        return self.learners[DYNAMIC].model

    @property
    def seconds(self) -> float:
        """Time in training, over restarts."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def total(self) -> int | None:
        """Examples in all, if that is known."""
        limits = [n for n in (self.source.examples, self.options.max_examples) if n is not None]
        return min(limits) if limits else None

    @property
    def _counts_ids(self) -> bool:
        return self.options.admission.startswith("frequency")

    def save(self) -> Path:
        """Write a checkpoint of everything."""
        with self.timer.phase("checkpoint"):
            state = {
                "options": self.options.public(),
                "finished": self.finished,
                "steps": self.steps,
                "examples": self.examples,
                "seconds": self.seconds,
                "timer": dict(self.timer.seconds),
                "learners": {name: one.state() for name, one in self.learners.items()},
                "tables": self.ranks.gather(self.meter.state()),
                "history": self.history.to_json(),
                "window": [torch.from_numpy(one) for one in self.window.state()]
                if self.window
                else [],
                "recent": [[one.ids, one.lengths] for one in self.recent],
            }
            path = self.checkpoints.write(self.steps, self.model, state, counter=self._counts_ids)
        self._saved_at = time.monotonic()
        if self.ranks.first:
            self.history.write(self.folder / "metrics.json")
        return path

    def _continue(self) -> bool:
        """Take up the last good checkpoint of an unfinished run, if there is one."""
        self._may_empty = self.options.fresh or bool(self.checkpoints.found())
        if self.options.fresh:
            self.checkpoints.clear()
            return False
        for path, state in self.checkpoints.states():
            if state["finished"] and not self._has_more(state):
                self.checkpoints.clear()
                return False
            self._check_same(state)
            try:
                self._restore(path, state)
            except CheckpointError as error:
                logger.warning("%s is left out: %s", path, error)
                self.learners, self.tables = {}, []  # a store has one table at a time
                continue
            self.resumed_from = self.steps
            return True
        return False

    def _empty_stores(self) -> None:
        """A run begins without rows; those of this run's last one go, others are kept."""
        for table in self.tables:
            if len(table) and not self._may_empty:
                raise UsageError(
                    f"the store of table {table.name!r} has {len(table):,} rows already; --fresh "
                    "removes them, or give another --store"
                )
            if len(table):
                table.clear()

    def _has_more(self, state: dict[str, Any]) -> bool:
        """Whether a finished run goes on because it is to be longer now."""
        more = self.total is not None and self.total > state["examples"]
        return more and not self.options.difference(state["options"])

    def _check_same(self, state: dict[str, Any]) -> None:
        changed = self.options.difference(state["options"])
        if changed:
            listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            raise UsageError(
                f"the unfinished run in {self.folder} has other options ({listed}); give the same "
                "options to go on, --fresh to start over, or another --out"
            )

    def _restore(self, path: Path, state: dict[str, Any]) -> None:
        # Tables of the size they had: rows keep their order in a bucket, which breaks ties.
        own = state["tables"][self.ranks.rank]
        self._begin({name: one["capacity"] for name, one in own.items()})
        load_tables(path, self.model, counter=self._counts_ids)
        for name, learner in self.learners.items():
            learner.restore(state["learners"][name])
        self.steps, self.examples = state["steps"], state["examples"]
        self._seconds_before = state["seconds"]
        self.timer.seconds = dict(state["timer"])
        self.meter.restore(own)
        self.history = History.from_json(state["history"])
        if state["window"]:
            rows = state["window"][0].shape[0]
            self.window = self._new_window(ceiling=rows == 2 + len(self.learners))
            self.window.restore([one.numpy() for one in state["window"]])
        nothing = torch.empty(0)
        self.recent.extend(
            Batch(nothing, ids, lengths, nothing) for ids, lengths in state["recent"]
        )

    def _new_window(self, *, ceiling: bool) -> Window:
        names = (*self.learners, CEILING) if ceiling else tuple(self.learners)
        return Window(names, self.options.window)

    # ---- training ----

    def train(
        self, *, on_step: Callable[[Run], None], stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Train to the end of the stream, or until ``stop()``, and save; ``on_step`` is called
        after every step."""
        self._started = self._saved_at = time.monotonic()
        self._last_point = (self.examples, self.seconds)
        batches = iter(self.source.batches(self.examples, self.options.batch_size))
        while not self.ranks.agree(stop()):
            with self.timer.phase("data"):
                batch = next(batches, None)
                if self.total is not None and batch is not None:
                    batch = batch if self.examples < self.total else None
            if batch is None or batch.size < self.ranks.size:  # every rank needs an example
                self.finished = True
                break
            self._step(batch)
            if self.steps % self.options.log_every == 0:
                self._measure()
            on_step(self)
            if self._is_time_to_save():
                self.save()
        if self.finished and self.steps % self.options.log_every:
            self._measure()
        if self.steps:
            self.save()

    def _step(self, batch: Batch) -> None:
        with self.timer.phase("data"):
            there = batch.to(self.device)
        logits = {}
        for name, learner in self.learners.items():
            if name == DYNAMIC:
                logits[name] = self._learn(learner, there)
            else:
                logits[name] = learner.learn(there, self.timer, f"{name}: ")
        self.steps += 1
        self.examples += batch.size
        if self.ranks.first:
            self._note(batch, logits)

    def _learn(self, learner: Learner, batch: Batch) -> np.ndarray:
        """Train on this rank's share; returns the logits of all examples at the first rank."""
        ranks = self.ranks
        if ranks.size == 1:
            return learner.learn(batch, self.timer)
        share = batch.share(ranks.rank, ranks.size)
        weight = share.size * ranks.size / batch.size
        logits = learner.learn(share, self.timer, weight=weight)
        with self.timer.phase("metrics"):
            parts = ranks.gather(logits)
        return np.concatenate(parts) if parts else logits

    def _note(self, batch: Batch, logits: dict[str, np.ndarray]) -> None:
        with self.timer.phase("metrics"):
            if self.window is None:
                self.window = self._new_window(ceiling=batch.odds is not None)
            if batch.odds is not None:
                logits[CEILING] = batch.odds.numpy()
            self.window.add(batch.labels.numpy(), logits)
            self.recent.append(batch)
            while len(self.recent) > len(self.window.state()):  # as long as the window
                self.recent.popleft()

    def _measure(self) -> None:
        with self.timer.phase("metrics"):
            parts = self.ranks.gather(self.meter.read())
            if not self.ranks.first or self.window is None:
                return
            seconds = self.seconds
            examples, before = self._last_point
            speed = (self.examples - examples) / max(1e-9, seconds - before)
            self._last_point = (self.examples, seconds)
            self.history.points.append(
                Point(
                    self.steps,
                    self.examples,
                    self.source.day_of(self.examples),
                    seconds,
                    speed,
                    self.window.measure(),
                    together(parts),
                )
            )

    def _is_time_to_save(self) -> bool:
        every, minutes = self.options.checkpoint_steps, self.options.checkpoint_minutes
        if every and self.steps % every == 0:
            return True
        late = minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes
        return bool(minutes) and bool(self.ranks.agree(late))

    def mean_auc(self, name: str) -> float:
        """The AUC of a predictor, mean over the points of the second half of the run."""
        values = self.history.series("metrics", name, "auc")
        return float(np.mean(values[len(values) // 2 :])) if values else float("nan")
