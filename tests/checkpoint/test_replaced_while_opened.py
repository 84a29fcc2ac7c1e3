"""A reader beside a dump that replaces what it opens has a consistent state, or reports that it was
replaced; it never finds damage, and never rows of two states."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generations import (
    CHAIN_READERS,
    NOTHING,
    READERS,
    Interrupted,
    Writer,
    dump_and_die,
    generation_of_model,
    loaded,
    mapped,
    mapped_verified,
    operations_after_commit,
    operations_of,
)

from dynamicemb import (
    CheckpointError,
    CorruptCheckpointError,
    DynamicEmbDump,
    DynamicEmbLoad,
    ReplacedCheckpointError,
)
from dynamicemb.checkpoint import reader as reader_module
from dynamicemb.checkpoint.files import replaced_system
from dynamicemb.checkpoint.manifest import MANIFEST_NAME
from models import make_model
from processes import run_ranks

Reader = Callable[[Path], int]


@pytest.fixture(params=list(READERS))
def read(request: pytest.FixtureRequest) -> Reader:
    return READERS[request.param]


@pytest.fixture(params=list(CHAIN_READERS))
def read_chain(request: pytest.FixtureRequest) -> Reader:
    return CHAIN_READERS[request.param]


def copied(path: Path, generation: int) -> None:
    """For ``diff``: a copy of what is at the path, and of nothing else."""
    for old in path.parent.glob(f"{path.name}.copy-*"):
        shutil.rmtree(old)
    shutil.copytree(path, path.with_name(f"{path.name}.copy-{generation}"))


def outcome(read: Reader, path: Path, at: int, event: Callable[[], object]) -> tuple[int, int]:
    """(what a reader finds, whether the event happened) with the event at an operation."""
    system = Interrupted(at, event)
    with replaced_system(system):
        found = read(path)
    return found, system.happened


def grid(readers: int, writers: int, every: bool) -> list[tuple[int, int]]:
    """(operation of the reader, operation of the commit) pairs: all, or so many that each operation
    of either comes; every third time the commit goes to its end."""
    if every:
        return [(at, nth) for at in range(1, readers + 1) for nth in range(writers + 1)]
    steps = max(readers, 3 * (writers + 1) // 2)
    return [
        (1 + i % readers, writers if i % 3 == 0 else (i - i // 3) % (writers + 1))
        for i in range(steps)
    ]


def commit_at_each_moment(read: Reader, path: Path, *, every: bool) -> None:
    writer = Writer()
    writer.dump(path)
    writers = operations_after_commit(writer, path)
    copied(path, writer.generation)
    readers = operations_of(lambda: read(path))
    found = set()
    for at, nth in grid(readers, writers, every):
        writer.dump(path)  # finishes the commit of the time before
        copied(path, writer.generation)
        before = writer.generation
        generation, happened = outcome(read, path, at, lambda: dump_and_die(writer, path, nth))  # noqa: B023
        assert happened == 1
        assert generation in (before, writer.generation), f"operation {at}, commit {nth}"
        found.add(generation == before)
    # Who looks twice has the newer one at the end.
    assert found == ({False} if read is READERS["serve, again"] else {False, True})


def test_a_commit_at_any_moment_of_an_opening(memory_path: Path, read: Reader) -> None:
    """However far the commit came: it may stop after any of its operations, or go to its end."""
    commit_at_each_moment(read, memory_path / "x", every=False)


@pytest.mark.stress
def test_every_moment_of_a_commit_at_every_moment_of_an_opening(
    memory_path: Path, read: Reader
) -> None:
    commit_at_each_moment(read, memory_path / "x", every=True)


def test_a_commit_that_was_interrupted_is_finished_during_an_opening(
    memory_path: Path, read: Reader
) -> None:
    path = memory_path / "x"
    writer = Writer()
    writer.dump(path)
    writers = operations_after_commit(writer, path)
    copied(path, writer.generation)
    readers = operations_of(lambda: read(path))
    for at, nth in grid(readers, writers, every=False):
        writer.dump(path)
        dump_and_die(writer, path, nth)
        copied(path, writer.generation)
        before = writer.generation
        generation, happened = outcome(read, path, at, lambda: writer.dump(path))
        assert happened == 1
        assert generation in (before, writer.generation), f"operation {at}, commit {nth}"


def test_a_checkpoint_that_is_removed_and_written_anew(memory_path: Path, read: Reader) -> None:
    path = memory_path / "x"
    writer = Writer()
    writer.dump(path)
    copied(path, writer.generation)
    for at in range(1, operations_of(lambda: read(path)) + 1):
        before = writer.generation
        generation, _ = outcome(read, path, at, lambda: writer.dump_anew(path))
        assert generation in (before, writer.generation), f"operation {at}"
        copied(path, writer.generation)


def test_a_chain_that_is_removed_and_written_anew(memory_path: Path, read_chain: Reader) -> None:
    path = memory_path / "x"
    writer = Writer()
    writer.chain_anew(path)
    readers = operations_of(lambda: read_chain(path))
    for at in range(1, readers + 1, 1 + readers // 20):
        before = writer.generation
        generation, _ = outcome(read_chain, path, at, lambda: writer.chain_anew(path))
        assert generation in (before, writer.generation), f"operation {at}"


def test_the_first_dump_into_a_folder(memory_path: Path, read: Reader) -> None:
    """Before it there is no checkpoint, which is no damage."""
    path = memory_path / "x"
    writer = Writer()
    copied_path = memory_path / "x.copy-0"
    writer.dump(copied_path)
    shutil.copytree(copied_path, path)
    steps = operations_of(lambda: read(path))
    found = set()
    for at in range(1, steps + 1):
        shutil.rmtree(path)
        path.mkdir()
        writer.generation = NOTHING
        system = Interrupted(at, lambda: writer.dump(path))
        try:
            with replaced_system(system):
                generation = read(path)
        except CheckpointError as error:
            if isinstance(error, CorruptCheckpointError) or "corrupt" in str(error):
                raise
            generation = NOTHING
        assert generation in (NOTHING, 0)
        if not system.happened:  # there was nothing to open, and the reader was soon done
            break
        found.add(generation)
    # A server looks for a manifest first.
    assert 0 in found or read in (READERS["serve"], READERS["serve, again"])


# ---- without end ----


@pytest.mark.parametrize("name", ["ServingTable", "serve", "load", "inspect"])
def test_replaced_again_and_again_is_said_after_a_bounded_time(
    memory_path: Path, name: str
) -> None:
    read = READERS[name]
    path = memory_path / "x"
    writer = Writer()
    writer.dump(path)
    copied(path, writer.generation)
    system = Interrupted(2, lambda: writer.dump(path), always=True)
    began = time.monotonic()
    with (
        replaced_system(system),
        pytest.raises((CheckpointError, AssertionError), match="was replaced while it was opened"),
    ):
        read(path)
    assert system.happened < 5000
    assert time.monotonic() - began < 120


def test_the_error_is_a_type_of_its_own(memory_path: Path) -> None:
    writer = Writer()
    writer.dump(memory_path)
    for read in (mapped, loaded):
        system = Interrupted(2, lambda: writer.dump(memory_path), always=True)
        with replaced_system(system), pytest.raises(ReplacedCheckpointError):
            read(memory_path)


# ---- more files than can be held open ----


@pytest.fixture
def nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module._Room, "take", lambda self: False)


@pytest.mark.usefixtures("nothing_is_held")
def test_files_that_are_not_held_are_of_one_state_too(memory_path: Path, read: Reader) -> None:
    """The checkpoint may be replaced between two of them: the reader retries, or raises."""
    path = memory_path / "x"
    writer = Writer()
    writer.dump(path)
    copied(path, writer.generation)
    for at in range(1, operations_of(lambda: read(path)) + 1):
        before = writer.generation
        try:
            generation, _ = outcome(read, path, at, lambda: writer.dump(path))
        except ReplacedCheckpointError:
            continue
        finally:
            copied(path, writer.generation)
        assert generation in (before, writer.generation), f"operation {at}"


@pytest.mark.usefixtures("nothing_is_held")
def test_a_load_whose_checkpoint_is_replaced_leaves_empty_tables_empty(memory_path: Path) -> None:
    writer = Writer()
    writer.dump(memory_path)
    replaced = 0
    for at in range(1, operations_of(lambda: loaded(memory_path)) + 1):
        model = make_model(optimizer="sgd")
        before = writer.generation
        system = Interrupted(at, lambda: writer.dump(memory_path))
        try:
            with replaced_system(system):
                DynamicEmbLoad(memory_path, model, progress=False)
        except ReplacedCheckpointError:
            replaced += 1
            assert [len(table) for table in model.tables] == [0, 0]
        else:
            assert generation_of_model(model) in (before, writer.generation)
    assert replaced > 0


def test_what_is_held_is_let_go(memory_path: Path) -> None:
    path = memory_path / "x"  # beside which convert writes
    Writer().dump(path)
    for read in READERS.values():
        if read is not READERS["diff"]:
            read(path)
    assert reader_module._room._taken == 0


# ---- what is damage, and what is not ----


@pytest.mark.parametrize("verify", [False, True])
def test_a_dump_between_two_files_of_a_table(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    """The moment at which keys are in memory and values are not."""
    from dynamicemb.checkpoint import mapped as mapped_module

    writer = Writer()
    writer.dump(memory_path)
    times = []

    class Late(mapped_module._Mapped):
        def __init__(self, file: Any, **settings: Any) -> None:
            super().__init__(file, **settings)
            times.append(file)
            if len(times) == 1:
                writer.dump(memory_path)

    monkeypatch.setattr(mapped_module, "_Mapped", Late)
    assert mapped(memory_path, verify=verify) == 0
    assert mapped(memory_path, verify=verify) == 1


def test_a_damaged_file_is_damage_as_long_as_its_checkpoint_is_there(memory_path: Path) -> None:
    writer = Writer()
    writer.dump(memory_path)
    (file,) = memory_path.rglob("item_emb_values*")
    good = file.read_bytes()
    for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], None):
        file.write_bytes(good)
        if bad is None:
            file.unlink()
        else:
            file.write_bytes(bad)
        for read in (mapped_verified, loaded):
            with pytest.raises(CorruptCheckpointError, match="item_emb_values"):
                read(memory_path)


def test_a_checkpoint_that_comes_over_an_older_layout(memory_path: Path) -> None:
    """Which has no manifest: files of the dump must not be taken for it."""
    writer = Writer()
    writer.dump(memory_path / "older")
    (memory_path / "older" / MANIFEST_NAME).unlink()
    steps = operations_of(lambda: loaded(memory_path / "older"))
    with pytest.warns(UserWarning, match="older layout"):
        assert loaded(memory_path / "older") == 0
    for at in range(1, steps + 1):
        path = memory_path / f"at-{at}"
        shutil.copytree(memory_path / "older", path)
        writer.generation = 0
        generation, _ = outcome(loaded, path, at, lambda: writer.dump(path))  # noqa: B023
        assert generation in (0, 1)


def _load_on_ranks(rank: int, path: Path, at: int) -> int:
    """The generation that this rank loads; a dump comes at an operation of rank 1."""
    import torch.distributed as dist

    from dynamicemb.checkpoint.ranks import Ranks

    model = make_model(optimizer="sgd")
    writer = Writer()
    writer.generation = 0
    alone = dist.new_group([1])

    def dump() -> None:
        writer.fill()
        DynamicEmbDump(path, writer.model, pg=alone, allow_overwrite=True, progress=False)

    system = Interrupted(at if rank == 1 else 0, dump)
    with replaced_system(system):
        DynamicEmbLoad(path, model, progress=False)
    Ranks().gather(None)
    return generation_of_model(model)


@pytest.mark.parametrize("at", [1, 5, 12, 30])
def test_all_ranks_load_the_same_state(memory_path: Path, at: int) -> None:
    writer = Writer()
    writer.dump(memory_path)
    found = run_ranks(2, _load_on_ranks, memory_path, at)
    assert found in ([0, 0], [1, 1])
