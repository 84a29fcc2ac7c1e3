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
from dynamicemb.cli.training.deltas import Deltas
from dynamicemb.cli.training.history import History, Point, TableMeter, together
from dynamicemb.cli.training.learner import Learner, new_learner
from dynamicemb.cli.training.measured import Measured, MeasuredDynamic
from dynamicemb.cli.training.metrics import Window
from dynamicemb.cli.training.options import DYNAMIC, TrainOptions
from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.cli.training.saving import Checkpoints, load_tables
from dynamicemb.cli.training.sharded import sharded_learner
from dynamicemb.cli.training.timer import Timer
from dynamicemb.errors import CheckpointError, UsageError
from dynamicemb.nn.expiry import expire_rows

logger = logging.getLogger(__name__)

#: The predictor that knows the true odds, which only a synthetic stream has. Others are called by
#: the kind of their tables.
CEILING = "ceiling"


class Run:
    """The models, the metrics, and the place in the stream.

    ``steps`` and ``examples`` count what was trained on; ``resumed_from`` is the step of the
    checkpoint this process began with, ``saved_step`` that of the last one.
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
        self.deltas = Deltas(self.folder / "deltas", options.keep, self.ranks)
        self.steps = self.examples = 0
        self.finished = False
        self.resumed_from: int | None = None
        self.saved_step: int | None = None
        self._seconds_before = 0.0
        self._delta_step = -1
        if not self._continue():
            self._begin({})
            self._empty_stores()
        if options.lifetime:
            expire_rows(self.learners[DYNAMIC].model, **options.lifetime)  # type: ignore[arg-type]
        self._started = self._saved_at = self._delta_at = time.monotonic()

    # ---- the state ----

    def _begin(self, start: dict[str, int]) -> None:
        """Make everything anew; ``start``: the capacity of tables that will be loaded."""
        options, schema = self.options, self.source.schema
        self.learners: dict[str, Learner] = {}
        for kind in options.kinds:
            if self.ranks.size > 1 and kind in options.tables:
                self.learners[kind] = sharded_learner(kind, options, schema, self.ranks, start)
            elif self.ranks.first:  # the baseline is small; one rank is enough
                self.learners[kind] = new_learner(kind, options, schema, self.device, start)
        self.tables: dict[str, Measured] = {
            self._shown(kind, table.name): table
            for kind in options.tables
            for table in self.learners[kind].tables
        }
        self.meter = TableMeter(self.tables)
        self.history = History()
        self.timer = Timer(self.device)
        self.window: Window | None = None
        self.recent: deque[Batch] = deque()

    def _shown(self, kind: str, table: str) -> str:
        return table if kind == self.main else f"{kind} {table}"

    @property
    def main(self) -> str:
        """The kind of tables that counts."""
        return self.options.tables[0]

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
    def _dynamic_model(self) -> torch.nn.Module | None:
        return self.learners[DYNAMIC].model if DYNAMIC in self.learners else None

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
            own = {name: one.own_state() for name, one in self.learners.items()}
            path = self.checkpoints.write(
                self.steps, self._dynamic_model, state, own, counter=self._counts_ids
            )
        self._saved_at, self.saved_step = time.monotonic(), self.steps
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
                self.learners, self.tables = {}, {}  # a store has one table at a time
                continue
            self.resumed_from = self.saved_step = self.steps
            return True
        return False

    def _empty_stores(self) -> None:
        """A run begins without rows; those of this run's last one go, others are kept."""
        for one in self.tables.values():
            if not isinstance(one, MeasuredDynamic) or len(one.table) == 0:
                continue
            if not self._may_empty:
                raise UsageError(
                    f"the store of table {one.name!r} has {len(one.table):,} rows already; --fresh "
                    "removes them, or give another --store"
                )
            one.table.clear()

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
        dynamic = self.source.schema.tables if DYNAMIC in self.options.tables else ()
        self._begin({name: own[self._shown(DYNAMIC, name)]["capacity"] for name in dynamic})
        if self._dynamic_model is not None:
            load_tables(path, self._dynamic_model, counter=self._counts_ids)
        saved = self.checkpoints.own_state(path, state)
        for name, learner in self.learners.items():
            learner.restore(state["learners"][name])
            learner.restore_own(saved[name])
        self.steps, self.examples = state["steps"], state["examples"]
        self._seconds_before = state["seconds"]
        self.timer.seconds = dict(state["timer"])
        self.meter.restore(own)
        self.history = History.from_json(state["history"])
        if state["window"]:
            rows = state["window"][0].shape[0]
            self.window = self._new_window(ceiling=rows == 2 + len(self.learners))
            self.window.restore([one.numpy() for one in state["window"]])
        nothing = torch.empty(0, device="cpu")
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
        self._started = self._saved_at = self._delta_at = time.monotonic()
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
            options = self.options
            if self._is_time(options.checkpoint_steps, options.checkpoint_minutes, self._saved_at):
                self.save()
            if self._is_time(options.delta_steps, options.delta_minutes, self._delta_at):
                self._write_delta()
        if self.finished and self.steps % self.options.log_every:
            self._measure()
        if self.steps:
            self.save()
            if self.options.writes_deltas:
                self._write_delta()

    def _write_delta(self) -> None:
        if self._delta_step == self.steps:  # at the end there may be nothing new
            return
        assert self._dynamic_model is not None
        with self.timer.phase("delta"):
            self.deltas.write(self._dynamic_model, counter=self._counts_ids)
        self._delta_at, self._delta_step = time.monotonic(), self.steps

    def _step(self, batch: Batch) -> None:
        with self.timer.phase("data"):
            there = batch.to(self.device)
        logits = {}
        for name, learner in self.learners.items():
            prefix = "" if name == self.main else f"{name}: "
            logits[name] = self._learn(learner, there, prefix)
        self.steps += 1
        self.examples += batch.size
        if self.ranks.first:
            self._note(batch, logits)

    def _learn(self, learner: Learner, batch: Batch, prefix: str) -> np.ndarray:
        """Train, where tables are spread on this rank's share; returns the logits of all examples
        at the first rank."""
        ranks = self.ranks
        if not learner.spread:
            return learner.learn(batch, self.timer, prefix)
        share = batch.share(ranks.rank, ranks.size)
        weight = share.size * ranks.size / batch.size
        logits = learner.learn(share, self.timer, prefix, weight=weight)
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

    def _is_time(self, steps: int, minutes: float, since: float) -> bool:
        """Whether something is due that is done every so many steps or minutes; 0: neither."""
        if steps and self.steps % steps == 0:
            return True
        late = minutes > 0 and time.monotonic() - since >= 60 * minutes
        return minutes > 0 and bool(self.ranks.agree(late))

    def mean_auc(self, name: str) -> float:
        """The AUC of a predictor, mean over the points of the second half of the run."""
        values = self.history.series("metrics", name, "auc")
        return float(np.mean(values[len(values) // 2 :])) if values else float("nan")
