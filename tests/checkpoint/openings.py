"""Openings beside a process that replaces what they open, as fast as it can."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from generations import CHAIN_READERS, GENERATIONS, READERS, Writer

from dynamicemb import CorruptCheckpointError
from processes import TIMEOUT_S

ROWS = 1024
REPLACED = "was replaced while it was opened"
#: What readers say between the removal of a checkpoint and the next dump.
NOTHING = (
    "there is no committed checkpoint",
    "allowed: a folder that exists",
    "does not exist",
    "there is no checkpoint in",
    "has a dump that was not finished",
    "has nothing that can be read",
    "has no base",
)

#: How a checkpoint is replaced.
WRITERS: dict[str, Callable[[Writer, Path], None]] = {
    "dump": lambda writer, path: writer.dump(path),
    "dump with an index": lambda writer, path: writer.dump(path, serving_index=True),
    "folder": lambda writer, path: writer.dump_anew(path),
    "chain": lambda writer, path: writer.chain_anew(path),
}


@dataclass
class Seen:
    """What came of the openings: how many had one state, and of which generations; how many said
    that it was replaced, and how many that there was nothing."""

    whole: int = 0
    replaced: int = 0
    nothing: int = 0
    dumps: int = 0
    seconds: float = 0.0
    generations: Counter[int] = field(default_factory=Counter)
    readers: Counter[str] = field(default_factory=Counter)
    changes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.whole} openings, each of one state, {self.changes} of them of another one than "
            f"the last; {self.replaced} replaced, {self.nothing} nothing there; {self.dumps} dumps "
            f"in {self.seconds:.0f} s; {dict(self.readers)}"
        )


def _write(path: Path, kind: str, ready: Any, stop: Any, dumps: Any) -> None:
    torch.set_num_threads(1)
    writer = Writer(ROWS)
    while not stop.is_set():
        WRITERS[kind](writer, path)
        dumps.value += 1
        ready.set()
        if kind in ("folder", "chain"):  # else there would be nothing most of the time
            stop.wait(0.01)


def open_beside_a_writer(path: Path, kind: str, openings: int, names: Sequence[str]) -> Seen:
    """Let the readers ``names`` open a path, in turn, until so many openings had a state. Each
    reader checks every row; a wrong one, or damage, is an error."""
    readers = CHAIN_READERS if kind == "chain" else READERS
    context = multiprocessing.get_context("forkserver")
    ready, stop = context.Event(), context.Event()
    dumps = context.Value("q", 0)
    process = context.Process(target=_write, args=(path, kind, ready, stop, dumps), daemon=True)
    process.start()
    seen = Seen()
    began = time.monotonic()
    last = -1
    try:
        assert ready.wait(TIMEOUT_S)
        while seen.whole < openings:
            assert process.is_alive()
            name = names[(seen.whole + seen.replaced + seen.nothing) % len(names)]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)  # an older layout, say
                    generation = readers[name](path, ROWS)
            except CorruptCheckpointError:
                raise
            except Exception as error:
                said = [one for one in (REPLACED, *NOTHING) if one in str(error)]
                if not said or str(path) not in str(error):
                    raise
                seen.replaced += said[0] == REPLACED
                seen.nothing += said[0] != REPLACED
                if said[0] != REPLACED:
                    stop.wait(0.001)
            else:
                assert 0 <= generation < GENERATIONS
                seen.whole += 1
                seen.readers[name] += 1
                seen.generations[generation] += 1
                seen.changes += generation != last
                last = generation
    finally:
        stop.set()
        process.join(60)
        if process.is_alive():
            process.kill()
        seen.dumps = dumps.value
        seen.seconds = time.monotonic() - began
    return seen
