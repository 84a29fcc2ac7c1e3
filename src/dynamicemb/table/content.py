"""A table's content as tensors, for ``state_dict`` and pickling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

import torch

from dynamicemb.errors import InvalidArgumentError, wrong_type, wrong_value
from dynamicemb.hashing import signed
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table.rows import Progress

if TYPE_CHECKING:
    from dynamicemb.table.base import Table

FORMAT = 2
#: The tensors of a table's content. Empty ones are left out: their memory has no address, and
#: libraries that look for shared memory take them for one tensor.
NAMES = ("ids", "embeddings", "state", "scores", "counter_ids", "counter_counts", "meta")
#: Those that every table with rows has.
ALWAYS = ("ids", "embeddings", "scores", "meta")
# The numbers of "meta", in order; format 1 ended before "rows".
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
    "rows",
    "counted",
)
_META_1 = _META[:-2]


def save(table: Table) -> dict[str, torch.Tensor]:
    """See :meth:`Table.state_dict`."""
    batches = list(table.export())
    empty = table.empty_rows(0)
    counter_ids = counter_counts = torch.empty(0, dtype=torch.int64, device=table.device)
    counted = table.export_counter()
    if counted is not None:
        counter_ids, counter_counts = counted
    content = {
        "ids": torch.cat([empty.ids, *(rows.ids for rows in batches)]),
        "embeddings": torch.cat([empty.embeddings, *(rows.embeddings for rows in batches)]),
        "state": torch.cat([empty.state, *(rows.state for rows in batches)]),
        "scores": torch.cat([empty.scores, *(rows.scores for rows in batches)]),
        "counter_ids": counter_ids,
        "counter_counts": counter_counts.clone(),
    }
    progress = table.progress()
    numbers = {
        "format": FORMAT,
        "optimizer": int(table.optimizer.kind),
        "has_custom_score": int(progress.custom_score is not None),
        **{name: value or 0 for name, value in asdict(progress).items()},
        "rows": len(content["ids"]),
        "counted": len(counter_ids),
    }
    meta = torch.tensor([signed(numbers[name]) for name in _META], dtype=torch.int64, device="cpu")
    return {**{name: one for name, one in content.items() if one.numel()}, "meta": meta}


def optimizer_kind(state: Mapping[str, torch.Tensor]) -> OptimizerKind:
    """The optimizer whose state the content holds."""
    return OptimizerKind(_numbers(state)["optimizer"])


def whole(
    table: Table, state: Mapping[str, torch.Tensor], kind: OptimizerKind
) -> dict[str, torch.Tensor]:
    """The content of a table whose optimizer is of ``kind``, with its empty tensors; raises if it
    lacks others."""
    numbers = _numbers(state)
    rows = numbers.get("rows", _length(state, "ids"))
    counted = numbers.get("counted", _length(state, "counter_ids") or 0)
    empty = table.empty_rows(0)
    empties = {
        "ids": (rows, empty.ids),
        "embeddings": (rows, empty.embeddings),
        "state": (rows, empty.state.new_empty(0, _state_dim(table, kind))),
        "scores": (rows, empty.scores),
        "counter_ids": (counted, empty.ids),
        "counter_counts": (counted, empty.ids),
    }
    content, missing = dict(state), []
    for name, (count, one) in empties.items():
        if name in state:
            continue
        if count is None or count * one.shape[1:].numel():
            missing.append(name)
        else:
            content[name] = one.new_empty((count, *one.shape[1:]))
    if missing:
        raise InvalidArgumentError(
            f"the content of table {table.name!r} has no {', '.join(missing)}; allowed: all that "
            "was saved, but for empty tensors"
        )
    for name, count in (("ids", rows), ("counter_ids", counted)):
        there = _length(content, name)
        if there not in (None, count):  # another shape is refused later
            raise InvalidArgumentError(
                f"the content of table {table.name!r} has {there} {name}; allowed: {count}, as "
                "many as were saved"
            )
    return content


def _length(state: Mapping[str, torch.Tensor], name: str) -> int | None:
    one = state.get(name)
    return len(one) if isinstance(one, torch.Tensor) and one.dim() == 1 else None


def merge(contents: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows of several whole contents, and the numbers of the one that is furthest."""
    merged = {name: torch.cat([one[name] for one in contents]) for name in NAMES[:-1]}
    furthest = max(one["meta"][1 : len(_META_1)].tolist() for one in contents)
    numbers = [FORMAT, *furthest, len(merged["ids"]), len(merged["counter_ids"])]
    merged["meta"] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return merged


def check(table: Table, state: Mapping[str, torch.Tensor], kind: OptimizerKind) -> None:
    """Raise unless the content fits a table whose optimizer is of ``kind``."""
    _checked(table, state, kind)


def _state_dim(table: Table, kind: OptimizerKind) -> int:
    return Optimizer(kind, OptimizerArgs()).state_dim(table.dim)


def _checked(
    table: Table, state: Mapping[str, torch.Tensor], kind: OptimizerKind
) -> tuple[torch.Tensor, ...]:
    if optimizer_kind(state) is not kind:
        raise InvalidArgumentError(
            f"the content of table {table.name!r} has the state of {optimizer_kind(state).name}; "
            f"allowed: {kind.name}, the table's optimizer"
        )
    content = whole(table, state, kind)
    ids = table.check_ids("ids", content["ids"])
    count = len(ids)
    counter_ids = table.check_ids("counter_ids", content["counter_ids"])
    return (
        ids,
        table.check_rows("embeddings", content["embeddings"], count, table.dim, table.dtype),
        table.check_rows("state", content["state"], count, _state_dim(table, kind), torch.float32),
        table.check_scores(content["scores"], count),
        counter_ids,
        table.check_counts(content["counter_counts"], len(counter_ids)),
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
    if "meta" not in state:
        raise InvalidArgumentError("the content has no meta, which is always saved")
    meta = state["meta"]
    if not isinstance(meta, torch.Tensor):
        raise wrong_type("meta", meta, "a tensor")
    names = {len(_META): _META, len(_META_1): _META_1}.get(meta.numel())
    form = FORMAT if names is _META else 1
    if meta.dtype != torch.int64 or meta.dim() != 1 or names is None or int(meta[0]) != form:
        raise InvalidArgumentError(
            f"meta is {meta!r}; allowed: {len(_META)} int64 numbers of format {FORMAT}, or "
            f"{len(_META_1)} of format 1"
        )
    numbers = {name: value % 2**64 for name, value in zip(names, meta.tolist(), strict=True)}
    if numbers["optimizer"] not in tuple(OptimizerKind):
        raise wrong_value("the optimizer of meta", numbers["optimizer"], f"{list(OptimizerKind)}")
    return numbers
