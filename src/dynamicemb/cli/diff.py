"""``dynamicemb diff``: what two checkpoints do not have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.replaced import tried_again
from dynamicemb.cli.arguments import Parser, option
from dynamicemb.cli.contents.base import Content, TableInfo
from dynamicemb.cli.contents.comparison import Compared, Comparison, Distance, What
from dynamicemb.cli.contents.find import ReadOptions, open_content
from dynamicemb.cli.contents.partition import default_memory
from dynamicemb.cli.output import Output

DIFFERENT = 1


@dataclass
class DiffOptions(ReadOptions):
    """Every option; the order is that of the help."""

    tolerance: float = option(
        0.0, "|difference| of numbers up to which rows are equal; scores must be equal", minimum=0.0
    )
    ids: int = option(0, "list up to N ids of each kind", minimum=0)
    state: bool = option(True, "compare optimizer state")
    scores: bool = option(True, "compare scores")
    memory_mb: int | None = option(
        None, "memory for rows, in MiB (default: a quarter of what is free)", minimum=1
    )
    json: bool = option(False, "one JSON object instead of text")


def main(arguments: Sequence[str]) -> int:
    """Run the command; 0 if nothing differs, 1 if something does."""
    parser = Parser(
        "diff",
        "Compare the rows of two checkpoints, of any layout, table by table. The order "
        "of rows and the number of ranks do not matter. Exit status: 0 equal, 1 different, 2 an "
        "error.",
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    options, given = parser.read(DiffOptions, arguments)
    return tried_again(lambda: _diff(given, options))


def _diff(given: Mapping[str, Any], options: DiffOptions) -> int:
    everything = replace(options, table=[])
    with open_content(given["a"], everything) as a, open_content(given["b"], everything) as b:
        for content in (a, b):
            if len(content.tables) > 1:  # what has one table means that
                content.choose(options.table)
        pairs, alone = _pairs(a, b)
        compared = _compare(a, b, pairs, options)
        counters = _counters(a, b, pairs)
        same = not alone and not counters and all(one.same for one in compared)
        if options.json:
            facts = {
                "a": given["a"],
                "b": given["b"],
                "equal": same,
                "tables": [_facts(one) for one in compared],
                "tables_only_a": [one.label for content, one in alone if content is a],
                "tables_only_b": [one.label for content, one in alone if content is b],
                "counters_differ": counters,
                "notes": [*a.notes, *b.notes],
            }
            sys.stdout.write(json.dumps(facts) + "\n")
        else:
            _print(Output(), a, b, compared, alone, counters, options)
    return 0 if same else DIFFERENT


Pair = tuple[TableInfo, TableInfo]


def _pairs(a: Content, b: Content) -> tuple[list[Pair], list[tuple[Content, TableInfo]]]:
    """Tables of the same name; with one table on each side, these two. And those without a
    partner."""
    if len(a.tables) == len(b.tables) == 1:
        return [(a.tables[0], b.tables[0])], []
    there = {table.key: table for table in b.tables}
    pairs = [(table, there[table.key]) for table in a.tables if table.key in there]
    paired = {table.key for table, _ in pairs}
    alone = [(side, one) for side in (a, b) for one in side.tables if one.key not in paired]
    return pairs, alone


def _compare(
    a: Content, b: Content, pairs: Sequence[Pair], options: DiffOptions
) -> list[Comparison]:
    memory = default_memory() if options.memory_mb is None else options.memory_mb << 20
    what = What(options.state, options.scores, options.tolerance)
    work = [
        (Compared((a, one), (b, other), what, ids=options.ids, memory=memory), one, other)
        for one, other in pairs
    ]
    sizes = [
        max(1, (one.bytes + other.bytes) // max(1, one.rows + other.rows)) for _, one, other in work
    ]
    total = sum(
        job.passes() * (one.rows + other.rows) * size
        for (job, one, other), size in zip(work, sizes, strict=True)
    )
    with ProgressBar("diff", total) as bar:
        return [
            job.compare(lambda rows, size=size: bar.add(rows * size))  # type: ignore[misc]
            for (job, _, _), size in zip(work, sizes, strict=True)
        ]


def _counters(a: Content, b: Content, pairs: Sequence[Pair]) -> list[str]:
    """The tables whose admission counters both have, and differ."""
    different = []
    for one, other in pairs:
        mine, theirs = a.counter(one), b.counter(other)
        if mine is not None and theirs is not None and not _equal_counts(mine, theirs):
            different.append(one.label)
    return different


Counts = tuple[torch.Tensor, torch.Tensor]


def _equal_counts(mine: Counts, theirs: Counts) -> bool:
    (ids, counts), (other_ids, other_counts) = (_ordered(mine), _ordered(theirs))
    return torch.equal(ids, other_ids) and torch.equal(counts, other_counts)


def _ordered(counts: Counts) -> Counts:
    order = torch.argsort(counts[0])
    return counts[0][order], counts[1][order]


def _facts(one: Comparison) -> dict[str, Any]:
    return {
        "table": one.label,
        "equal": one.same,
        "differs": one.differs,
        "rows_a": one.rows_a,
        "rows_b": one.rows_b,
        "only_a": one.only_a,
        "only_b": one.only_b,
        "rows_equal": one.equal,
        "rows_changed": one.changed,
        "scores_changed": one.scores_changed,
        "embeddings": _distance(one.embeddings),
        "state": _distance(one.state),
        "ids_only_a": one.ids_only_a,
        "ids_only_b": one.ids_only_b,
        "ids_changed": [{"id": id_, "difference": far} for id_, far in one.ids_changed],
    }


def _distance(one: Distance) -> dict[str, float] | None:
    return {"max": one.largest, "mean": one.mean} if one.numbers else None


def _print(
    output: Output,
    a: Content,
    b: Content,
    compared: Sequence[Comparison],
    alone: Sequence[tuple[Content, TableInfo]],
    counters: Sequence[str],
    options: DiffOptions,
) -> None:
    for letter, content in (("A", a), ("B", b)):
        output.line(f"{letter}: {content.path} ({content.layout})")
        for note in content.notes:
            output.line(f"   note: {note}")
    if compared:
        output.line()
        output.table(
            ("table", "rows A", "rows B", "only A", "only B", "equal", "changed", "scores"),
            [_counts(one) for one in compared],
            numbers=range(1, 8),
        )
        output.line()
        output.table(
            ("|A - B|", "embeddings: max", "mean", "state: max", "mean"),
            [_distances(one) for one in compared],
            numbers=range(1, 5),
        )
    for one in compared:
        for difference in one.differs:
            output.line(f"{one.label}: {difference}")
    for content, table in alone:
        output.line(f"{table.label} is only in {'A' if content is a else 'B'}")
    for label in counters:
        output.line(f"{label}: the admission counters differ")
    if options.ids:
        _print_ids(output, compared)
    same = not alone and not counters and all(one.same for one in compared)
    output.line()
    output.line("equal" if same else "different")


def _counts(one: Comparison) -> tuple[str, ...]:
    counts = (one.rows_a, one.rows_b, one.only_a, one.only_b, one.equal, one.changed)
    return (one.label, *(f"{count:,}" for count in (*counts, one.scores_changed)))


def _distances(one: Comparison) -> tuple[str, ...]:
    shown = [
        f"{value:.3g}" if distance.numbers else "-"
        for distance in (one.embeddings, one.state)
        for value in (distance.largest, distance.mean)
    ]
    return (one.label, *shown)


def _print_ids(output: Output, compared: Sequence[Comparison]) -> None:
    for one in compared:
        for kind, ids in (("only in A", one.ids_only_a), ("only in B", one.ids_only_b)):
            if ids:
                output.line(f"{one.label} {kind}: {', '.join(map(str, ids))}")
        if one.ids_changed:
            shown = ", ".join(f"{id_} ({far:.3g})" for id_, far in one.ids_changed)
            output.line(f"{one.label} changed most: {shown}")
