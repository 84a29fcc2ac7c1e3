"""``--nproc``: several processes train the model of one."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import failing_rank
import pytest
import torch
from training_runs import every_item, points

from dynamicemb.cli import train as command
from dynamicemb.cli.app import main
from dynamicemb.cli.training.ranks import Ranks as RunRanks
from dynamicemb.cli.training.ranks import start_ranks
from dynamicemb.cli.training.stream import ClickStream
from dynamicemb.errors import InvalidArgumentError, UsageError
from dynamicemb.serving import ServingTable
from ranks import Ranks

SMALL = (
    *("--days", "2", "--examples-per-day", "4000", "--batch-size", "500", "--new-ids", "500"),
    *("--window", "3000", "--log-every", "4", "--dim", "8", "--plain", "--device", "cpu"),
)


def train(out: Path, *arguments: str) -> int:
    return main(["train", *SMALL, "--out", str(out), *arguments])


def _train_on_rank(rank: int, world_size: int, *, arguments: list[str]) -> tuple[int, str]:
    """One of the processes of the command, in a process that is there already."""
    options, _ = command.read_options(arguments)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        result = command.train_on(RunRanks(rank, world_size), options)
    gc.collect()  # tables let go of their stores
    return result, said.getvalue()


def train_on_two(ranks: Ranks, out: Path, *arguments: str) -> None:
    """The command with two processes, without the time that starting them takes."""
    line = [*SMALL, "--out", str(out), "--nproc", "2", *arguments]
    (first, said), (second, nothing) = ranks.run(2, _train_on_rank, arguments=line)
    assert first == second == 0
    assert "examples/s" in said
    assert nothing == ""


def assert_same_auc(one: list[dict[str, Any]], two: list[dict[str, Any]], name: str) -> None:
    assert [point["step"] for point in one] == [point["step"] for point in two]
    for a, b in zip(one, two, strict=True):
        expected = a["metrics"][name]["auc"]
        assert b["metrics"][name]["auc"] == pytest.approx(expected, abs=0.002)


def test_shares_of_ranks_are_the_batch() -> None:
    stream = ClickStream(days=1, examples_per_day=101, new_ids=50, seed=0)
    (batch,) = stream.batches(0, 200)
    shares = [batch.share(rank, 3) for rank in range(3)]
    assert [one.size for one in shares] == [33, 34, 34]
    assert torch.equal(torch.cat([one.labels for one in shares]), batch.labels)
    assert torch.equal(torch.cat([one.dense for one in shares]), batch.dense)
    whole = batch.ids.split(batch.lengths.tolist())
    for feature in range(3):
        bags = [
            bag
            for one in shares
            for bag in one.ids.split(one.lengths.tolist())[feature * one.size :][: one.size]
        ]
        expected = whole[feature * batch.size :][: batch.size]
        assert all(torch.equal(a, b) for a, b in zip(bags, expected, strict=True))


def assert_same_run(one: Path, two: Path) -> None:
    expected, found = points(one), points(two)
    assert_same_auc(expected, found, "dynamic")
    for a, b in zip(expected, found, strict=True):
        assert a["metrics"]["hashed"] == b["metrics"]["hashed"]
        for name, table in a["tables"].items():
            assert table["inserts"] == b["tables"][name]["inserts"]
            assert table["rows"] == b["tables"][name]["rows"]
    assert (two / "report.html").exists()


def test_two_processes_give_the_auc_of_one_and_go_on_after_a_stop(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert train(tmp_path / "one") == 0
    train_on_two(ranks, tmp_path / "two", "--max-examples", "4000")
    assert train(tmp_path / "two", "--nproc", "2") == 0
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.stress
def test_two_processes_that_are_killed_go_on(tmp_path: Path) -> None:
    two = ("--out", str(tmp_path / "two"), "--nproc", "2", "--checkpoint-steps", "4")
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamicemb.cli", "train", *SMALL, *two],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    with process:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "step 8," in line:
                break
        assert "step 8," in seen[-1], "".join(seen)
        os.killpg(process.pid, signal.SIGKILL)
    left = [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()]
    assert "step-0000000004" in left
    assert main(["train", *SMALL, *two]) == 0
    assert train(tmp_path / "one") == 0
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_every_kind_of_table_trains_on_two_processes_and_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    options = ("--tables", "dynamic", "zch", "hashed", "--no-report", "--max-examples")
    train_on_two(ranks, tmp_path / "whole", *options, "6000")
    train_on_two(ranks, tmp_path / "stopped", *options, "3000")
    train_on_two(ranks, tmp_path / "stopped", *options, "6000")
    whole, stopped = points(tmp_path / "whole")[-1], points(tmp_path / "stopped")[-1]
    assert whole["metrics"] == stopped["metrics"]
    assert whole["tables"] == stopped["tables"]
    # Room for all: the same ids have rows as in one process, which starts from other rows.
    assert train(tmp_path / "one", *options, "6000") == 0
    one = points(tmp_path / "one")[-1]
    for kind in ("", "zch "):
        for name in ("user", "item"):
            here, there = one["tables"][kind + name], whole["tables"][kind + name]
            assert here["inserts"] == there["inserts"] == there["rows"]
            assert here["hit_rate"] == pytest.approx(there["hit_rate"])
    for kind in ("zch", "hashed"):
        auc = whole["metrics"][kind]["auc"]
        assert auc == pytest.approx(one["metrics"][kind]["auc"], abs=0.03)


def test_admission_of_two_processes_counts_as_one_does_and_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    options = ("--no-baseline", "--no-report", "--admission", "frequency:2", "--max-examples")
    assert train(tmp_path / "one", *options, "6000") == 0
    train_on_two(ranks, tmp_path / "two", *options, "4000")
    train_on_two(ranks, tmp_path / "two", *options, "6000")
    one, two = points(tmp_path / "one"), points(tmp_path / "two")
    assert_same_auc(one, two, "dynamic")
    for name, table in one[-1]["tables"].items():
        assert table["rejections"] == two[-1]["tables"][name]["rejections"] > 0
        assert table["rows"] == two[-1]["tables"][name]["rows"]


def test_stores_and_deltas_of_two_processes(ranks: Ranks, tmp_path: Path) -> None:
    same = ("--no-baseline", "--no-report")
    assert train(tmp_path / "one", *same) == 0
    narrow = (*same, "--capacity", "1024", "--store", f"ssd:{tmp_path / 'rows'}")
    narrow = (*narrow, "--delta-steps", "8", "--max-examples")
    train_on_two(ranks, tmp_path / "two", *narrow, "4000")
    train_on_two(ranks, tmp_path / "two", *narrow, "8000")
    one, two = points(tmp_path / "one"), points(tmp_path / "two")
    assert_same_auc(one, two, "dynamic")
    for name, table in one[-1]["tables"].items():
        assert table["rows"] == two[-1]["tables"][name]["rows"]
        folders = sorted(path.name for path in (tmp_path / "rows" / name).iterdir())
        assert folders == ["rank-0-of-2", "rank-1-of-2"]
    assert two[-1]["tables"]["item"]["rows"] > 1024
    chains = sorted((tmp_path / "two" / "deltas").iterdir())
    assert [path.name for path in chains] == ["chain-000001", "chain-000002"]
    checkpoint = max((tmp_path / "two" / "checkpoints").iterdir()) / "tables"
    ids = every_item(days=2, examples_per_day=4000, new_ids=500)
    with ServingTable(chains[-1], "item") as serving, ServingTable(checkpoint, "item") as saved:
        serving.apply_delta(chains[-1])
        for a, b in zip(serving.find(ids), saved.find(ids), strict=True):
            assert torch.equal(a, b)


def test_two_processes_have_rows_of_their_own_in_redis(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    from redis_servers import RedisServer

    options = ("--no-baseline", "--no-report", "--max-examples", "3000")
    server = RedisServer()
    try:
        store = ("--capacity", "1024", "--store", server.url())
        train_on_two(ranks, tmp_path / "two", *options, *store)
        names = {
            name.partition(b"@")[2][:4] for name in server.client().scan_iter() if b"@" in name
        }
    finally:
        server.close()
    assert train(tmp_path / "one", *options) == 0
    assert_same_auc(points(tmp_path / "one"), points(tmp_path / "two"), "dynamic")
    assert names == {b"0of2", b"1of2"}


def test_rows_expire_on_two_processes_and_a_last_batch_may_be_odd(
    ranks: Ranks, tmp_path: Path
) -> None:
    options = ("--no-baseline", "--no-report", "--ttl", "3steps", "--examples-per-day", "1777")
    train_on_two(ranks, tmp_path / "two", *options)
    assert train(tmp_path / "one", *options) == 0
    one, two = points(tmp_path / "one"), points(tmp_path / "two")
    assert one[-1]["examples"] == two[-1]["examples"] == 3554
    assert_same_auc(one, two, "dynamic")
    for table in two[-1]["tables"].values():
        assert table["evictions"] > 0


def test_a_mistake_that_a_process_finds_reaches_the_command() -> None:
    with pytest.raises(UsageError, match="rank 1 does not like it"):
        start_ranks(2, failing_rank.fails_on_the_last)


def test_several_processes_are_for_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--nproc", "2", "--device", "cuda") == 2
    assert "several processes are for the CPU" in capsys.readouterr().err


def test_torchrun_starts_the_processes_too(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    line = ("train", *SMALL, "--out", str(tmp_path / "run"), "--days", "1")
    run = subprocess.run(
        [*torchrun, "2", "-m", "dynamicemb.cli", *line],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("report: ") == 1  # one of the two speaks
    assert train(tmp_path / "alone", "--days", "1") == 0
    assert_same_auc(points(tmp_path / "alone"), points(tmp_path / "run"), "dynamic")


def test_torchrun_and_nproc_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgumentError, match="the processes of torchrun"):
        command.main([*SMALL, "--nproc", "3"])
