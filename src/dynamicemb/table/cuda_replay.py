"""Training batches of a size that comes again and again, as one CUDA graph.

A batch is a dozen small launches before its rows are read. Where nothing but ids and scores differs
from the batch before, they are captured once and started as one, on copies of the ids in a place of
their own. Sorting, which only backward needs, is a branch beside finding and inserting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.kernels import dedup
from dynamicemb.kernels.launch import blocks, launch
from dynamicemb.table.cuda_batch import CROWDED, Batch
from dynamicemb.table.cuda_workspace import COPIED, Workspace
from dynamicemb.table.numbers import LFU_STRATEGY, NO_EVICTION_STRATEGY, PAIR_STRATEGY

if TYPE_CHECKING:
    from dynamicemb.table.cuda_layout import Layout

_log = logging.getLogger(__name__)

#: Batches of one size before their launches are captured: these compile what is captured.
SEEN_BEFORE = 3
#: Sizes of batches that are counted at a time.
SIZES = 8


class Replay:
    """The graphs of a group of tables."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        wanted = os.environ.get("DYNAMICEMB_CUDA_GRAPHS", "1") != "0"
        self._works = wanted and layout.device.type == "cuda"
        self._seen: dict[Any, int] = {}
        self._streams: list[torch.cuda.Stream] = []

    def serves(self, ids: torch.Tensor) -> bool:
        """Whether a batch of these ids can be captured."""
        count = ids.shape[0]
        return (
            self._works
            and count > 0
            and not any(
                one.wide
                or count > CROWDED * one.fewest_buckets
                or one.strategy == NO_EVICTION_STRATEGY
                for one in self._layout.classes
            )
        )

    def train(
        self, ids: torch.Tensor, bounds: torch.Tensor | None, numbers: Sequence[Sequence[int]]
    ) -> Batch:
        """The batch of a training step, found, inserted, with new rows initialised. No table grows
        or asks for admission. ``numbers``: of the batch."""
        layout, n = self._layout, ids.shape[0]
        key = n, layout.version, layout.marked
        space = layout.workspaces.take(n, key)
        if space.graph is None or space.graph.key != key:
            times = self._seen.pop(key, 0)
            self._seen[key] = times + 1
            if len(self._seen) > SIZES:
                del self._seen[next(iter(self._seen))]
            if times < SEEN_BEFORE or not self._capture(space, key, n):
                layout.batch_numbers.write(numbers)
                batch = Batch(layout, ids, bounds, space=space)
                _insert(batch)
                if times == SEEN_BEFORE - 1:  # compiles what backward may not have needed yet
                    batch.group()
                    batch.list_hot()
                return batch
        graph = space.graph
        assert graph is not None
        if not space.cells_are_free:
            space.free_cells(n)
            space.cells_are_free = True  # the graph leaves them so
        target = layout.batch_numbers
        launch(
            dedup.stage_kernel,
            blocks(n, COPIED),
            (
                ids,
                n,
                ids if bounds is None else bounds,
                1 if bounds is None else bounds.stride(0),
                0 if bounds is None else layout.tables + 1,
                target.stage(numbers),
                target.count,
                graph.ids,
                graph.bounds,
                target.words,
            ),
            (COPIED,),
            device=layout.device,
        )
        graph.launches.replay()
        return Batch(layout, ids, bounds, space=space, replayed=True)

    def _capture(self, space: Workspace, key: Any, n: int) -> bool:
        """Capture the launches of a batch of ``n`` ids in a workspace. Nothing is carried out."""
        layout = self._layout
        if not self._streams:
            # Sorting takes longer than what is beside it: it gets the processors first.
            self._streams = [torch.cuda.Stream(layout.device, priority=p) for p in (0, -1)]
        graph = BatchGraph(key, n, layout)
        bounds = None if layout.tables == 1 else graph.bounds
        main, side = self._streams
        current = torch.cuda.current_stream(layout.device)
        main.wait_stream(current)
        try:
            with torch.cuda.stream(main):
                graph.launches.capture_begin(capture_error_mode="thread_local")
                try:
                    batch = Batch(layout, graph.ids, bounds, space=space, captured=True)
                    self._insert_and_sort(batch, main, side)
                finally:
                    graph.launches.capture_end()
        except RuntimeError as error:
            _log.warning("a CUDA graph could not be captured, and none will be: %s", error)
            self._works = False
            return False
        current.wait_stream(main)
        space.set_graph(graph)
        return True

    def _insert_and_sort(
        self, batch: Batch, main: torch.cuda.Stream, side: torch.cuda.Stream
    ) -> None:
        counted = (LFU_STRATEGY, PAIR_STRATEGY)
        if any(one.strategy in counted for one in self._layout.classes):
            # Counts, which are found by sorting, become scores.
            _insert(batch)
            batch.list_hot()
            batch.space.free_cells(batch.n)
            return
        side.wait_stream(main)
        with torch.cuda.stream(side):
            batch.group()
            batch.list_hot()
        _insert(batch)
        batch.space.free_cells(batch.n)  # for the next batch: here nothing waits for it
        main.wait_stream(side)


class BatchGraph:
    """The captured launches of a batch in a workspace, and where they read ids and bounds."""

    def __init__(self, key: Any, ids: int, layout: Layout) -> None:
        self.key = key
        self.ids = torch.empty(ids, dtype=torch.int64, device=layout.device)
        self.bounds = torch.empty(layout.tables + 1, dtype=torch.int64, device=layout.device)
        self.launches = torch.cuda.CUDAGraph()


def _insert(batch: Batch) -> None:
    marked = batch.layout.marked
    batch.commit(codes=None, counts=None, train=True, marked=marked, keep_evicted=False)
    batch.initialize(embeddings=True)
