"""What a server takes as the newest state, and what it leaves alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from served import IDS, NAMES, damage, file_of, make_tables, set_rows

from dynamicemb import DynamicEmbDump
from dynamicemb.cli.http import Request
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.service import Service
from dynamicemb.cli.serving.states import State
from dynamicemb.incremental_dump import apply_delta, dump_delta
from dynamicemb.serving import ServingTable

SETTINGS = {"verify": True, "preload": False, "missing": 0.0, "rank": None}


@pytest.fixture
def chain(memory_path: Path) -> Path:
    """A base and three deltas; all rows are the number of the delta."""
    model = make_tables()
    dump_delta(memory_path / "chain", model)
    for value in (1.0, 2.0, 3.0):
        for table in model.tables:
            set_rows(table, value)
        dump_delta(memory_path / "chain", model)
    return memory_path / "chain"


def follower_of(path: Path) -> Follower:
    follower = Follower(path, 0.0, SETTINGS)
    follower.look()
    return follower


def value_of(state: State | None, ids: torch.Tensor = IDS) -> float:
    """That all rows of all tables have."""
    assert state is not None
    values = torch.cat([table(ids).reshape(-1) for table in state.tables.values()])
    assert values.unique().numel() == 1
    return float(values[0])


def hide(folder: Path) -> Path:
    return folder.rename(folder.parent.parent / folder.name)


def test_deltas_are_taken_as_they_appear_and_rows_are_counted(memory_path: Path) -> None:
    model = make_tables()
    user, item = model.tables
    dump_delta(memory_path, model)
    follower = follower_of(memory_path)
    for step in range(1, 4):
        before = follower.standing.state
        set_rows(user, float(step), torch.arange(1000 * step, 1000 * step + 50))
        user.erase(torch.tensor([99 + step, 999_999]))
        item.clear() if step == 2 else set_rows(item, float(step))
        dump_delta(memory_path, model)
        follower.look()
        state = follower.standing.state
        assert state is not None
        assert before is not None
        assert (before.sequence, state.sequence) == (step - 1, step)  # the old one is as it was
        assert list(state.rows.values()) == [len(user), len(item)]
        assert state.names["user"] == "model.user"
    assert follower.following
    same = follower.standing.state
    follower.look()
    assert follower.standing.state is same
    assert 'kind="delta"} 3.0' in metrics_of(follower)
    assert 'kind="checkpoint"} 1.0' in metrics_of(follower)


def metrics_of(follower: Follower) -> str:
    service = Service(follower, max_ids=10)
    return bytes(service.respond(get("/metrics")).chunks[0]).decode()


def get(path: str) -> Request:
    return Request("GET", path, "", {}, bytearray())


def test_an_answer_is_of_one_state_whatever_comes_meanwhile(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = hide(chain / "delta_00000003")
    follower = follower_of(chain)
    service = Service(follower, max_ids=10)
    find = ServingTable.find

    def interrupted(table: ServingTable, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In the middle of a request a delta is applied."""
        if hidden.exists():
            hidden.rename(chain / hidden.name)
        follower.look()
        return find(table, ids)

    monkeypatch.setattr(ServingTable, "find", interrupted)
    body = bytearray(b'{"tables": {"user": {"ids": [1]}, "item": {"ids": [1]}}}')
    for delta in (2, 3):
        answer = bytes(
            service.respond(Request("POST", "/v1/lookup", "", {}, body)).chunks[0]
        ).decode()
        assert f'"delta": {delta}' in answer
        assert answer.count(f"[[{delta}, ") == 2
    state = follower.standing.state
    assert state is not None
    assert state.sequence == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_delta_is_not_applied_to_any_table_and_told(chain: Path, name: str) -> None:
    content = damage(chain / "delta_00000002", f"*{name}*_emb_values.*")
    follower = follower_of(chain)
    assert value_of(follower.standing.state) == 1.0
    assert "delta_00000002" in str(follower.standing.problem)
    assert not follower.following
    assert "dynamicemb_follow_errors_total 1.0" in metrics_of(follower)
    assert "dynamicemb_following 0.0" in metrics_of(follower)
    service = Service(follower, max_ids=10)
    assert service.respond(get("/healthz")).status == 503
    assert service.respond(get("/readyz")).status == 200
    file_of(chain / "delta_00000002", f"*{name}*_emb_values.*").write_bytes(content)
    follower.look()
    assert value_of(follower.standing.state) == 3.0
    assert follower.standing.problem is None


