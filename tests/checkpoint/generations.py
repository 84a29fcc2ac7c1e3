"""Checkpoints whose rows tell which dump they are of, all readers of them, and dumps that come in
the middle of an opening.

Every dump of a :class:`Writer` is a generation: both tables have as many rows as before, so that
all files keep their lengths, with other ids, and each row is its id in every column.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynamicemb import CheckpointError, DynamicEmbDump, DynamicEmbLoad
from dynamicemb.checkpoint.files import System, replaced_system
from dynamicemb.checkpoint.manifest import MANIFEST_NAME, STAGING_PREFIX
from dynamicemb.cli.app import main
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.states import newest_state
from dynamicemb.exchange import import_table
from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.serving import ServingTable, build_serving_index
from models import make_model

ROWS = 96
NAMES = ("user", "item")
#: Ids of a generation begin at its number times this. After the last one comes the first again.
APART = 10_000
GENERATIONS = 8
#: No generation: there was no checkpoint.
NOTHING = -1


class Writer:
    """Dumps generation after generation."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.model = make_model(optimizer="sgd", names=NAMES, max_capacity=max(4096, 8 * rows))
        self.generation = NOTHING

    def fill(self) -> None:
        """The rows of the next generation, and no others."""
        self.generation = (self.generation + 1) % GENERATIONS
        for table in self.model.tables:
            table.clear()
            ids = torch.arange(self.rows) + APART * self.generation
            table.insert(ids, ids.float()[:, None].expand(-1, table.dim).contiguous())

    def dump(self, path: Path, **options: Any) -> None:
        self.fill()
        DynamicEmbDump(path, self.model, allow_overwrite=True, progress=False, **options)

    def dump_anew(self, path: Path) -> None:
        """Remove what is there first."""
        if path.exists():
            shutil.rmtree(path)
        self.dump(path)

    def chain_anew(self, path: Path) -> None:
        """A chain of a base and two deltas in place of the one that is there. Each is a generation:
        a delta replaces everything."""
        if path.exists():
            shutil.rmtree(path)
        for _ in range(3):
            self.fill()
            dump_delta(path, self.model, progress=False)


def generation_of(ids: torch.Tensor, rows: torch.Tensor, count: int = ROWS) -> int:
    """The generation of a table's rows, which must be whole, right and of one generation."""
    assert len(ids) == count, f"{len(ids)} rows"
    first = int(ids.min())
    assert torch.equal(ids.sort().values, torch.arange(count) + first)
    assert first % APART == 0
    assert torch.equal(rows.float(), ids.float()[:, None].expand(rows.shape))
    return first // APART


def only(generations: list[int]) -> int:
    assert len(set(generations)) == 1, f"tables of the generations {generations}"
    return generations[0]


def generation_of_model(model: nn.Module, count: int = ROWS) -> int:
    found = []
    for table in model.tables:  # type: ignore[union-attr]
        rows = list(table.export(batch_size=10**6))
        found.append(generation_of(rows[0].ids, rows[0].embeddings, count))
    return only(found)


# ---- readers: each returns the generation that it found in a path ----


def _serving(table: ServingTable, count: int) -> int:
    """By looking up every id of the generations there can be."""
    assert len(table) == count
    ids = torch.arange(0, GENERATIONS * APART, APART)
    found, _ = table.find(ids)
    (first,) = ids[found].tolist()
    every = torch.arange(count) + first
    found, rows = table.find(every)
    assert bool(found.all()), f"{int(found.sum())} of {count} found"
    return generation_of(every, rows, count)


def mapped(path: Path, count: int = ROWS, *, verify: bool = False) -> int:
    with ServingTable(path, "item", verify=verify) as table:
        return _serving(table, count)


def mapped_verified(path: Path, count: int = ROWS) -> int:
    return mapped(path, count, verify=True)


def mapped_then_indexed(path: Path, count: int = ROWS) -> int:
    build_serving_index(path)
    return mapped(path, count)


def served(path: Path, count: int = ROWS) -> int:
    settings = {"verify": True, "preload": False, "missing": 0.0, "rank": None}
    state, problem = newest_state(path, None, settings)
    assert problem is None, problem
    return only([_serving(table, count) for table in state.tables.values()])


def followed(path: Path, count: int = ROWS) -> int:
    """As a server does that looks twice, whatever was replaced at its first look."""
    settings = {"verify": True, "preload": False, "missing": 0.0, "rank": None}
    follower = Follower(path, 0.0, settings)
    found = []
    for _ in range(2):
        follower.look()
        state, problem = follower.standing.state, follower.standing.problem
        if state is None or problem is not None:
            raise CheckpointError(str(problem))
        found.append(only([_serving(table, count) for table in state.tables.values()]))
    return found[-1]


def loaded(path: Path, count: int = ROWS, *, verify_first: bool = True) -> int:
    model = make_model(optimizer="sgd", names=NAMES, max_capacity=max(4096, 8 * count))
    DynamicEmbLoad(path, model, verify_first=verify_first, progress=False)
    return generation_of_model(model, count)


def loaded_unverified(path: Path, count: int = ROWS) -> int:
    return loaded(path, count, verify_first=False)


def loaded_over_rows(path: Path, count: int = ROWS) -> int:
    model = make_model(optimizer="sgd", names=NAMES, max_capacity=max(4096, 8 * count))
    for table in model.tables:
        table.insert(torch.tensor([-5]), torch.zeros(1, 4))
    DynamicEmbLoad(path, model, clear=True, progress=False)
    return generation_of_model(model, count)


def loaded_from_chain(path: Path, count: int = ROWS) -> int:
    model = make_model(optimizer="sgd", names=NAMES, max_capacity=max(4096, 8 * count))
    apply_delta(path, model, progress=False)
    return generation_of_model(model, count)


