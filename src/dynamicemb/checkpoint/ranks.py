"""The ranks that write or read a checkpoint together: all succeed, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dynamicemb.checkpoint.replaced import RETRIED, OtherRankError
from dynamicemb.errors import CheckpointError

ResultT = TypeVar("ResultT")


class Ranks:
    """The ranks of a process group (``None``: of the default one, or this process alone)."""

    def __init__(self, group: Any = None) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1
        if self.rank < 0:
            raise CheckpointError("this process is not in the process group pg; allowed: its ranks")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], ResultT]) -> list[ResultT]:
        """Do ``work`` on every rank; the results of all. If it raises on one rank it raises on all:
        there what it raised, elsewhere a ``CheckpointError`` that names the rank. Either all ranks
        raise an error after which ``tried_again`` retries, or none does."""
        result: ResultT | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # the others wait for this rank's answer
            failure = error
        if self.size == 1:
            if failure is not None:
                raise failure
            return [result]  # type: ignore[list-item]
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers = self.gather((message, isinstance(failure, RETRIED), result))
        failures = [
            (rank, text, soft) for rank, (text, soft, _) in enumerate(answers) if text is not None
        ]
        again = all(soft for _, _, soft in failures)
        if failure is not None:
            if isinstance(failure, RETRIED) and not again:
                raise CheckpointError(str(failure)) from failure
            raise failure
        for rank, text, _ in failures:
            kind = OtherRankError if again else CheckpointError
            raise kind(f"rank {rank} of {self.size} failed: {text}")
        return [value for _, _, value in answers]

    def first(self, work: Callable[[], ResultT]) -> ResultT:
        """Do ``work`` on rank 0 alone; its result, on every rank. Raises on all if it raises."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


_background: dict[int, tuple[Any, Any]] = {}


def background_group(group: Any) -> Any:
    """A group of the same ranks whose messages do not mix with those of ``group``, for a thread.
    Made at the first call, which all ranks must make; ``None`` without process groups."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return None
    base = dist.group.WORLD if group is None else group
    known = _background.get(id(base))
    if known is None or known[0] is not base:
        ranks = dist.get_process_group_ranks(base)
        fresh = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _background[id(base)] = known = (base, fresh)
    return known[1]
