"""``dynamicemb convert``: tables from one layout to another."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamicemb.checkpoint.exchange import SUFFIXES
from dynamicemb.checkpoint.exchange_formats import FORMATS
from dynamicemb.checkpoint.progress import ProgressBar
from dynamicemb.checkpoint.replaced import tried_again
from dynamicemb.cli.arguments import Parser, option
from dynamicemb.cli.contents.base import Content
from dynamicemb.cli.contents.find import NothingToReadError, ReadOptions, open_content
from dynamicemb.cli.contents.staging import staged
from dynamicemb.cli.contents.writing import (
    LAYOUTS,
    SUFFIX_OF,
    Done,
    Names,
    Wanted,
    chosen,
    labels,
    losses,
    passes,
    write,
)
from dynamicemb.cli.output import Output, bytes_on_disk, bytes_text, printable
from dynamicemb.errors import DynamicEmbError, InvalidArgumentError, UsageError, check_path
from dynamicemb.options import SUPPORTED_DIST_TYPES


@dataclass
class ConvertOptions(ReadOptions):
    """Every option; the order is that of the help."""

    to: str | None = option(None, "the layout of DST; by its end if not given", choices=LAYOUTS)
    world_size: int | None = option(
        None, "of checkpoint, upstream, oneembedding: ranks (default: as SRC)", minimum=1
    )
    dist_type: str | None = option(
        None, "how ids are spread over them (default: as SRC)", choices=SUPPORTED_DIST_TYPES
    )
    collection: str | None = option(None, "another collection for the one table that is written")
    name: str | None = option(None, "another name for the one table that is written")
    snapshot_name: str = option("converted", "of oneembedding: what to call the snapshot")
    state: bool = option(True, "write optimizer state")
    scores: bool = option(True, "write scores")
    counter: bool = option(True, "write admission counters")
    serving_index: bool = option(False, "of checkpoint: add an index for faster lookups")
    overwrite: bool = option(False, "replace DST, if it is a checkpoint or a file of rows")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(
        "convert",
        "Write the tables of SRC, of any layout, to DST in another: a checkpoint, "
        "upstream's dump, safetensors, Parquet or NumPy files, or a OneEmbedding folder. DST is "
        "there when it is complete. What a layout cannot hold is said.",
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST")
    options, given = parser.read(ConvertOptions, arguments)
    target = Path(check_path("DST", given["target"], "a file or folder"))
    layout = _layout(target, options)
    tried_again(lambda: _convert_all(given["source"], target, layout, options))
    return 0


def _convert_all(source: str, target: Path, layout: str, options: ConvertOptions) -> None:
    with open_content(source, options) as content:
        _check_tables(content, target, layout, options)
        _check_target(target, Path(source), layout, options)
        wanted = Wanted(
            state=options.state,
            scores=options.scores,
            counter=options.counter,
            world_size=options.world_size,
            dist_type=options.dist_type,
            serving_index=options.serving_index,
            snapshot=options.snapshot_name,
        )
        _warn(_warnings(content, layout, wanted))
        done = _convert(content, target, layout, wanted, Names(options.collection, options.name))
        _warn(done.warnings)
        size = _size(target)
        Output().line(
            f"{target}: {layout}, {len(content.tables)} table{'s' * (len(content.tables) != 1)}, "
            f"{done.rows:,} rows, {bytes_text(size)}"
        )


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        sys.stderr.write(f"dynamicemb: warning: {printable(line)}\n")


def _layout(target: Path, options: ConvertOptions) -> str:
    by_end = SUFFIXES.get(target.suffix)
    layout = options.to or by_end
    if layout is None:
        raise UsageError(f"--to is missing; allowed: {', '.join(LAYOUTS)}")
    if by_end is not None and by_end != layout:
        raise UsageError(f"--to is {layout!r} and {target} ends as {by_end} does")
    if options.world_size is not None and layout in FORMATS:
        raise UsageError(f"--world-size is about layouts with a part for each rank; not {layout}")
    if options.serving_index and layout != "checkpoint":
        raise UsageError(f"--serving-index is about checkpoints, not {layout}")
    return layout


def _check_tables(content: Content, target: Path, layout: str, options: ConvertOptions) -> None:
    own = [table for table in content.tables if table.rank is not None]
    if own and options.rank is None:
        raise UsageError(
            f"every rank had a table of its own ({labels(own)}); --rank says whose to write"
        )
    one = len(content.tables) == 1
    if not one and (options.collection is not None or options.name is not None):
        raise UsageError(
            "--collection and --name are for one table; --table chooses of "
            f"{labels(content.tables)}"
        )
    if not one and layout == "oneembedding":
        raise UsageError(
            f"a OneEmbedding folder holds one table; --table chooses of {labels(content.tables)}"
        )
    if not one and layout in FORMATS and target.suffix == SUFFIX_OF[layout]:
        raise UsageError(
            f"{target} is a file for one table; --table chooses of {labels(content.tables)}, or "
            "name a folder"
        )


def _check_target(target: Path, source: Path, layout: str, options: ConvertOptions) -> None:
    """Nothing but what this command could have written is replaced, and that only if asked."""
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return
    if not options.overwrite:
        raise InvalidArgumentError(f"{target} exists; --overwrite replaces it")
    here, there = os.path.realpath(source), os.path.realpath(target)
    if here.startswith(there + os.sep):
        raise UsageError(f"{source} is inside of {target}, which would be replaced")
    if target.is_symlink():
        raise InvalidArgumentError(f"{target} is a link; allowed with --overwrite: what it is to")
    try:
        open_content(str(target), ReadOptions()).close()
    except NothingToReadError as error:
        raise InvalidArgumentError(
            f"{target} is not replaced, since it is no checkpoint"
        ) from error
    except DynamicEmbError:
        pass  # one that is damaged


def _warnings(content: Content, layout: str, wanted: Wanted) -> list[str]:
    lines = list(content.notes)
    for table in content.tables:
        lost = losses(table, layout, wanted)
        if lost:
            lines.append(f"{table.label}: {layout} has no place for {', '.join(lost)}")
        kept = chosen(table, wanted)
        if layout in ("checkpoint", "upstream") and kept.optimizer is None:
            lines.append(f"{table.label}: the optimizer is not known; SGD is written")
    return lines


def _convert(content: Content, target: Path, layout: str, wanted: Wanted, names: Names) -> Done:
    total = passes(content, layout, wanted) * sum(
        table.rows * chosen(table, wanted).row_bytes() for table in content.tables
    )
    with ProgressBar("convert", total) as bar, staged(target) as fresh:
        return write(fresh, content, layout, wanted, names, bar.add)


def _size(target: Path) -> int:
    files = [target] if target.is_file() else [one for one in target.rglob("*") if one.is_file()]
    return sum(bytes_on_disk(file) for file in files)
