"""Looks for a newer state again and again, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamicemb.cli.exposition import Counter, labels
from dynamicemb.cli.serving.states import State, fingerprint, newest_state
from dynamicemb.errors import CheckpointError

logger = logging.getLogger(__name__)

#: Seconds between two looks at what could not be opened, at most.
LONGEST_WAIT = 30.0


@dataclass(frozen=True)
class Standing:
    """What is served, and what is wrong with something newer; one object, so that both fit."""

    state: State | None = None
    problem: str | None = None


class Follower:
    """Brings the newest state of a folder into place.

    Args:
        path: a checkpoint, a chain, or a folder with some of them.
        poll_seconds: between two looks; 0: only the first one.
        settings: of the tables, as ``ServingTable`` takes them.
    """

    def __init__(self, path: Path, poll_seconds: float, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self.poll_seconds = poll_seconds
        self.standing = Standing()
        self.looked = threading.Event()  # for the first time
        self.looked_at: float | None = None
        self.opened = Counter(
            "states_opened_total", "Checkpoints opened and deltas applied, by kind."
        )
        self.problems = Counter(
            "follow_errors_total", "Looks that found something that could not be opened."
        )
        self._seen: Any = None
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynamicemb-follow", daemon=True)

    @property
    def following(self) -> bool:
        """Whether what is served is the newest there is, as far as one can know."""
        alive = self.poll_seconds == 0 or self._thread.is_alive()
        return alive and self.standing.state is not None and self.standing.problem is None

    def look(self) -> None:
        """Bring the newest state into place, if there is one; ``standing`` says what is wrong."""
        before = self.standing
        try:
            seen = fingerprint(self._path)
            if seen != self._seen or before.problem is not None or before.state is None:
                self.standing = Standing(*newest_state(self._path, before.state, self._settings))
                self._seen = seen
        except CheckpointError as error:
            self.standing = Standing(before.state, str(error))
        except Exception as error:  # a folder of somebody else: anything may be in it
            self.standing = Standing(before.state, f"{type(error).__name__}: {error}")
            if before.problem != self.standing.problem:
                logger.exception("looking for a newer checkpoint failed")
        self.looked_at = time.time()
        self._tell(before)

    def _tell(self, before: Standing) -> None:
        state, problem = self.standing.state, self.standing.problem
        if state is not None and state is not before.state:
            old = before.state
            on_top = old is not None and old.base == state.base and old.sequence < state.sequence
            if not on_top:
                self.opened.add(1, labels(kind="checkpoint"))
            applied = state.sequence - (old.sequence if old is not None and on_top else 0)
            self.opened.add(applied, labels(kind="delta"))
            logger.info("serving %s", state)
        if problem is None:
            self._failures = 0
            if before.problem is not None and before.state is not None:
                logger.info("follows again")
        elif state is not None:
            self._failures += 1
            self.problems.add(1)
            if problem != before.problem:
                logger.error("goes on with %s: %s", state, problem)

    def start(self) -> None:
        """Look, and then again and again."""
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self.looked_at is not None:  # else it opens a checkpoint, which may take long
            self._thread.join()

    def _run(self) -> None:
        self.look()
        self.looked.set()
        while self.poll_seconds > 0 and not self._stop.wait(self._wait()):
            self.look()

    def _wait(self) -> float:
        """Longer and longer while something cannot be opened: reading it costs time."""
        longest = max(LONGEST_WAIT, self.poll_seconds)
        return min(self.poll_seconds * float(2 ** min(self._failures, 5)), longest)
