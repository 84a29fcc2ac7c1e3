"""``dynamicemb verify``: whether checkpoints are what was written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.replaced import tried_again
from dynamicemb.cli.arguments import Parser, option
from dynamicemb.cli.contents.base import Content, Damage
from dynamicemb.cli.contents.checkpoints import ChainContent
from dynamicemb.cli.contents.checks import check_table, stray_files
from dynamicemb.cli.contents.find import (
    NothingToReadError,
    ReadOptions,
    chains_of_run,
    open_content,
    steps_of_run,
)
from dynamicemb.cli.contents.partition import default_memory
from dynamicemb.cli.output import Output, bytes_text
from dynamicemb.errors import DynamicEmbError, ReplacedCheckpointError, UsageError, check_path

DAMAGED = 1


@dataclass
class VerifyOptions(ReadOptions):
    """Every option; the order is that of the help."""

    memory_mb: int | None = option(
        None, "memory for ids, in MiB (default: a quarter of what is free)", minimum=1
    )
    json: bool = option(False, "one JSON object instead of text")


@dataclass
class Verified:
    """What came out of one checkpoint; ``tables``, ``rows`` and ``bytes``: what was looked at."""

    path: str
    layout: str = ""
    tables: int = 0
    rows: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "ok": not self.damages}


def main(arguments: Sequence[str]) -> int:
    """Run the command; 0 if all is right, 1 if something is damaged."""
    parser = Parser(
        "verify",
        "Compare every checksum, and see that each id has one row, in the part of its "
        "rank, that indexes find every row, and that deltas make a chain. Names the file, the "
        "table and the place of all damage. Of a training run: every checkpoint and chain in it.",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    options, given = parser.read(VerifyOptions, arguments)
    paths = [check_path("PATH", path, "a file or folder") for path in given["paths"]]
    done = [one for path in paths for one in _verify(path, options)]
    bad = any(one.damages for one in done)
    if options.json:
        facts = {"ok": not bad, "checkpoints": [one.facts() for one in done]}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        output = Output()
        for one in done:
            _print(output, one)
    return DAMAGED if bad else 0


def _verify(path: str, options: VerifyOptions) -> list[Verified]:
    steps, chains = steps_of_run(path), chains_of_run(path)
    if not steps and not chains:
        return [tried_again(lambda: _verify_one(path, options))]
    found = [_verify_part(chain, chain, options) for chain in chains]
    found += [_verify_part(step, os.path.join(step, "tables"), options) for step in steps]
    return [one for one in found if one is not None]


def _verify_part(part: str, tables: str, options: VerifyOptions) -> Verified | None:
    """A checkpoint or a chain of a run; ``None`` if the run has removed it meanwhile."""
    try:
        done = tried_again(lambda: _verify_one(tables, options))
        if part != tables:
            done.path = part
            done.damages = [*_check_run_state(Path(part)), *done.damages]
    except (NothingToReadError, ReplacedCheckpointError):
        if os.path.isdir(part):
            raise
        return None
    return done if os.path.isdir(part) else None


def _check_run_state(step: Path) -> list[Damage]:
    """What is wrong with what a run keeps beside its tables."""
    from dynamicemb.cli.training.saving import check_files

    try:
        check_files(step)
    except DynamicEmbError as error:
        return [Damage(str(error), str(step))]
    return []


def _verify_one(path: str, options: VerifyOptions) -> Verified:
    done = Verified(path)
    try:
        content = open_content(path, options)
    except (NothingToReadError, ReplacedCheckpointError, UsageError):
        raise
    except DynamicEmbError as error:
        done.damages.append(Damage(str(error)))
        return done
    with content:
        done.layout = content.layout
        done.tables = len(content.tables)
        done.notes = list(content.notes)
        if not content.checksums:
            done.notes.append(f"{content.layout} has no checksums: damage may not be seen")
        parts: Sequence[Content] = [content]
        if isinstance(content, ChainContent):
            for link in content.contents:
                link.choose(options.table, options.rank)
            parts = content.contents
        total = sum(table.bytes for part in parts for table in part.tables)
        memory = default_memory() if options.memory_mb is None else options.memory_mb << 20
        with ProgressBar(f"verify {path}", total) as progress:
            for part in parts:
                done.notes += [f"{one} is not of the checkpoint" for one in stray_files(part)]
                for table in part.tables:
                    done.rows += table.rows
                    done.bytes += table.bytes
                    done.damages += check_table(part, table, memory, progress.add)
    return done


def _print(output: Output, one: Verified) -> None:
    word = "damaged" if one.damages else "ok"
    about = ""
    if one.layout:
        about = (
            f", {one.layout}, {one.tables} table{'s' * (one.tables != 1)}, {one.rows:,} rows, "
            f"{bytes_text(one.bytes)}"
        )
    output.title(f"{one.path}: {word}{about}")
    for note in one.notes:
        output.line(f"  note: {note}")
    for damage in one.damages:
        where = f"table {damage.table}: " if damage.table else ""
        output.line(f"  {where}{damage.problem}")
