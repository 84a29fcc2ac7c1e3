"""The folder of a run: usable before anything is trained, one run at a time, and a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dynamicemb import CheckpointError
from dynamicemb.checkpoint.files import Directory
from dynamicemb.cli.app import main
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.ranks import Ranks
from dynamicemb.cli.training.saving import Checkpoints, read_state

SMALL = [
    *("train", "--plain", "--no-baseline", "--days", "1", "--examples-per-day", "1000"),
    *("--batch-size", "500", "--new-ids", "100", "--capacity", "128", "--dim", "4"),
]


def test_a_folder_that_cannot_be_used_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main([*SMALL, "--out", str(out)]) == 2
        said = capsys.readouterr()
        assert said.err == f"dynamicemb: --out {out} cannot be used: Not a directory\n"
        assert said.out == ""


def test_two_runs_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Directory.open(tmp_path) as other:
        assert other.lock()
        assert main([*SMALL, "--out", str(tmp_path)]) == 2
        assert f"another dynamicemb train is running in --out {tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main([*SMALL, "--out", str(tmp_path)]) == 0


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond it fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("large", ["run", "own"])
def test_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path: Path, large: str) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, Ranks())
    numbers = torch.arange(100_000)

    def write(step: int) -> None:
        state, own = {"step": step}, {"numbers": numbers}
        if large == "run":
            state, own = state | own, {}
        checkpoints.write(step, None, state, own, counter=False)

    write(1)
    file = "run.pt" if large == "run" else "rank-0.pt"
    with (
        files_of_at_most(100_000),
        pytest.raises(CheckpointError, match=f"step-0000000002 .*{file}: File too large"),
    ):
        write(2)
    ((path, state),) = checkpoints.states()
    assert (path.name, state["step"]) == ("step-0000000001", 1)
    write(2)
    assert [one.name for one in checkpoints.found()] == ["step-0000000002", "step-0000000001"]
    assert len(list(checkpoints.folder.iterdir())) == 2
    assert read_state(checkpoints.found()[0])["step"] == 2


@pytest.mark.parametrize("password", ["hunter2", "hun/ter2", "hun@ter2", "hun%2Fter2"])
def test_options_that_are_kept_have_no_password(password: str) -> None:
    options = TrainOptions(store=f"redis://bob:{password}@host:7/?prefix=p")
    assert options.public()["store"] == "redis://...@host:7/?prefix=p"
