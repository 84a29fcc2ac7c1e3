"""What processes of test_train_ranks.py run; a module of its own, which imports little."""

from __future__ import annotations

from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.errors import UsageError


def fails_on_the_last(ranks: Ranks) -> int:
    if ranks.rank == ranks.size - 1:
        raise UsageError(f"rank {ranks.rank} does not like it")
    ranks.wait()  # for ever, unless it is ended
    return 0