def command(*arguments: str) -> tuple[int, str]:
    """(exit status, what was printed) of a command; an error of it is a ``CheckpointError``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    if status not in (0, 1) or not out.getvalue():
        raise CheckpointError(err.getvalue())
    return status, out.getvalue()


def inspected(path: Path, count: int = ROWS) -> int:
    status, text = command("inspect", str(path), "--json")
    facts = json.loads(text)
    assert (status, facts["damaged"]) == (0, False), facts
    found = []
    for table in facts["tables"]:
        assert table["rows"] == count
        assert table["highest_id"] - table["lowest_id"] == count - 1
        found.append(table["lowest_id"] // APART)
    return only(found)


def inspected_rows(path: Path, count: int = ROWS) -> int:
    first = [APART * generation for generation in range(GENERATIONS)]
    _, text = command("inspect", str(path), "--json", *(f"--id={id_}" for id_ in first))
    rows = [row for row in json.loads(text)["rows"] if row["found"]]
    assert [row["table"] for row in rows] == ["model/user", "model/item"], rows
    assert all(row["embedding"] == [row["id"]] * 4 for row in rows)
    return only([row["id"] // APART for row in rows])


def verified(path: Path, count: int = ROWS) -> int:
    """It says that all is well; which generation, it does not say."""
    status, text = command("verify", str(path), "--json")
    (facts,) = json.loads(text)["checkpoints"]
    assert (status, facts["damages"]) == (0, []), facts
    # The folder of a dump that is being written.
    assert all(note.startswith(STAGING_PREFIX) for note in facts["notes"]), facts
    return mapped(path, count)


def converted(path: Path, count: int = ROWS) -> int:
    target = path.parent / f"{path.name}.converted"
    command("convert", str(path), str(target), "--to", "safetensors", "--overwrite")
    model = make_model(optimizer="sgd", names=NAMES, max_capacity=max(4096, 8 * count))
    for name in NAMES:
        import_table(model, target / f"model.{name}.safetensors", table_name=name)
    return generation_of_model(model, count)


def compared(path: Path, count: int = ROWS) -> int:
    """With a copy of the generation before, which it is or has nothing in common with."""
    (copy,) = path.parent.glob(f"{path.name}.copy-*")
    _, text = command("diff", str(path), str(copy), "--json")
    facts = json.loads(text)
    alike = [(one["rows_equal"], one["only_a"], one["only_b"]) for one in facts["tables"]]
    assert alike in ([(count, 0, 0)] * 2, [(0, count, count)] * 2), facts
    return (int(copy.name.rpartition("-")[2]) + (alike[0][0] == 0)) % GENERATIONS


READERS: dict[str, Callable[..., int]] = {
    "ServingTable": mapped,
    "ServingTable(verify)": mapped_verified,
    "build_serving_index": mapped_then_indexed,
    "serve": served,
    "serve, again": followed,
    "load": loaded,
    "load(verify_first=False)": loaded_unverified,
    "load(clear=True)": loaded_over_rows,
    "inspect": inspected,
    "inspect --id": inspected_rows,
    "verify": verified,
    "convert": converted,
    "diff": compared,
}
CHAIN_READERS: dict[str, Callable[..., int]] = {
    "ServingTable": mapped,
    "serve": served,
    "serve, again": followed,
    "apply_delta": loaded_from_chain,
    "inspect": inspected,
    "convert": converted,
    "verify": verified,
}


# ---- what comes in between ----


class Counting(System):
    """Counts the operations of a reader."""

    def __init__(self) -> None:
        self.count = 0

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().run(operation, call, *args, **kwargs)


class Interrupted(Counting):
    """Before the ``at``-th operation of a reader something else happens, once; ``always``: before
    each one from there on. While the reader has a folder's lock, the event waits for it."""

    def __init__(self, at: int, event: Callable[[], object], *, always: bool = False) -> None:
        super().__init__()
        self._at, self._event, self._always = at, event, always
        self._lock = threading.RLock()
        self._folder_locked = False
        self.happened = 0

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            due = 0 < self._at <= self.count + 1 and (self._always or not self.happened)
            if due and not self._folder_locked:
                self.happened += 1
                with replaced_system(System()):
                    self._event()
            result = super().run(operation, call, *args, **kwargs)
            if operation in ("lock", "unlock"):
                self._folder_locked = operation == "lock"
            return result


class Killed(BaseException):
    """Stands for the end of a process."""


class _Dying(System):
    """Makes one thread die at an operation: the ``nth`` after it has put a manifest in its place;
    0: at once after that. ``count``: how many there are."""

    def __init__(self, nth: int | None) -> None:
        self._nth, self._thread = nth, threading.get_ident()
        self._committed = False
        self.count = 0

    def run(self, operation: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._committed and threading.get_ident() == self._thread:
            if self._nth is not None and self.count >= self._nth:
                raise Killed
            self.count += 1
        result = super().run(operation, call, *args, **kwargs)
        if operation == "rename" and args[0] == MANIFEST_NAME:
            self._committed = True
        return result


def dump_and_die(writer: Writer, path: Path, nth: int) -> None:
    """A dump whose process ends ``nth`` operations after the commit."""
    with replaced_system(_Dying(nth)), contextlib.suppress(Killed):
        writer.dump(path)


def operations_after_commit(writer: Writer, path: Path) -> int:
    system = _Dying(None)
    with replaced_system(system):
        writer.dump(path)
    return system.count


def operations_of(read: Callable[[], object]) -> int:
    system = Counting()
    with replaced_system(system):
        read()
    return system.count
