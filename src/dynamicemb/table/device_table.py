"""What tables that hold their rows themselves share, whatever device they are on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch

from dynamicemb.admission import AdmissionStrategy, ProbabilityAdmissionStrategy
from dynamicemb.errors import check_integer
from dynamicemb.table.base import Table
from dynamicemb.table.rows import Progress, Rows


class Counter(Protocol):
    """Occurrences of ids that have no row; see :class:`dynamicemb.table.counter.IdCounter`."""

    def add(self, ids: torch.Tensor, counts: torch.Tensor) -> None: ...
    def counts(self, ids: torch.Tensor) -> torch.Tensor: ...
    def export(self) -> tuple[torch.Tensor, torch.Tensor]: ...
    def restore(self, ids: torch.Tensor, counts: torch.Tensor) -> None: ...


class RowLimit(Protocol):
    """Says which new ids find a place where the rows of a table end up."""

    def allows(self, ids: torch.Tensor) -> torch.Tensor:
        """bool [n] for distinct new ids, in order of first occurrence."""


class DeviceTable(Table):
    """A table of buckets in the memory of one device."""

    _width: int
    admit_strategy: AdmissionStrategy | None
    counter: Counter | None
    #: Asked in a training batch about the new ids that were admitted. Those it refuses read 0.0 and
    #: get no row; :meth:`stats` counts them as rejections.
    limit: RowLimit | None = None

    @property
    def decides(self) -> bool:
        """Whether somebody is asked which new ids of a training batch get a row."""
        return self.admit_strategy is not None or self.limit is not None

    def _refused(self, ids: torch.Tensor, admitted: torch.Tensor) -> torch.Tensor | None:
        """bool [n]: which of the admitted ids the limit refuses; ``None``: none of them."""
        if self.limit is None:
            return None
        allowed = self.limit.allows(ids[admitted])
        if bool(allowed.all()):
            return None
        refused = torch.zeros_like(admitted)
        refused[admitted] = ~allowed
        return refused

    @property
    def bucket_capacity(self) -> int:
        return self._width

    def export_buckets(self) -> int:
        return self.capacity // self._width

    def export(
        self,
        *,
        batch_size: int = 65536,
        score_threshold: int | None = None,
        changed_since: int | None = None,
    ) -> Iterator[Rows]:
        batch_size = check_integer("batch_size", batch_size, minimum=1)
        if score_threshold is not None:
            score_threshold = check_integer(
                "score_threshold", score_threshold, minimum=0, maximum=2**64 - 1
            )
        if changed_since is not None:
            changed_since = check_integer(
                "changed_since", changed_since, minimum=1, maximum=2**64 - 1
            )
            self.check_marked()
        return self._export(batch_size, score_threshold, changed_since)

    @abstractmethod
    def _export(
        self, batch_size: int, threshold: int | None, changed_since: int | None
    ) -> Iterator[Rows]:
        """:meth:`export` of checked arguments."""

    def check_marked(self) -> None:
        """Raise unless the table knows when its rows changed."""

    def removal_limit(self, limit: int | None) -> int:
        """The limit that :meth:`log_removals` is to take."""
        if limit is None:
            return max(2**20, 2 * self.max_slots)
        return check_integer("limit", limit, minimum=1, maximum=2**40)

    # ---- saving ----

    @property
    @abstractmethod
    def next_row_number(self) -> int:
        """The score of the next new row under NO_EVICTION; can be set."""

    @next_row_number.setter
    @abstractmethod
    def next_row_number(self, number: int) -> None: ...

    @abstractmethod
    def set_seed(self, seed: int) -> None:
        """New rows follow another seed."""

    def progress(self) -> Progress:
        strategy = self.admit_strategy
        draws = isinstance(strategy, ProbabilityAdmissionStrategy)
        return Progress(
            step=self.step,
            custom_score=self.custom_score,
            iteration=self.iteration,
            next_row_number=self.next_row_number,
            admission_calls=strategy.calls if draws else 0,  # type: ignore[union-attr]
            seed=self.seed,
        )

    def restore_progress(self, progress: Progress) -> None:
        self.restore_scores(step=progress.step, custom_score=progress.custom_score)
        self.iteration = progress.iteration
        self.next_row_number = progress.next_row_number
        self.set_seed(progress.seed)
        if isinstance(self.admit_strategy, ProbabilityAdmissionStrategy):
            self.admit_strategy.calls = progress.admission_calls

    def export_counter(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.counter is None else self.counter.export()

    def restore_counter(self, ids: torch.Tensor, counts: torch.Tensor) -> None:
        ids = self.check_ids("ids", ids)
        counts = self.check_counts(counts, len(ids))
        if self.counter is not None:
            self.counter.restore(ids, counts)
