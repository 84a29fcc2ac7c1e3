"""The processes of a run, and what they say to each other."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from dynamicemb.errors import DynamicEmbError, UsageError

MISTAKE = 2


class Ranks:
    """This process among ``size``; every method is called by all of them."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, at the first; nothing at the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values)
        return values or []

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks, at each of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, value: int) -> int:
        """The first rank's value."""
        if self.size == 1:
            return value
        told = torch.tensor([value], device="cpu")
        dist.broadcast(told, 0)
        return int(told.item())

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def start_ranks(size: int, work: Callable[..., int], *args: Any) -> int:
    """Call ``work(ranks, *args)`` in ``size`` processes with a process group; returns the greatest
    of their results. ``work`` is a function of a module. A mistake that a rank finds is raised."""
    with tempfile.TemporaryDirectory(prefix="dynamicemb-") as folder:
        context = start_processes(
            _rank, (size, folder, work, args), nprocs=size, join=False, start_method="spawn"
        )
        assert context is not None
        with _signals_to(context.pids()):
            try:
                while not context.join():
                    pass
            except ProcessExitedException:
                mistakes = sorted(Path(folder).glob("mistake-*"))
                if not mistakes:
                    raise
                raise UsageError(mistakes[0].read_text()) from None
        return max(int(one.read_text()) for one in Path(folder).glob("result-*"))


def torchrun_size() -> int | None:
    """How many processes torchrun started, of which this is one; ``None``: it was not torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def join_ranks(size: int, work: Callable[..., int], *args: Any) -> int:
    """``work(ranks, *args)`` in this process, one of the ``size`` that torchrun started."""
    dist.init_process_group("gloo")
    result = work(Ranks(dist.get_rank(), size), *args)
    dist.destroy_process_group()
    return result


@contextmanager
def _signals_to(processes: Sequence[int]) -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal, so this one only waits; SIGTERM is passed on."""

    def pass_on(number: int, _: object) -> None:
        for process in processes:
            os.kill(process, number)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def _rank(rank: int, size: int, folder: str, work: Callable[..., int], args: Any) -> None:
    store = FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        result = work(Ranks(rank, size), *args)
    except (DynamicEmbError, OSError) as error:
        Path(folder, f"mistake-{rank}").write_text(str(error))
        os._exit(MISTAKE)  # the others may wait for this rank; the parent ends them
    Path(folder, f"result-{rank}").write_text(str(result))
    dist.destroy_process_group()
