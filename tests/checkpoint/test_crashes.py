"""Dumps that fail or are killed at any operation leave the old checkpoint or the new one, whole."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FailingSystem, KillingSystem
from victims import KILLED, outcomes_of_ranks, running

from dynamicemb import (
    BatchedDynamicEmbeddingTables,
    CheckpointError,
    DynamicEmbDump,
    DynamicEmbLoad,
)
from dynamicemb.checkpoint.files import replaced_system
from models import make_model

ROWS = 300
KINDS = ("open", "write", "sync", "rename", "mkdir", "unlink", "rmdir", "list", "stat", "lock")


def model_of(value: float, rows: int = ROWS) -> BatchedDynamicEmbeddingTables:
    """Every number of every row is `value`."""
    model = make_model(optimizer="exact_adagrad")
    for table in model.tables:
        ids = torch.arange(rows)
        numbers = torch.full((rows, table.dim), value)
        scores = torch.full((rows,), int(value))
        table.insert(ids, numbers, state=numbers.clone(), scores=scores)
    return model


def dump(path: Any, value: float, rows: int = ROWS) -> None:
    DynamicEmbDump(path, model_of(value, rows), optim=True, allow_overwrite=True)


def loaded_value(path: Path, rows: int = ROWS) -> float:
    """The value of a checkpoint of `model_of`, which must be one and complete."""
    model = make_model(optimizer="exact_adagrad")
    DynamicEmbLoad(path, model, optim=True)
    seen = set()
    for table in model.tables:
        found = table.find(torch.arange(rows))
        assert len(table) == rows
        assert bool(found.found.all())
        for numbers in (found.embeddings, found.state, found.scores):
            seen |= set(numbers.float().unique().tolist())
    assert len(seen) == 1, seen
    return float(seen.pop())


def clean(path: Path) -> bool:
    """Whether nothing but one checkpoint is there."""
    return sorted(one.name for one in path.iterdir()) == ["dynamicemb_manifest.json", "model"]


class Watching(FailingSystem):
    """Remembers whether the manifest was in its place when the failure came."""

    renamed = False
    failed_after_commit = False

    def run(self, operation: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.failed
        try:
            result = super().run(operation, call, *args, **kwargs)
        finally:
            if self.failed and not before:
                self.failed_after_commit = self.renamed
        self.renamed |= operation == "rename"  # the first one is the manifest's
        return result


@pytest.mark.parametrize(
    "fault", [errno.EIO, errno.ENOSPC, "short"], ids=["EIO", "ENOSPC", "short"]
)
def test_the_nth_operation_fails(memory_path: Path, fault: int | str) -> None:
    old = memory_path / "old"
    dump(old, 1.0)
    new = model_of(2.0)
    outcomes = []
    for nth in itertools.count(1):
        path = memory_path / "c"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(old, path)
        system = Watching(KINDS, nth, fault)
        raised = None
        with replaced_system(system):
            try:
                DynamicEmbDump(path, new, optim=True, allow_overwrite=True)
            except CheckpointError as error:
                raised = error
        if not system.failed:
            assert raised is None
            break
        value = loaded_value(path)
        outcomes.append((raised is not None, value))
        if raised is None:  # only the tidying after the commit
            assert system.failed_after_commit
            assert value == 2.0
        elif system.failed_after_commit:  # the commit may not be durable, and it says so
            assert value == 2.0
        else:
            assert value == 1.0
        dump(path, 3.0)
        assert clean(path)
        assert loaded_value(path) == 3.0
    assert nth > 50
    assert {(True, 1.0), (False, 2.0)} <= set(outcomes)


def test_the_nth_operation_of_the_first_dump_fails(memory_path: Path) -> None:
    new = model_of(2.0)
    for nth in itertools.count(1):
        path = memory_path / "folder" / "c"
        shutil.rmtree(path.parent, ignore_errors=True)
        system = Watching(KINDS, nth)
        with replaced_system(system):
            try:
                DynamicEmbDump(path, new, optim=True)
                raised = False
            except CheckpointError:
                raised = True
        if not system.failed:
            break
        if raised and not system.failed_after_commit:
            with pytest.raises(CheckpointError):
                loaded_value(path)
            DynamicEmbDump(path, new, optim=True)  # what is left is no checkpoint to overwrite
        else:
            dump(path, 2.0)
        assert clean(path)
        assert loaded_value(path) == 2.0
    assert nth > 40


def test_the_nth_operation_of_a_load_fails(memory_path: Path) -> None:
    dump(memory_path, 1.0)
    for nth in itertools.count(1):
        model = make_model(optimizer="exact_adagrad")
        system = FailingSystem(("open", "read", "stat", "list"), nth)
        with replaced_system(system):
            try:
                DynamicEmbLoad(memory_path, model, optim=True)
            except CheckpointError as error:
                assert "made by the test" in str(error)  # noqa: PT017
                assert [len(table) for table in model.tables] == [0, 0]
        if not system.failed:
            assert [len(table) for table in model.tables] == [ROWS, ROWS]
            break
    assert nth > 20


def dump_and_die(_: int, path: str, value: float, nth: int) -> bool:
    with replaced_system(KillingSystem(nth)):
        dump(path, value)
    return True


def test_killed_at_the_nth_operation(memory_path: Path) -> None:
    killed_at(memory_path, step=6)


@pytest.mark.stress
def test_killed_at_every_operation(memory_path: Path) -> None:
    killed_at(memory_path, step=1)


def killed_at(path: Path, step: int) -> None:
    """After each kill the folder has the old or the new state; the next dump goes on from there."""
    value = 0.0
    dump(path, value)
    seen = set()
    for nth in itertools.count(1, step):
        ((kind, _),) = outcomes_of_ranks(1, dump_and_die, str(path), value + 1, nth, group=False)
        found = loaded_value(path)
        assert found in (value, value + 1)
        seen.add(found == value + 1)
        if kind != KILLED:
            assert found == value + 1
            break
        value = found
    assert seen == {False, True}
    assert clean(path)


def dump_forever(_: int, path: str, first: int) -> None:
    for value in itertools.count(first):
        dump(path, float(value), rows=3000)


def test_killed_at_random_moments(memory_path: Path) -> None:
    killed_randomly(memory_path, 6)


@pytest.mark.stress
def test_killed_at_many_random_moments(memory_path: Path) -> None:
    killed_randomly(memory_path, 200)


def killed_randomly(path: Path, times: int) -> None:
    draw = random.Random(11)
    dump(path, 1.0, rows=3000)
    value = 1.0
    for _ in range(times):
        with running(dump_forever, str(path), int(value) + 1) as child:
            child.join(draw.uniform(0.05, 0.5))
            assert child.is_alive()
        after = loaded_value(path, rows=3000)
        assert after >= value
        value = after
    dump(path, 0.0)
    assert clean(path)


def test_a_dump_while_another_runs_is_refused(memory_path: Path) -> None:
    from dynamicemb.checkpoint.files import Directory

    dump(memory_path, 1.0)
    with Directory.open(memory_path) as other:
        assert other.lock()
        with pytest.raises(CheckpointError, match="another dump into .* is running"):
            dump(memory_path, 2.0)
    dump(memory_path, 2.0)
    assert loaded_value(memory_path) == 2.0


def test_overwriting_keeps_files_of_others(memory_path: Path) -> None:
    dump(memory_path, 1.0)
    (memory_path / "dense.pt").write_bytes(b"mine")
    (memory_path / "model" / "notes.txt").write_bytes(b"mine too")
    stale = memory_path / "model" / "user_emb_keys.rank_3.world_size_8"
    stale.write_bytes(b"12345678")  # of an older dump by something else
    with pytest.raises(CheckpointError, match="not empty"):
        DynamicEmbDump(memory_path, model_of(2.0))
    dump(memory_path, 2.0)
    assert (memory_path / "dense.pt").read_bytes() == b"mine"
    assert (memory_path / "model" / "notes.txt").read_bytes() == b"mine too"
    assert not stale.exists()
    assert loaded_value(memory_path) == 2.0
    DynamicEmbDump(memory_path, make_model(names=("other",)), allow_overwrite=True)
    assert not list((memory_path / "model").glob("user*"))


def test_a_reader_of_the_old_one_sees_that_it_is_gone(memory_path: Path) -> None:
    from dynamicemb.checkpoint import CheckpointReader

    dump(memory_path, 1.0)
    start = time.process_time()
    with CheckpointReader.open(memory_path) as reader:
        dump(memory_path, 2.0)
        with pytest.raises(CheckpointError):
            reader.verify()
    assert time.process_time() - start < 60
