"""``dynamicemb inspect``: what a checkpoint holds, or the rows of some ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.replaced import tried_again
from dynamicemb.checkpoint.scores import strategy_names
from dynamicemb.cli.arguments import Parser, option
from dynamicemb.cli.contents.base import Batch, Columns, Content, Damage, TableInfo
from dynamicemb.cli.contents.find import ReadOptions, open_content
from dynamicemb.cli.contents.statistics import Statistics, age_text, unsigned
from dynamicemb.cli.output import Output, bar, bytes_text
from dynamicemb.errors import (
    DynamicEmbError,
    InvalidArgumentError,
    ReplacedCheckpointError,
    wrong_value,
)
from dynamicemb.hashing import signed
from dynamicemb.texts import text_id

DIFFERENT = 1


def _id(name: str, value: str) -> str:
    try:
        number = int(value.replace(",", "").replace("_", ""), 0)
    except ValueError:
        number = 2**64
    if not -(2**63) <= number < 2**64:
        raise wrong_value(name, value, "an integer of 64 bits, as -5, 42 or 0x2a")
    return str(signed(number))


def _text(name: str, value: str) -> str:
    """``value``, if it has an id."""
    try:
        text_id(value)
    except InvalidArgumentError:
        raise wrong_value(name, value, "text in UTF-8") from None
    return value


@dataclass
class InspectOptions(ReadOptions):
    """Every option; the order is that of the help."""

    id: list[str] = option(  # noqa: RUF009
        (), "show the row of this id instead", repeated=True, check=_id
    )
    text: list[str] = option(  # noqa: RUF009
        (),
        "show the row of this text instead, as a text column of `dynamicemb train` has it",
        repeated=True,
        check=_text,
    )
    top: int = option(5, "how many of the newest and the largest rows are named", minimum=0)
    verify: bool = option(
        True, "read all files and compare their checksums; without, ids and scores alone are read"
    )
    quick: bool = option(False, "read no rows at all: only what the files say of themselves")
    json: bool = option(False, "one JSON object instead of text")


def main(arguments: Sequence[str]) -> int:
    """Run the command; 0, or 1 if something is damaged or an id has no row."""
    parser = Parser(
        "inspect",
        "Show the tables of a checkpoint, a chain of deltas, the newest checkpoint of "
        "a training run, a dump of upstream, a OneEmbedding folder, or of safetensors, Parquet and "
        "NumPy files. Rows are streamed; memory does not grow with the tables.",
    )
    parser.add_argument("path", metavar="CHECKPOINT")
    options, given = parser.read(InspectOptions, arguments)

    def show() -> int:
        with open_content(given["path"], options) as content:
            if options.id or options.text:
                return _show_rows(content, options)
            return _show_tables(content, options)

    return tried_again(show)


# ---- rows of some ids ----


def _show_rows(content: Content, options: InspectOptions) -> int:
    wanted: list[tuple[int, str | None]] = [(int(one), None) for one in options.id]
    wanted += [(text_id(one), one) for one in options.text]
    ids = torch.tensor(sorted({number for number, _ in wanted}), device="cpu")
    found = {table.key: content.find(table, ids) for table in content.tables}
    rows = [
        _row_facts(table, found[table.key], number, text)
        for number, text in wanted
        for table in content.tables
    ]
    if options.json:
        sys.stdout.write(json.dumps({"path": content.path, "rows": rows}) + "\n")
    else:
        _print_rows(Output(), rows)
    missing = [n for n, _ in wanted if not any(r["found"] and r["id"] == n for r in rows)]
    return DIFFERENT if missing else 0


def _row_facts(table: TableInfo, batch: Batch, number: int, text: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {} if text is None else {"text": text}
    facts |= {"id": number, "table": table.label, "found": False}
    which = (batch.ids == number).nonzero().squeeze(1)
    if not len(which):
        return facts
    one = batch.some(which[:1])
    assert one.embeddings is not None
    facts |= {"found": True, "embedding": one.embeddings[0].float().tolist()}
    if one.state is not None:
        facts["state"] = one.state[0].tolist()
    if one.scores is not None:
        words = one.scores[0].reshape(-1).tolist()
        facts["scores"] = {
            name: unsigned(word) for name, word in zip(table.score_names, words, strict=True)
        }
        if "TIMESTAMP" in table.score_names and table.clock is not None:
            facts["age_seconds"] = (table.clock - facts["scores"]["TIMESTAMP"]) / 1e9
    return facts


def _print_rows(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        name = f"id {row['id']}"
        if "text" in row:
            name = f"text {row['text']!r} ({name})"
        if not row["found"]:
            output.line(f"{name} has no row in {row['table']}")
            continue
        output.title(f"{name} in {row['table']}")
        output.line(f"  embedding  {_numbers(row['embedding'])}")
        if "state" in row:
            output.line(f"  state      {_numbers(row['state'])}")
        for name, word in row.get("scores", {}).items():
            age = ""
            if name == "TIMESTAMP" and "age_seconds" in row:
                age = f"  ({age_text(round(row['age_seconds'] * 1e9))} before the dump)"
            output.line(f"  {name.lower():9}  {word}{age}")


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.7g}" for value in values)


# ---- all tables ----


@dataclass
class _Inspected:
    """What is known of one table; statistics only as far as rows were read."""

    table: TableInfo
    statistics: Statistics | None
    damages: list[Damage]


def _show_tables(content: Content, options: InspectOptions) -> int:
    inspected = _inspect(content, options)
    damaged = any(one.damages for one in inspected)
    verified = options.verify and not options.quick and content.checksums
    if options.json:
        facts = {
            "path": content.path,
            "layout": content.layout,
            **content.facts,
            "notes": content.notes,
            "verified": verified,
            "damaged": damaged,
            "tables": [_table_facts(one) for one in inspected],
        }
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        output = Output()
        _print_content(output, content, inspected)
        for one in inspected:
            _print_table(output, one)
        for one in inspected:
            for damage in one.damages:
                output.line(f"damaged: {damage.problem}")
        if verified and not damaged:
            output.line()
            output.line("checksums: all compared, all right")
        elif not damaged:
            why = "there are none" if not content.checksums else "not compared"
            output.line()
            output.line(f"checksums: {why}")
    return DIFFERENT if damaged else 0


def _inspect(content: Content, options: InspectOptions) -> list[_Inspected]:
    if options.quick:
        return [_Inspected(table, None, []) for table in content.tables]
    full = options.verify
    columns = Columns(values=full, state=full)
    total = sum(
        table.bytes if full else table.rows * table.row_bytes(columns) for table in content.tables
    )
    inspected = []
    with ProgressBar("inspect", total) as progress:
        for table in content.tables:
            statistics = Statistics(table, options.top)
            one = _Inspected(table, statistics, [])
            row_bytes = table.row_bytes(columns)
            try:
                for batch in content.batches(table, None, columns):
                    statistics.add(batch)
                    progress.add(row_bytes * len(batch))
            except ReplacedCheckpointError:
                raise
            except DynamicEmbError as error:
                # Every block that is damaged, not only the first that rows were needed of.
                one.damages = [
                    found
                    for found in content.damages(table, skip_rows=False)
                    if isinstance(found, Damage)
                ] or [Damage(str(error), table=table.label)]
                one.statistics = None
            else:
                if full:
                    for found in content.damages(table, skip_rows=True):
                        if isinstance(found, Damage):
                            one.damages.append(found)
                        else:
                            progress.add(found)
            inspected.append(one)
    return inspected


def _table_facts(one: _Inspected) -> dict[str, Any]:
    table, statistics = one.table, one.statistics
    facts: dict[str, Any] = {
        "collection": table.collection,
        "name": table.name,
        "rank": table.rank,
        "rows": table.rows if statistics is None else statistics.rows,
        "dim": table.dim,
        "dtype": str(table.dtype).removeprefix("torch."),
        "optimizer": None
        if table.optimizer is None
        else {
            "kind": table.optimizer.kind.name,
            "args": asdict(table.optimizer.args),
        },
        "state_dim": table.state_dim,
        "score_strategy": None if table.strategy is None else strategy_names(table.strategy),
        "dist_type": None if table.routing is None else table.routing.dist_type,
        "rows_of_ranks": [part.rows for part in table.parts],
        "counted_ids": table.counted,
        "clock": table.clock,
        "progress": asdict(table.parts[0].progress) if table.parts else None,
        "bytes": table.bytes,
        "damages": [asdict(damage) for damage in one.damages],
    }
    if statistics is not None:
        facts |= {
            "lowest_id": statistics.lowest_id,
            "highest_id": statistics.highest_id,
            "rows_not_finite": statistics.not_finite,
            "scores": {
                name: {
                    "lowest": histogram.lowest,
                    "highest": histogram.highest,
                    "histogram": [
                        {"bin": label, "rows": count} for label, count in histogram.bins()
                    ],
                }
                for name, histogram in statistics.histograms.items()
            },
            "newest": [{"id": id_, "score": score} for id_, score in statistics.newest],
            "largest": [{"id": id_, "norm": norm} for id_, norm in statistics.largest],
        }
    return facts


def _print_content(output: Output, content: Content, inspected: Sequence[_Inspected]) -> None:
    facts = content.facts
    output.title(f"{content.path}: {content.layout}")
    if "created" in facts:
        output.line(
            f"{facts['id']}, {facts['created']}, dynamicemb {facts['library']}, "
            f"{_ranks(facts['ranks'])}"
        )
    if "snapshot" in facts:
        names = ", ".join(facts["snapshots"])
        output.line(f"snapshot {facts['snapshot']} of {names}; {_ranks(facts['ranks'])}")
    for note in content.notes:
        output.line(f"note: {note}")
    if facts.get("deltas"):
        output.line()
        output.table(
            ("delta", "created", "rows", "removed", "bytes"),
            [
                (
                    str(one["sequence"]),
                    str(one["created"]),
                    f"{one['rows']:,}",
                    f"{one['removed']:,}",
                    bytes_text(one["bytes"]),
                )
                for one in facts["deltas"]
            ],
            numbers=(0, 2, 3, 4),
        )
    output.line()
    header = ("table", "rows", "dim", "dtype", "optimizer", "state", "scores", "ranks", "bytes")
    output.table(header, [_summary(one) for one in inspected], numbers=(1, 2, 5, 7, 8))


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _summary(one: _Inspected) -> tuple[str, ...]:
    table = one.table
    return (
        table.label,
        f"{table.rows if one.statistics is None else one.statistics.rows:,}",
        str(table.dim),
        str(table.dtype).removeprefix("torch."),
        "-" if table.optimizer is None else table.optimizer.kind.name,
        str(table.state_dim) if table.state_dim else "-",
        "-" if table.strategy is None else " ".join(strategy_names(table.strategy)),
        str(len(table.parts)),
        bytes_text(table.bytes),
    )


def _print_table(output: Output, one: _Inspected) -> None:
    table, statistics = one.table, one.statistics
    if statistics is None:
        return
    output.line()
    output.title(table.label)
    if not statistics.rows:
        output.line("  no rows")
        return
    output.line(
        f"  rows {statistics.rows:,}, ids {statistics.lowest_id} to {statistics.highest_id}"
    )
    if table.counted is not None:
        output.line(f"  admission counter: {table.counted:,} ids")
    if statistics.not_finite:
        output.line(f"  {statistics.not_finite:,} rows have NaN or infinity")
    for name, histogram in statistics.histograms.items():
        _print_histogram(output, table, name, histogram.bins())
    if statistics.newest:
        kind = "most frequent" if table.score_names[0] == "LFU" else "newest"
        output.line(f"  {kind} (highest scores): {_newest(table, statistics.newest)}")
    if statistics.largest:
        shown = ", ".join(f"{id_} ({norm:.4g})" for id_, norm in statistics.largest)
        output.line(f"  largest (norm): {shown}")


def _newest(table: TableInfo, newest: Sequence[tuple[int, int]]) -> str:
    if table.score_names[0] == "TIMESTAMP" and table.clock is not None:
        return ", ".join(f"{id_} ({age_text(table.clock - score)})" for id_, score in newest)
    return ", ".join(f"{id_} ({score:,})" for id_, score in newest)


def _print_histogram(
    output: Output, table: TableInfo, name: str, bins: Sequence[tuple[str, int]]
) -> None:
    most = max((count for _, count in bins), default=1)
    output.line(f"  scores ({name}):")
    output.table(
        ("", "", "rows", ""),
        [("", label, f"{count:,}", bar(count / most)) for label, count in bins],
        numbers=(1, 2),
    )
