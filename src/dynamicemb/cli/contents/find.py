"""Which layout a path has."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamicemb.checkpoint.chain import BASE, is_chain, kind_of
from dynamicemb.checkpoint.exchange import NAMES, SUFFIXES
from dynamicemb.checkpoint.manifest import MANIFEST_NAME, STAGING_PREFIX
from dynamicemb.checkpoint.older import find_older
from dynamicemb.checkpoint.reader import CheckpointReader, NoCheckpointError
from dynamicemb.checkpoint.replaced import was_replaced
from dynamicemb.cli.arguments import option
from dynamicemb.cli.contents.base import Content
from dynamicemb.cli.contents.checkpoints import ChainContent, CheckpointContent
from dynamicemb.cli.contents.files import FileContent, is_table_file, table_files
from dynamicemb.errors import (
    CorruptCheckpointError,
    DynamicEmbError,
    InvalidArgumentError,
    check_path,
    wrong_value,
)
from dynamicemb.options import DynamicEmbScoreStrategy

_RANK = re.compile(r"\d+-\d+")
_STEP = re.compile(r"step-\d+")
_CHAIN = re.compile(r"chain-\d+")
_STRATEGIES = tuple(one.lower() for one in DynamicEmbScoreStrategy.__members__)


class NothingToReadError(InvalidArgumentError):
    """The path is not one of tables, or not of the tables that were asked for: nothing is corrupt,
    the command is mistaken."""


def _column(name: str, value: str) -> str:
    called, _, column = value.partition("=")
    if called not in NAMES or not column:
        raise wrong_value(name, value, f"NAME=COLUMN, NAME one of {', '.join(NAMES)}")
    return value


@dataclass
class ReadOptions:
    """What a layout does not say by itself."""

    table: list[str] = option(  # noqa: RUF009
        (), "only this table: NAME or COLLECTION/NAME", repeated=True
    )
    rank: int | None = option(
        None, "of tables that every rank had for itself, only that of rank N", minimum=0
    )
    snapshot: str | None = option(None, "of a OneEmbedding folder: the snapshot (default: newest)")
    dim: int | None = option(
        None, "of a OneEmbedding folder that does not say it: columns of the embedding", minimum=1
    )
    key_type: str | None = option(
        None, "of OneFlow's keys of 4 bytes", choices=("int32", "uint32", "int64", "uint64")
    )
    score_strategy: str | None = option(
        None, "of upstream's files: what their scores are", choices=_STRATEGIES
    )
    num_embeddings: int | None = option(
        None, "of upstream's files with dist_type continuous: rows over all ranks", minimum=1
    )
    column: list[str] = option(  # noqa: RUF009
        (), "of files of other tools: ids=COLUMN, embeddings=COLUMN", repeated=True, check=_column
    )


def open_content(path: str, options: ReadOptions) -> Content:
    """The content of a path, with the tables that the options choose, all of one state. Raises
    ``ReplacedCheckpointError``, after which ``tried_again`` retries, and ``DynamicEmbError``, in
    one line, if there is nothing that can be read."""
    check_path("PATH", path, "a file or folder")
    try:
        content = _open(path, options)
    except CorruptCheckpointError:  # without what is missing, so that all damage is reported
        content = _open(path, options, without_missing=True)
    try:
        try:
            content.choose(options.table, options.rank)
        except InvalidArgumentError as error:
            raise NothingToReadError(str(error)) from None
        if not content.tables:
            raise NothingToReadError(f"{path} has no table; {'; '.join(content.notes)}")
    except BaseException:
        content.close()
        raise
    return content


def _open(path: str, options: ReadOptions, *, without_missing: bool = False) -> Content:
    """One attempt. If another folder takes the place of this one, as ``convert`` writes them, or if
    the folder is emptied and filled with another layout, this is a ``ReplacedCheckpointError``."""
    before = _mark(path)
    if before is None:
        raise NothingToReadError(f"{path} does not exist")
    kind = kind_of(path)
    try:
        content = _open_layout(path, options, without_missing)
    except (DynamicEmbError, OSError) as error:
        gone = isinstance(error, NoCheckpointError) and (kind or kind_of(path))
        if gone or _mark(path) != before:
            raise was_replaced(path) from error
        raise
    after = _mark(path)
    if after is None or after.identity != before.identity:
        content.close()
        raise was_replaced(path)
    return content


@dataclass(frozen=True)
class _Mark:
    """identity: of a file or folder. changed: when an entry came or went. names: of the entries."""

    identity: tuple[int, int]
    changed: int
    names: tuple[str, ...]


def _mark(path: str) -> _Mark | None:
    """The mark of a path; ``None`` if nothing is there."""
    try:
        status = os.stat(path)
        names = tuple(sorted(os.listdir(path))) if stat.S_ISDIR(status.st_mode) else ()
    except OSError:
        return None
    return _Mark((status.st_dev, status.st_ino), status.st_mtime_ns, names)


def _open_layout(path: str, options: ReadOptions, without_missing: bool) -> Content:
    columns = dict(one.split("=", 1) for one in options.column)
    if not os.path.isdir(path):
        if is_table_file(Path(path)):
            return FileContent(path, columns)
        raise NothingToReadError(
            f"{path} is a file; allowed: a folder, or a file that ends in {', '.join(SUFFIXES)}"
        )
    run = _newest_of_run(path)
    if run is not None:
        content = _open(run, options, without_missing=without_missing)
        content.notes.insert(0, f"the newest of the run: {run}")
        return content
    if os.path.lexists(os.path.join(path, MANIFEST_NAME)):
        reader = CheckpointReader.open(path)
        checkpoint = CheckpointContent.held(path, reader, without_missing=without_missing)
        if "delta" in checkpoint.reader.manifest.extra:
            checkpoint.layout = "delta"
            checkpoint.notes.append("a delta of a chain alone: it has the rows that changed")
        return checkpoint
    if is_chain(path):
        return ChainContent(path, without_missing=without_missing)
    embedding = _one_embedding(path, options)
    if embedding is not None:
        return embedding
    strategy = options.score_strategy
    older = find_older(
        path,
        strategy=None if strategy is None else DynamicEmbScoreStrategy[strategy.upper()],
        num_embeddings=options.num_embeddings,
    )
    if older is not None and older.tables:
        return CheckpointContent.of_older(path, older)
    if table_files(path):
        return FileContent(path, columns)
    raise NothingToReadError(_nothing(path, [] if older is None else older.notes))


def _one_embedding(path: str, options: ReadOptions) -> Content | None:
    names = os.listdir(path)
    if not any(name in ("rows", "KEY_SIZE") or _RANK.fullmatch(name) for name in names):
        return None
    # Imported for such folders alone: it takes as long as torch.
    from dynamicemb.cli.contents.one_embedding import OneEmbeddingContent, rank_folders

    ranks = rank_folders(path)
    if ranks is None:
        return None
    return OneEmbeddingContent(
        path, ranks, snapshot=options.snapshot, dim=options.dim, key_type=options.key_type
    )


def _nothing(path: str, notes: Sequence[str]) -> str:
    if any(name.startswith(STAGING_PREFIX) for name in os.listdir(path)):
        return f"{path} has a dump that was not finished, and no checkpoint"
    because = f" ({'; '.join(notes)})" if notes else ""
    return (
        f"{path} has nothing that can be read{because}; allowed: a checkpoint, a chain of deltas, "
        "a folder of a training run, of OneEmbedding or of upstream's dumps, or files that end in "
        f"{', '.join(SUFFIXES)}"
    )


def steps_of_run(path: str) -> list[str]:
    """The checkpoints of ``dynamicemb train`` below ``path`` (its ``--out``, the folder of its
    checkpoints, or one of them), the newest first: folders with ``tables`` in them."""
    folder = Path(path)
    if _STEP.fullmatch(folder.name) and (folder / "tables").is_dir():
        return [path]
    return _numbered(folder, "checkpoints", _STEP, "tables")


def chains_of_run(path: str) -> list[str]:
    """Its chains of deltas below ``path`` (``--out``, or the folder of the chains), the newest
    first."""
    return _numbered(Path(path), "deltas", _CHAIN, BASE)


def _numbered(folder: Path, inside: str, name: re.Pattern[str], has: str) -> list[str]:
    """The folders of that name in ``folder/inside``, or in ``folder`` itself, that have something,
    those with the highest numbers first."""
    for place in (folder / inside, folder):
        if place.is_dir():
            found = [
                one for one in place.iterdir() if name.fullmatch(one.name) and (one / has).is_dir()
            ]
            if found:
                return [str(one) for one in sorted(found, reverse=True)]
    return []


def _newest_of_run(path: str) -> str | None:
    """The tables of the newest checkpoint of a run, or without one its newest chain; ``None`` if
    ``path`` is no run."""
    steps = steps_of_run(path)
    if steps:
        return os.path.join(steps[0], "tables")
    chains = chains_of_run(path)
    return chains[0] if chains else None
