"""Real processes that tests run functions in, started once for all tests."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 600.0  # of one function on all ranks; generous, the machine may be busy


class RankError(AssertionError):
    """A function failed on a rank; carries its traceback."""


class Ranks:
    """Process groups of one, two and four processes, each started when it is first needed."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._groups: dict[int, list[tuple[Any, Any]]] = {}
        self._folder = tempfile.TemporaryDirectory()

    def run(self, world_size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """``function(rank, world_size, **arguments)`` on every rank; its results, rank by rank."""
        if world_size not in self._groups:
            self._groups[world_size] = self._start(world_size)
        workers = self._groups[world_size]
        for _, pipe in workers:
            pipe.send((function, arguments))
        results: list[Any] = [None] * world_size
        problems = []
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        end = time.monotonic() + TIMEOUT
        while waiting:
            ready = wait(waiting, max(end - time.monotonic(), 0.0))
            if not ready:
                problems.extend(f"rank {rank}: no answer" for rank in waiting.values())
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                problem, results[rank] = pipe.recv()
                if problem:
                    problems.append(f"rank {rank}: {problem}")
                    end = time.monotonic() + 10  # the others may wait for this one for ever
        if problems:
            self._stop(world_size)
            raise RankError("\n".join(problems))
        return results

    def _start(self, world_size: int) -> list[tuple[Any, Any]]:
        meeting = tempfile.mkdtemp(dir=self._folder.name)
        workers = []
        for rank in range(world_size):
            ours, theirs = self._context.Pipe()
            arguments = (theirs, str(Path(meeting) / "store"), rank, world_size)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            workers.append((process, ours))
        return workers

    def _stop(self, world_size: int) -> None:
        for process, _ in self._groups.pop(world_size):
            process.kill()
            process.join()

    def close(self) -> None:
        for world_size in list(self._groups):
            self._stop(world_size)


def _serve(pipe: Any, meeting: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    while True:
        function, arguments = pipe.recv()
        try:
            result = function(rank, world_size, **arguments)
            dist.barrier()
        except BaseException:
            pipe.send((traceback.format_exc(), None))
            return
        pipe.send(("", result))
