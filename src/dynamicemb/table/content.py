"""A table's content as tensors, for ``state_dict`` and pickling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

import torch

from dynamicemb.errors import InvalidArgumentError, wrong_type, wrong_value
from dynamicemb.hashing import signed
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table.rows import Progress

if TYPE_CHECKING:
    from dynamicemb.table.base import Table

FORMAT = 1
#: The tensors of a table's content.
NAMES = ("ids", "embeddings", "state", "scores", "counter_ids", "counter_counts", "meta")
# The numbers of "meta", in order.
_META = (
    "format",
    "optimizer",
    "step",
    "has_custom_score",
    "custom_score",
    "iteration",
    "next_row_number",
    "admission_calls",
    "seed",
)


def save(table: Table) -> dict[str, torch.Tensor]:
    """See :meth:`Table.state_dict`."""
    batches = list(table.export())
    empty = table.empty_rows(0)
    progress = table.progress()
    numbers = {
        "format": FORMAT,
        "optimizer": int(table.optimizer.kind),
        "has_custom_score": int(progress.custom_score is not None),
        **{name: value or 0 for name, value in asdict(progress).items()},
    }
    counter_ids = counter_counts = torch.empty(0, dtype=torch.int64, device=table.device)
    counted = table.export_counter()
    if counted is not None:
        counter_ids, counter_counts = counted
    return {
        "ids": torch.cat([empty.ids, *(rows.ids for rows in batches)]),
        "embeddings": torch.cat([empty.embeddings, *(rows.embeddings for rows in batches)]),
        "state": torch.cat([empty.state, *(rows.state for rows in batches)]),
        "scores": torch.cat([empty.scores, *(rows.scores for rows in batches)]),
        "counter_ids": counter_ids,
        "counter_counts": counter_counts.clone(),
        "meta": torch.tensor(
            [signed(numbers[name]) for name in _META], dtype=torch.int64, device="cpu"
        ),
    }


def optimizer_kind(state: Mapping[str, torch.Tensor]) -> OptimizerKind:
    """The optimizer whose state the content holds."""
    return OptimizerKind(_numbers(state)["optimizer"])


def check(table: Table, state: Mapping[str, torch.Tensor], kind: OptimizerKind) -> None:
    """Raise unless the content fits a table whose optimizer is of ``kind``."""
    _checked(table, state, kind)


def _checked(
    table: Table, state: Mapping[str, torch.Tensor], kind: OptimizerKind
) -> tuple[torch.Tensor, ...]:
    if optimizer_kind(state) is not kind:
        raise InvalidArgumentError(
            f"the content of table {table.name!r} has the state of {optimizer_kind(state).name}; "
            f"allowed: {kind.name}, the table's optimizer"
        )
    ids = table.check_ids("ids", state["ids"])
    count = len(ids)
    state_dim = Optimizer(kind, OptimizerArgs()).state_dim(table.dim)
    counter_ids = table.check_ids("counter_ids", state["counter_ids"])
    return (
        ids,
        table.check_rows("embeddings", state["embeddings"], count, table.dim, table.dtype),
        table.check_rows("state", state["state"], count, state_dim, torch.float32),
        table.check_scores(state["scores"], count),
        counter_ids,
        table.check_counts(state["counter_counts"], len(counter_ids)),
    )


def load(table: Table, state: Mapping[str, torch.Tensor]) -> int:
    """See :meth:`Table.load_state_dict`."""
    numbers = _numbers(state)
    ids, embeddings, rows, scores, counter_ids, counts = _checked(
        table, state, table.optimizer.kind
    )
    if len(ids) > table.max_slots:  # the last to come stay: those with the highest scores
        words = scores if scores.dim() == 1 else scores[:, -1]
        order = torch.argsort(words ^ -(2**63), stable=True)  # as unsigned numbers
        ids, embeddings, rows, scores = (x[order] for x in (ids, embeddings, rows, scores))
    table.clear()
    before = table.stats()
    step = 65536
    for begin in range(0, len(ids), step):
        part = slice(begin, begin + step)
        table.write_rows(ids[part], embeddings[part], rows[part], scores[part])
    after = table.stats()
    custom = numbers["custom_score"] if numbers["has_custom_score"] else None
    others = {f.name: numbers[f.name] for f in fields(Progress) if f.name != "custom_score"}
    table.restore_progress(Progress(custom_score=custom, **others))
    table.restore_counter(counter_ids, counts)
    return after.evictions - before.evictions + after.failures - before.failures


def _numbers(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    missing = [name for name in NAMES if name not in state]
    if missing:
        raise InvalidArgumentError(f"the content has no {', '.join(missing)}; needed: {NAMES}")
    meta = state["meta"]
    if not isinstance(meta, torch.Tensor):
        raise wrong_type("meta", meta, "a tensor")
    if meta.dtype != torch.int64 or meta.shape != (len(_META),) or int(meta[0]) != FORMAT:
        raise InvalidArgumentError(
            f"meta is {meta!r}; allowed: {len(_META)} int64 numbers of format {FORMAT}"
        )
    numbers = {name: value % 2**64 for name, value in zip(_META, meta.tolist(), strict=True)}
    if numbers["optimizer"] not in tuple(OptimizerKind):
        raise wrong_value("the optimizer of meta", numbers["optimizer"], f"{list(OptimizerKind)}")
    return numbers
