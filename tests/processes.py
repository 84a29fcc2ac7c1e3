"""Real processes for tests of several ranks: torch.distributed over gloo on this machine."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

#: Imported once too, where it is there: its tests take half the time, the others a second more.
_also = ["torchrec.distributed.model_parallel"] if importlib.util.find_spec("torchrec") else []

#: Long enough for a machine that is busy with something else.
TIMEOUT_S = 600


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``work(rank, *args)`` in ``world_size`` processes with a process group; its results in
    rank order. ``work`` is a function of a module. Raises with the traceback if a rank fails."""
    context = multiprocessing.get_context("forkserver")  # imports torch once for all tests
    context.set_forkserver_preload(["torch.distributed", "dynamicemb", *_also])
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_rank, args=(rank, world_size, store, results, work, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            answers = _answers(results, processes)
        finally:
            for process in processes:
                process.join(30)
                if process.is_alive():
                    process.kill()
    problems = [text for ok, text in answers.values() if not ok]
    assert not problems, "\n".join(problems)
    return [answers[rank][1] for rank in range(world_size)]


def _answers(results: Any, processes: list[Any]) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(answers) < len(processes):
        dead = {rank for rank, one in enumerate(processes) if one.exitcode not in (None, 0)}
        try:
            rank, answer = pickle.loads(results.get(timeout=1))
            answers[rank] = answer
        except queue.Empty:
            for rank in dead - answers.keys():
                answers[rank] = (False, f"rank {rank} died: {processes[rank].exitcode}")
            assert time.monotonic() < deadline, "the ranks do not answer"
    return answers


def _rank(
    rank: int, world_size: int, store: str, results: Any, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
        torch.manual_seed(0)
        answer = (True, work(rank, *args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
    results.put(pickle.dumps((rank, answer)))  # as bytes: torch would share the memory
