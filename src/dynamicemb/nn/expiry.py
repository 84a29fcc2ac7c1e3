"""Rows that were not used for long leave the dynamic tables of a model."""

from __future__ import annotations

from torch import nn

from dynamicemb.errors import UsageError
from dynamicemb.nn.discovery import find_collections, tables_of


def expire_rows(
    model: nn.Module, *, age: float | None = None, steps: int | None = None, sweep: int = 1000
) -> None:
    """From now on, evict rows whose last use is longer ago than ``age`` seconds or ``steps``
    training batches, in every dynamic table of ``model``; see ``Table.expire_after``.

    ``age`` needs scores with timestamps, ``steps`` STEP scores. Work per training batch is bounded:
    one ``sweep``-th of a table's slots. The ids are among the removals of
    ``incremental_dump(removed=True)`` and of deltas. Not saved with a model: call it again after
    loading. With neither ``age`` nor ``steps``, nothing expires any longer.

    Raises:
        UsageError: the model has no dynamic table, or one with a store below, whose rows do not
            expire. InvalidArgumentError: scores of a table are no such time. Nothing is changed
            then.
    """
    collections = find_collections(model)
    if not collections:
        raise UsageError("the model has no dynamic embedding table")
    tables = [table for modules in collections.values() for _, table in tables_of(modules).values()]
    for table in tables:  # all or none
        table.check_expiry(age=age, steps=steps, sweep=sweep)
    for table in tables:
        table.expire_after(age=age, steps=steps, sweep=sweep)