def test_a_delta_that_is_missing_or_not_committed_is_not_passed_over(chain: Path) -> None:
    hidden = hide(chain / "delta_00000002")
    follower = follower_of(chain)
    assert value_of(follower.standing.state) == 1.0
    assert "no delta_00000002" in str(follower.standing.problem)
    hidden.rename(chain / hidden.name)
    follower.look()
    assert value_of(follower.standing.state) == 3.0
    manifest = chain / "delta_00000003" / "dynamicemb_manifest.json"
    text = manifest.read_bytes()
    manifest.unlink()
    follower = follower_of(chain)  # being written: nothing is wrong
    assert (value_of(follower.standing.state), follower.standing.problem) == (2.0, None)
    manifest.write_bytes(text)
    follower.look()
    assert value_of(follower.standing.state) == 3.0
    shutil.rmtree(chain / "delta_00000003")
    follower.look()
    assert value_of(follower.standing.state) == 3.0  # the files that are open stay
    assert "lost delta 3" in str(follower.standing.problem)


def test_a_chain_that_was_written_again_from_the_middle_is_opened_again(chain: Path) -> None:
    follower = follower_of(chain)
    for name in ("delta_00000003", "delta_00000002"):
        shutil.rmtree(chain / name)
    model = make_tables()
    apply_delta(chain, model)
    for table in model.tables:
        set_rows(table, 7.0)
    dump_delta(chain, model)
    follower.look()
    state = follower.standing.state
    assert (value_of(state), follower.standing.problem) == (7.0, None)
    assert state is not None
    assert state.sequence == 2


def test_a_new_full_checkpoint_takes_the_place_of_the_old_one(memory_path: Path) -> None:
    DynamicEmbDump(memory_path, make_tables(1.0))
    follower = follower_of(memory_path)
    before = follower.standing.state
    DynamicEmbDump(memory_path, make_tables(2.0), allow_overwrite=True)
    follower.look()
    assert value_of(follower.standing.state) == 2.0
    assert value_of(before) == 1.0  # whoever still uses it
    DynamicEmbDump(memory_path / "other", make_tables(3.0))  # inside a checkpoint: not looked at
    follower.look()
    assert value_of(follower.standing.state) == 2.0


def test_of_a_folder_with_several_the_newest_whole_one_is_served(chain: Path) -> None:
    run = chain.parent
    follower = follower_of(run)
    assert value_of(follower.standing.state) == 3.0
    for step in (10, 11, 12):
        DynamicEmbDump(run / "checkpoints" / f"step-{step}" / "tables", make_tables(float(step)))
        made_later(run / "checkpoints" / f"step-{step}" / "tables", step)
    steps = run / "checkpoints"
    (steps / "step-12").rename(steps / "step-12.unfinished")
    follower.look()
    assert value_of(follower.standing.state) == 11.0
    (steps / "step-12.unfinished").rename(steps / "step-12")
    damage(steps / "step-12")
    follower.look()
    assert value_of(follower.standing.state) == 11.0
    assert "step-12" in str(follower.standing.problem)
    shutil.rmtree(steps / "step-12")
    shutil.rmtree(steps / "step-10")
    follower.look()
    assert (value_of(follower.standing.state), follower.standing.problem) == (11.0, None)


def made_later(folder: Path, seconds: int) -> None:
    """As if a checkpoint had been written so many seconds later."""
    manifest = folder / "dynamicemb_manifest.json"
    about = manifest.stat()
    later = about.st_mtime_ns + seconds * 10**9
    os.utime(manifest, ns=(later, later))


def test_a_folder_without_a_checkpoint_is_waited_for(memory_path: Path) -> None:
    follower = follower_of(memory_path)
    assert follower.standing.state is None
    assert "no checkpoint" in str(follower.standing.problem)
    service = Service(follower, max_ids=10)
    assert service.respond(get("/healthz")).status == 503
    assert service.respond(get("/v1/tables")).status == 503
    assert service.respond(get("/metrics")).status == 200
    DynamicEmbDump(memory_path / "a", make_tables(1.0))
    follower.look()
    assert value_of(follower.standing.state) == 1.0
    shutil.rmtree(memory_path / "a")
    follower.look()
    assert value_of(follower.standing.state) == 1.0
    assert "no checkpoint" in str(follower.standing.problem)
