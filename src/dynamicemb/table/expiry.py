"""Rows that were not used for long leave, a part of the slots with every training batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamicemb.errors import InvalidArgumentError, check_integer, check_number, wrong_value
from dynamicemb.options import DynamicEmbScoreStrategy

if TYPE_CHECKING:
    from dynamicemb.table.base import Table

#: Slots that a batch looks at, at least.
MIN_SLOTS = 4096


class Expiry:
    """See :meth:`Table.expire_after`."""

    def __init__(self, table: Table, *, age: float | None, steps: int | None, sweep: int) -> None:
        if (age is None) == (steps is None):
            raise InvalidArgumentError(
                f"age is {age!r} and steps is {steps!r}; allowed: one of them, the other None"
            )
        strategy = table.options.score_strategy
        stepped = strategy is DynamicEmbScoreStrategy.STEP
        timed = isinstance(strategy, tuple) or strategy is DynamicEmbScoreStrategy.TIMESTAMP
        if steps is not None:
            self._ttl = check_integer("steps", steps, minimum=1, maximum=2**63)
            if not stepped:
                raise wrong_value("steps", steps, f"None: scores of {table.name!r} count no steps")
        else:
            self._ttl = int(check_number("age", age, above=0, maximum=1e9) * 1e9)
            if not timed:
                raise wrong_value("age", age, f"None: scores of {table.name!r} are no timestamps")
        self._stepped = stepped
        self.sweep = check_integer("sweep", sweep, minimum=1)

    def after_batch(self, table: Table) -> None:
        """Look at the next part of the slots."""
        now = table.step - 1 if self._stepped else table.get_score()
        if now > self._ttl:
            slots = max(MIN_SLOTS, -(-table.capacity // self.sweep))
            table.sweep(now - self._ttl, slots=slots)
