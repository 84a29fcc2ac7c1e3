"""Processes that may be killed, alone or as ranks of a group."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from processes import TIMEOUT_S

KILLED = "killed"


def _context() -> Any:
    """Children are forked from a server that has imported torch once and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "dynamicemb"])
    return context


def _child(
    rank: int, size: int, store: str | None, pipe: Any, function: Callable[..., Any], args: Any
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if store is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=TIMEOUT_S),
            )
        pipe.send(("result", function(rank, *args)))
        if store is not None:
            with contextlib.suppress(Exception):  # a peer may be gone
                dist.destroy_process_group()
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)  # nothing of the interpreter's end is under test


def outcomes_of_ranks(
    size: int, function: Callable[..., Any], *args: Any, group: bool = True
) -> list[tuple[str, Any]]:
    """`function(rank, *args)` in `size` processes: ("result", value), ("error", text) or (KILLED,
    None) of each. Both must be importable and picklable."""
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store") if group else None
        children, pipes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            child = context.Process(
                target=_child, args=(rank, size, store, there, function, args), daemon=True
            )
            child.start()
            there.close()
            children.append(child)
            pipes.append(here)
        outcomes: list[tuple[str, Any]] = []
        deadline = time.monotonic() + TIMEOUT_S
        try:
            for child, pipe in zip(children, pipes, strict=True):
                outcomes.append(_outcome(child, pipe, deadline))
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                child.join(30)
        return outcomes


def _outcome(child: Any, pipe: Any, deadline: float) -> tuple[str, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise AssertionError(f"rank process {child.pid} did not answer: it hangs")
    try:
        outcome: tuple[str, Any] = pipe.recv()
    except EOFError:
        return KILLED, None
    return outcome


@contextlib.contextmanager
def running(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """One process that runs `function(0, *args)` until the block ends, and is then killed."""
    context = _context()
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(0, 1, None, there, function, args), daemon=True)
    child.start()
    there.close()
    try:
        yield child
    finally:
        child.kill()
        child.join(30)
        here.close()
