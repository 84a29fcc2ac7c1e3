"""Which tables a folder of an older layout holds, as its files say it, without a model.

What they do not say is guessed from lengths and from ``<table>_opt_args.json``; a note says so.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from dynamicemb.checkpoint.files import Directory
from dynamicemb.checkpoint.legacy import (
    Expected,
    LegacyReader,
    check_no_manifest,
    open_expected,
    read_opt_args,
)
from dynamicemb.checkpoint.names import opt_args_name, unescape
from dynamicemb.checkpoint.opt_args import optimizer_from_json
from dynamicemb.checkpoint.replaced import was_replaced
from dynamicemb.checkpoint.target import naming
from dynamicemb.errors import UsageError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbScoreStrategy, ScoreStrategy
from dynamicemb.routing import Routing
from dynamicemb.table.rows import Progress

_PER_RANK = re.compile(r"(.+)_emb_keys\.rank_\d+\.world_size_(\d+)")
_SINGLE = re.compile(r"(.+)_keys")
_BY_EVICTION = {
    "EvictStrategy.KLru": DynamicEmbScoreStrategy.TIMESTAMP,
    "EvictStrategy.KLfu": DynamicEmbScoreStrategy.LFU,
    "EvictStrategy.KCustomized": DynamicEmbScoreStrategy.STEP,
}


@dataclass
class Older:
    """The tables of the folder ``path``; ``root`` has the folders of collections. ``notes``: what
    was guessed, or could not be used."""

    path: str
    root: str
    tables: list[Expected]
    notes: list[str] = field(default_factory=list)

    def open(self) -> LegacyReader:
        """A reader of all tables."""
        reader = open_expected(self.root, self.tables)
        check_no_manifest(self.path, reader)
        if reader is None:  # its files were there a moment ago
            raise was_replaced(self.path)
        return reader


def find_older(
    path: str, *, strategy: ScoreStrategy | None = None, num_embeddings: int | None = None
) -> Older | None:
    """The tables below ``path``, which is a checkpoint's folder or that of one of its collections;
    ``None`` if there are none.

    strategy: of the scores, where the files do not say it (STEP, CUSTOMIZED and NO_EVICTION look
        the same). num_embeddings: of "continuous" tables, whose ids are relative to blocks; a
        ``UsageError`` if it is needed and missing.
    """
    found = Older(path, path, [])
    looked_for = _Looked(found, strategy, num_embeddings)
    with naming("reading", path), Directory.open(path) as folder:
        for name in folder.list():
            if not name.startswith(".") and folder.is_directory(name):
                with folder.directory(name) as inside:
                    looked_for.look(inside, name)
        if not found.tables:
            found.root, collection = os.path.split(os.path.abspath(path))
            looked_for.look(folder, collection)
    return found if found.tables or found.notes else None


class _Looked:
    """Adds what folders have to an :class:`Older`."""

    def __init__(
        self, found: Older, strategy: ScoreStrategy | None, num_embeddings: int | None
    ) -> None:
        self._found = found
        self._strategy = strategy
        self._num_embeddings = num_embeddings

    def look(self, folder: Directory, collection: str) -> None:
        for stem, world_size in sorted(_stems(folder.list()).items()):
            self._add(folder, collection, stem, world_size)

    def _add(self, folder: Directory, collection: str, stem: str, world_size: int) -> None:
        name = unescape(stem)
        label = f"table {name!r} of {collection!r}"
        if world_size:
            ends = [f".rank_{rank}.world_size_{world_size}" for rank in range(world_size)]
            lengths = {
                role: sum(folder.size(f"{stem}_emb_{role}{end}") or 0 for end in ends)
                for role in ("keys", "values", "scores")
            }
        else:
            lengths = {
                role: folder.size(f"{stem}_{role}") or 0 for role in ("keys", "values", "scores")
            }
        rows = lengths["keys"] // 8
        if rows == 0:
            self._found.notes.append(f"{label} has no rows; its dim is not known")
            return
        content = read_opt_args(folder, stem)
        optimizer = Optimizer(OptimizerKind.SGD, OptimizerArgs())
        if "opt_type" in content:
            optimizer = optimizer_from_json(content, opt_args_name(stem))
        width = lengths["values"] // rows // 4
        dim = width
        if not world_size and "opt_type" in content:  # the state may be in the same rows
            dim = next((d for d in range(1, width) if d + optimizer.state_dim(d) == width), width)
        self._found.tables.append(
            Expected(
                collection=collection,
                name=name,
                dim=max(dim, 1),
                dtype=torch.float32,
                strategy=self._strategy_of(content, lengths["scores"] // rows // 8, label),
                optimizer=optimizer,
                progress=Progress(1, None, 0, 0, 0, 0),
                routing=self._routing(content, max(world_size, 1), label),
            )
        )

    def _strategy_of(self, content: dict[str, Any], words: int, label: str) -> ScoreStrategy:
        if words == 2:
            return (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU)
        said = content.get("evict_strategy")
        if self._strategy is not None:
            return self._strategy
        if words and said not in ("EvictStrategy.KLru", "EvictStrategy.KLfu"):
            self._found.notes.append(
                f"{label} does not say which scores it has; they are taken for those of STEP"
            )
        return _BY_EVICTION.get(str(said), DynamicEmbScoreStrategy.STEP)

    def _routing(self, content: dict[str, Any], world_size: int, label: str) -> Routing | None:
        if content.get("dist_type") != "continuous" or world_size == 1:
            return None
        if self._num_embeddings is None:
            raise UsageError(
                f"{label} was written with dist_type 'continuous' on {world_size} ranks, without "
                "its block of ids; num_embeddings (--num-embeddings) says it"
            )
        return Routing.of_table("continuous", self._num_embeddings, world_size, 0)


def _stems(files: list[str]) -> dict[str, int]:
    """The number of ranks (0: single files) of each table, by stem, among the files of a folder.
    Where there are files of several numbers the reader says so."""
    found: dict[str, int] = {}
    for name in files:
        matched = _PER_RANK.fullmatch(name)
        if matched is not None:
            found[matched[1]] = max(int(matched[2]), found.get(matched[1], 0))
            continue
        single = _SINGLE.fullmatch(name)
        if single is not None and f"{single[1]}_values" in files:
            found.setdefault(single[1], 0)
    return found
