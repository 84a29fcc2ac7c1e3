"""Training batches of a size that comes again and again, as one CUDA graph.

A batch is a dozen small launches, and then its rows are read. Where nothing but ids, scores and the
output differs from the batch before, they are captured once and started as one: kernels find the
addresses of ids and output in a place of their own. What only later steps need, as sorting for
backward, is in branches beside the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dynamicemb.kernels import dedup
from dynamicemb.kernels.launch import launch
from dynamicemb.table.cuda_batch import CROWDED, Batch
from dynamicemb.table.cuda_layout import bits
from dynamicemb.table.cuda_reading import read_batch
from dynamicemb.table.cuda_workspace import COPIED, Workspace
from dynamicemb.table.numbers import (
    LFU_STRATEGY,
    NO_EVICTION_STRATEGY,
    PAIR_STRATEGY,
    TYPES,
)

if TYPE_CHECKING:
    from dynamicemb.table.cuda_layout import Layout

_log = logging.getLogger(__name__)

#: Batches of one size before their launches are captured: these compile what is captured.
SEEN_BEFORE = 3
#: Sizes of batches that are counted at a time.
SIZES = 8
#: How often the batches of a size are captured. More sizes than workspaces that are kept let each
#: other's graphs go.
CAPTURES = 3
#: Where the address of the output is among those of a graph; a multiple of 16 bytes.
OUT_ADDRESS = 2


@dataclass
class Seen:
    """Batches of one size that were not replayed, and graphs of it that were captured."""

    batches: int = 0
    captures: int = 0


class Replay:
    """The graphs of a group of tables."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        wanted = os.environ.get("DYNAMICEMB_CUDA_GRAPHS", "1") != "0"
        self._works = wanted and layout.device.type == "cuda"
        self._seen: dict[Any, Seen] = {}
        self._branches: Branches | None = None

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
        self,
        ids: torch.Tensor,
        bounds: torch.Tensor | None,
        numbers: Sequence[Sequence[int]],
        out: torch.Tensor | None,
    ) -> Batch:
        """The batch of a training step, found, inserted, with new rows initialised, and read into
        ``out``. No table grows or asks for admission. ``numbers``: of the batch."""
        layout, n = self._layout, ids.shape[0]
        key = n, layout.version, layout.marked, None if out is None else (out.dtype, out.stride(0))
        space = layout.workspaces.take(n, key)
        if space.graph is None or space.graph.key != key:
            seen = self._seen.pop(key, None) or Seen()
            self._seen[key] = seen
            if len(self._seen) > SIZES:
                del self._seen[next(iter(self._seen))]
            seen.batches += 1
            captured = seen.batches > SEEN_BEFORE and seen.captures < CAPTURES
            if captured:
                seen.captures += 1
                if space.graph is not None:  # that of another size stays
                    layout.workspaces.give_back(space)
                    space = layout.workspaces.take(n, plain=True)
                captured = self._capture(space, key, n, out)
            if not captured:
                layout.batch_numbers.write(numbers)
                batch = Batch(layout, ids, bounds, space=space)
                _insert(batch)
                if out is not None:
                    read_batch(layout, batch, out)
                if seen.batches == SEEN_BEFORE:  # compiles what backward may not have needed yet
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
            1,
            (
                ids,
                ids if out is None else bits(out),
                ids if bounds is None else bounds,
                1 if bounds is None else bounds.stride(0),
                0 if bounds is None else layout.tables + 1,
                target.stage(numbers),
                target.count,
                graph.addresses,
                graph.bounds,
                target.words,
            ),
            (COPIED, OUT_ADDRESS, -1 if out is None else TYPES[out.dtype]),
            device=layout.device,
        )
        graph.launches.replay()
        return Batch(layout, ids, bounds, space=space, replayed=True)

    def _capture(self, space: Workspace, key: Any, n: int, out: torch.Tensor | None) -> bool:
        """Capture the launches of a batch of ``n`` ids in a workspace. Nothing is carried out."""
        layout = self._layout
        if self._branches is None:
            self._branches = Branches(layout.device)
        branches = self._branches
        graph = BatchGraph(key, n, layout, branches)
        current = torch.cuda.current_stream(layout.device)
        branches.main.wait_stream(current)
        try:
            with torch.cuda.stream(branches.main):
                graph.launches.capture_begin(capture_error_mode="thread_local")
                try:
                    self.start(graph, space, out)
                finally:
                    graph.launches.capture_end()
        except RuntimeError as error:
            _log.warning("a CUDA graph could not be captured, and none will be: %s", error)
            self._works = False
            return False
        current.wait_stream(branches.main)
        space.set_graph(graph)
        return True

    def start(self, graph: BatchGraph, space: Workspace, out: torch.Tensor | None) -> None:
        """The launches of a graph."""
        layout, branches = self._layout, graph.branches
        bounds = None if layout.tables == 1 else graph.bounds
        batch = Batch(layout, graph.addresses, bounds, space=space, graph=graph)
        with branches.grouping():
            batch.group()
            batch.list_hot()
        counted = (LFU_STRATEGY, PAIR_STRATEGY)
        if any(one.strategy in counted for one in layout.classes):
            branches.join()  # counts, which are found by sorting, become scores
        _insert(batch)
        if out is not None:
            branches.join_numbers()
            read_batch(layout, batch, out, graph.addresses[OUT_ADDRESS:])
        branches.join()


class Branches:
    """Streams of launches that are captured beside each other."""

    def __init__(self, device: torch.device) -> None:
        # Sorting takes longest: it gets the processors first.
        self.main, self._numbers, self._sorted = (
            torch.cuda.Stream(device, priority=one) for one in (0, 0, -1)
        )

    def sorting(self) -> AbstractContextManager[Any]:
        """For sorting occurrences, after what is captured so far."""
        self._sorted.wait_stream(self.main)
        return torch.cuda.stream(self._sorted)

    def numbering(self) -> AbstractContextManager[Any]:
        """For numbering occurrences, after what is captured so far but for sorting."""
        self._numbers.wait_stream(self.main)
        return torch.cuda.stream(self._numbers)

    def grouping(self) -> AbstractContextManager[Any]:
        """For what needs occurrences sorted and numbered, and nothing more."""
        self._sorted.wait_stream(self._numbers)
        return torch.cuda.stream(self._sorted)

    def join_numbers(self) -> None:
        """What is captured from now on is after numbering."""
        self.main.wait_stream(self._numbers)

    def join(self) -> None:
        """What is captured from now on is after all that."""
        self.join_numbers()
        self.main.wait_stream(self._sorted)


class BatchGraph:
    """The captured launches of a batch of ``n`` ids in a workspace, and where they find the
    addresses of ids and output, and bounds."""

    def __init__(self, key: Any, n: int, layout: Layout, branches: Branches) -> None:
        self.key, self.n, self.branches = key, n, branches
        device = layout.device
        self.addresses = torch.empty(2 * OUT_ADDRESS, dtype=torch.int64, device=device)
        self.bounds = torch.empty(layout.tables + 1, dtype=torch.int64, device=device)
        self.launches = torch.cuda.CUDAGraph()


def _insert(batch: Batch) -> None:
    marked = batch.layout.marked
    batch.commit(codes=None, counts=None, train=True, marked=marked, keep_evicted=False)
    batch.initialize(embeddings=True)
