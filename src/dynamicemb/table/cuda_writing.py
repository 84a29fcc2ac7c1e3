"""Whole rows that are given to a table on a GPU: inserted, assigned, loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dynamicemb.kernels import rows
from dynamicemb.kernels.launch import aligned, blocks, launch
from dynamicemb.kernels.layout import COUNTER_NAMES
from dynamicemb.options import DynamicEmbCheckMode
from dynamicemb.table.cuda_batch import Batch
from dynamicemb.table.cuda_content import CudaContent
from dynamicemb.table.cuda_evicted import Evicted
from dynamicemb.table.cuda_layout import bits
from dynamicemb.table.numbers import NO_EVICTION_STRATEGY, strategy_number
from dynamicemb.table.rows import Rows, Written

_FAILURES = COUNTER_NAMES.index("failures")


class CudaWriting(CudaContent):
    """The part of :class:`CudaTable` that takes rows as they are."""

    @property
    def ignores_failures(self) -> bool:
        return self.options.safe_check_mode is DynamicEmbCheckMode.IGNORE

    def failures(self) -> torch.Tensor:
        """How many ids failed so far, on the device."""
        return self.counters[_FAILURES].clone()

    def report_failures(self, before: torch.Tensor, ids: int, evicted: Rows | None = None) -> None:
        """Obey ``safe_check_mode``; waits for the device unless it is IGNORE."""
        if not self.ignores_failures:
            self.check_failures(int(self.counters[_FAILURES] - before), ids, evicted)

    def insert(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        return_evicted: bool = False,
    ) -> Written:
        with self.entered:
            before = self.failures()
            batch, evicted = self._write(ids, embeddings, state, scores, return_evicted)
            self.report_failures(before, batch.n, evicted)
            return Written(self._written(batch), evicted)

    def assign(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        with self.entered:
            return self._assign(ids, embeddings, state, scores)

    def _assign(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        state: torch.Tensor | None,
        scores: torch.Tensor | None,
        *,
        distinct: bool = False,
    ) -> torch.Tensor:
        ids, embeddings, state, scores = self.check_whole_rows(ids, embeddings, state, scores)
        batch = self.located(ids, distinct=distinct)
        self._write_given(batch, embeddings, state, scores)
        self._count_scores(batch, scores)
        batch.stamp()
        self.changes += 1
        return self._written(batch)

    def _write(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        state: torch.Tensor | None,
        scores: torch.Tensor | None,
        keep_evicted: bool,
        hold: Callable[[], None] | None = None,
        *,
        distinct: bool = False,
    ) -> tuple[Batch, Rows | None]:
        """``distinct``: no id occurs twice."""
        ids, embeddings, state, scores = self.check_whole_rows(ids, embeddings, state, scores)
        group = self.group
        score = (0, 0) if scores is not None else self.batch_score()
        leaving: list[Evicted] = []

        def meanwhile(batch: Batch, evicted: Evicted) -> None:
            leaving.append(evicted)
            self._write_given(batch, embeddings, state, scores, part=rows.STAYING.value)

        batch, evicted = group.insert_batch(
            ids,
            None,
            [score],
            counts=None,
            codes=None,
            train=False,
            keep_evicted=keep_evicted,
            distinct=distinct,
            hold=hold,
            meanwhile=meanwhile,
        )
        with batch.settled():
            if state is None:
                batch.initialize(embeddings=False)
            if leaving:
                part = rows.LISTED.value
                self._write_given(batch, embeddings, state, scores, part=part, listed=leaving[0])
            else:
                self._write_given(batch, embeddings, state, scores)
        self._count_scores(batch, scores)
        if scores is None and strategy_number(self.options) == NO_EVICTION_STRATEGY and batch.n:
            batch.number_rows(0)
        return batch, None if evicted is None else evicted[0]

    def located(self, ids: torch.Tensor, *, distinct: bool = False) -> Batch:
        """A batch over ids, with the slots of those that are there."""
        batch = Batch(self.group.layout, aligned(ids), None, distinct=distinct)
        batch.slots = batch.locate(None)
        return batch

    def bring_in(self, given: Rows, hold: Callable[[], None]) -> Written:
        """Insert whole rows of distinct ids; see :meth:`TableGroup.bring_in`. ``hold`` keeps rows
        from being evicted."""
        with self.entered:
            batch, evicted = self._write(
                given.ids, given.embeddings, given.state, given.scores, True, hold, distinct=True
            )
            return Written(self._written(batch), evicted)

    def _write_given(
        self,
        batch: Batch,
        embeddings: torch.Tensor,
        state: torch.Tensor | None,
        scores: torch.Tensor | None,
        *,
        part: int = rows.EVERY.value,
        listed: Evicted | None = None,
    ) -> None:
        """Write given rows to where the batch's entries are; of equal ids the last counts.
        ``part``: which entries; see ``write_kernel``."""
        most = batch.n if listed is None else listed.count
        if most == 0:
            return
        (one,) = batch.layout.classes
        stated = state is not None and self.state_dim > 0
        launch(
            rows.write_kernel,
            blocks(most, one.row_block),
            (
                batch.fresh if listed is None else listed.entries,
                batch.count if listed is None else listed.ends,
                batch.slots,
                batch.last(),
                aligned(bits(embeddings)),
                batch.ids if not stated else aligned(state),  # type: ignore[arg-type]
                batch.ids if scores is None else aligned(scores),
                batch.layout.meta,
                1,
                one.width,
            ),
            (
                one.dim,
                one.columns,
                one.stride,
                one.type,
                one.state_dim,
                one.state_columns,
                one.state_stride,
                self.score_words,
                one.row_block,
                stated,
                scores is not None,
                part,
            ),
            warps=4,
            device=self._device,
        )

    def _count_scores(self, batch: Batch, scores: torch.Tensor | None) -> None:
        """Scores were given: later ones are compared with them."""
        if scores is None or batch.n == 0:
            return
        newest = int((scores ^ -(2**63)).max()) + 2**63
        self.newest_score = max(self.newest_score, newest)
        if strategy_number(self.options) == NO_EVICTION_STRATEGY:
            # Numbers of rows: go on after the largest.
            used = torch.arange(batch.n, device=self._device) < batch.count
            there = used & (batch.slots >= 0)
            stored = self.scores[torch.where(there, batch.slots, 0).to(torch.int64)]
            after = torch.where(stored == -1, stored, stored + 1) ^ -(2**63)
            most = torch.where(there, after, -(2**63)).max()
            self.next_number = torch.maximum(self.next_number ^ -(2**63), most) ^ -(2**63)

    def _written(self, batch: Batch) -> torch.Tensor:
        return batch.slots.index_select(0, batch.entry_of) >= 0

    def write_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, state: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Insert saved rows; those that do not fit are counted, not reported."""
        with self.entered:
            self._write(ids, embeddings, state, scores, False)
