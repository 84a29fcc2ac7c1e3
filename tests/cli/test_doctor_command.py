"""``dynamicemb doctor``: tiny runs, what is missing, and the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dynamicemb.cli.app import main
from dynamicemb.cli.checkup import hardware, packages, trials
from dynamicemb.cli.checkup.finding import Finding, Status
from dynamicemb.cli.checkup.packages import Wanted
from dynamicemb.missing_engine import MissingEngine

#: Without two packages: one that is missed, and one whose import takes long.
RUN = """
import sys
sys.modules["pyarrow"] = sys.modules["torchrec"] = None
from dynamicemb.cli.app import main
sys.exit(main(["doctor", "--json", "--folder", sys.argv[1]]))
"""
Capture = pytest.CaptureFixture[str]


def findings(answer: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in answer[section]}


def test_it_runs_what_should_work_and_tells_what_cannot_be_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["healthy"] is True
    installed = findings(answer, "installed")
    assert installed["torch"]["status"] == "ok"
    assert "instruction set" in installed["C++ engine"]["detail"]
    assert installed["pyarrow"]["status"] == "broken"
    assert "'dynamicemb[parquet]'" in installed["pyarrow"]["command"]
    works = findings(answer, "works")
    assert {one["status"] for one in works.values()} == {"ok"}
    assert {"training", "a checkpoint and back", "rows on a disk"} <= set(works)
    assert str(tmp_path) in findings(answer, "machine")["disk"]["detail"]
    assert list(tmp_path.iterdir()) == []  # nothing stays


def test_without_the_engine_the_exit_status_is_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_engine", MissingEngine(ImportError("no such file")))
    monkeypatch.setattr(packages, "wanted_packages", lambda: [])
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "Broken, and needed: C++ engine." in said
    assert "pip install --force-reinstall --no-deps dynamicemb" in said


def test_a_run_that_fails_is_told_and_ends_with_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(trials, "train_on_cpu", broken)
    monkeypatch.setattr(trials, "import_problem", lambda module: "left out")
    monkeypatch.setattr("dynamicemb.cli.doctor.package_findings", lambda: iter(()))
    assert main(["doctor", "--redis", "redis://:s3cret@127.0.0.1:1/0?retry_limit=0"]) == 1
    said = capsys.readouterr().out
    assert "OSError: the disk is on fire" in said
    assert "127.0.0.1:1" in said
    assert "s3cret" not in said
    assert said.endswith("Broken, and needed: training, rows in Redis.\n")


def test_a_server_that_answers_works_and_keeps_nothing() -> None:
    pytest.importorskip("redis")
    from redis_servers import RedisServer

    server = RedisServer()
    try:
        found = list(trials.trial_findings(Path("/tmp"), server.url()))
        assert found[-1].name == "rows in Redis"
        assert found[-1].status is Status.OK, found[-1]
        assert server.client().dbsize() == 0
    finally:
        server.close()


@pytest.mark.parametrize(
    ("wanted", "status", "said"),
    [
        (Wanted("no-such-package", "1.0", "cli"), Status.MISSING, "'dynamicemb[cli]'"),
        (Wanted("no-such-package", "1.0", ""), Status.BROKEN, "'no-such-package>=1.0'"),
        (Wanted("numpy", "999.1", ""), Status.BROKEN, "--upgrade"),
        (Wanted("numpy", "1.9", ""), Status.OK, ""),
    ],
)
def test_packages_that_are_missing_or_old_have_a_command(
    wanted: Wanted, status: Status, said: str
) -> None:
    found = packages._package(wanted)
    assert found.status is status
    assert said in found.command
    assert found.essential is (wanted.extra == "")


def test_the_packages_are_those_that_the_library_names() -> None:
    named = {one.name: one for one in packages.wanted_packages()}
    assert named["torch"].extra == ""
    assert (named["pyarrow"].extra, named["pyarrow"].at_least) == ("parquet", "14")
    for name, one in named.items():
        assert packages.USES[name][0] == one.extra


def test_in_a_source_tree_all_packages_that_are_known_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "requires", missing)
    monkeypatch.setattr(packages, "version", lambda name: None)
    found = {one.name: one for one in packages.package_findings()}
    assert "not installed" in found["dynamicemb"].detail
    assert found["torch"].status is Status.BROKEN
    assert found["torch"].command.endswith("pip install 'torch'")
    assert found["rich"].status is Status.MISSING
    assert found["rich"].command.endswith("'dynamicemb[cli]'")


def test_huge_pages_that_are_never_given_have_a_command(tmp_path: Path) -> None:
    file = tmp_path / "enabled"
    assert hardware.huge_pages_finding(file).status is Status.NOTE
    file.write_text("always madvise [never]\n")
    assert hardware.huge_pages_finding(file).command == f"echo madvise | sudo tee {file}"
    file.write_text("always [madvise] never\n")
    assert hardware.huge_pages_finding(file) == Finding("huge pages", Status.OK, "madvise")


def test_mistakes_are_told(capsys: Capture) -> None:
    assert main(["doctor", "--folder", "/no/such/folder"]) == 2
    assert "--folder is '/no/such/folder'" in capsys.readouterr().err
    assert main(["doctor", "--rediss", "x"]) == 2
    assert "did you mean --redis?" in capsys.readouterr().err
