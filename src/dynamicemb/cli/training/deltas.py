"""What changed in the dynamic tables, every few minutes, for processes that serve them.

``chain-<N>`` in the folder is a chain of ``dump_delta``: a base, then deltas. A process that goes
on after a stop begins a new one, because nobody knows what changed since the last; so does one
whose chain has grown long. Readers take the newest chain.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from torch import nn

from dynamicemb.checkpoint.delta import Delta, dump_delta
from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.cli.training.saving import UNFINISHED, remove_folder
from dynamicemb.errors import UsageError

logger = logging.getLogger(__name__)

#: Deltas of a chain at most: a reader looks into each of them.
LONGEST = 48
_NAME = re.compile(r"chain-(\d+)")


class Deltas:
    """The chains in a folder; every method is called by all ranks."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self._keep, self._ranks = folder, keep, ranks
        self._chain: Path | None = None
        self.last: Delta | None = None

    def write(self, model: nn.Module, *, counter: bool) -> Delta:
        """Write what changed since the last call; at first, and at times, everything."""
        if self._chain is not None and self.last is not None and self.last.sequence < LONGEST:
            try:
                self.last = dump_delta(self._chain, model, progress=False)
                return self.last
            except UsageError as error:  # more rows left than are remembered
                logger.warning("a new chain of deltas begins: %s", error)
        self._chain = self._next()
        self.last = dump_delta(self._chain, model, counter=counter, progress=False)
        self._remove_old()
        return self.last

    def _next(self) -> Path:
        number = self._found()[-1][0] + 1 if self._found() else 1
        path = self.folder / f"chain-{self._ranks.agree(number):06d}"
        if self._ranks.first:
            path.mkdir(parents=True)
        self._ranks.wait()
        return path

    def _found(self) -> list[tuple[int, Path]]:
        names = ((_NAME.fullmatch(path.name), path) for path in self.folder.glob("chain-*"))
        return sorted((int(match[1]), path) for match, path in names if match)

    def _remove_old(self) -> None:
        if self._ranks.first:
            for left in self.folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(left)
            for _, path in self._found()[: -self._keep]:
                remove_folder(path)
        self._ranks.wait()
