"""Every code block of the README and of the documentation runs as written.

The Python blocks of a page run one after the other in one process, in an empty folder; shell blocks
run there in their turn. A block with ``title="file"`` is that file. A block that no test can run
has a comment before it, ``<!-- not run: why -->``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from markdown_blocks import CHECKED, PAGES, PYTHON, ROOT, SHELL, TEXT, Block, blocks_of
from page_runner import PageRunner

from dynamicemb.cli.app import main
from dynamicemb.cli.yaml import read_yaml

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NOT_RUN = [block for block in BLOCKS if block.not_run is not None]


def named(block: Block) -> object:
    return pytest.param(block, id=block.place)


def commands(block: Block) -> str:
    """A ``console`` block shows answers too: its commands are the lines after a prompt."""
    if block.kind != "console":
        return block.code
    return "".join(f"{line[2:]}\n" for line in block.code.splitlines() if line.startswith("$ "))


def test_each_says_what_it_is() -> None:
    known = (*PYTHON, *SHELL, *CHECKED, *TEXT)
    assert [block.place for block in BLOCKS if block.kind not in known] == []
    files = [block.title for block in BLOCKS if block.title is not None]
    assert files == [Path(title).name for title in files]


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]
)
def test_blocks_run(
    page: Path, page_runner: PageRunner, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    blocks = [block for block in blocks_of(page) if block.not_run is None]
    steps = []
    for block in blocks:
        if block.title is not None:  # written before it is its turn: as the page's reader would
            make = f"cat > {block.title} <<'END OF BLOCK'\n{block.code}END OF BLOCK\n"
            steps.append(Block(block.page, block.line, "sh", make, None, None))
        elif block.kind in PYTHON:
            steps.append(block)
        elif block.kind in SHELL:
            steps.append(Block(block.page, block.line, "sh", commands(block), None, None))
    if not steps:
        return
    environment = {}
    if any("REDIS_URL" in step.code for step in steps):
        environment["REDIS_URL"] = request.getfixturevalue("redis_url")
    page_runner.run(steps, tmp_path, environment)


@pytest.mark.parametrize("block", [named(one) for one in BLOCKS if one.kind in CHECKED])
def test_it_can_be_read(block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if block.kind == "json":
        json.loads(block.code)
    elif block.kind == "toml":
        tomllib.loads(block.code)
    else:
        yaml = pytest.importorskip("yaml")
        ours = read_yaml(block.code, block.place)
        assert yaml.safe_load(block.code) == ours
        file = tmp_path / "it.yaml"
        file.write_text(block.code)
        if "label" in ours:
            pytest.importorskip("torchrec")
            from dynamicemb.cli.training.schema import read_schema

            read_schema(str(file))
        else:
            assert main(["train", "--config", str(file), "--print-config"]) == 0
            capsys.readouterr()


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    assert len(NOT_RUN) <= 10, [block.place for block in NOT_RUN]
    for block in NOT_RUN:
        assert block.not_run is not None
        assert len(block.not_run) >= 12, block.place
        assert block.kind in (*PYTHON, *SHELL), f"{block.place}: nothing runs it anyway"
    marks = sum(page.read_text().count("<!-- not run:") for page in PAGES)
    assert marks == len(NOT_RUN), "a comment `not run` is right before its block"


def test_a_block_that_fails_fails_its_page(page_runner: PageRunner, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md\", line 6.*\n.*assert x == 2"):
        page_runner.run(blocks_of(page), tmp_path, dict(os.environ))
    for code in ("false | cat", "no-such-command", "exit 3", "dynamicemb no-such-command"):
        page.write_text(f"```sh\n{code}\n```\n")
        folder = tmp_path / code.replace(" ", "_")
        folder.mkdir()
        with pytest.raises(AssertionError):
            page_runner.run(blocks_of(page), folder, {})


def test_first_example_is_the_file() -> None:
    first = next(block for block in BLOCKS if block.kind == "python")
    assert first.code == (ROOT / "examples" / "first_steps.py").read_text()


def test_the_command_of_a_page_is_the_command(page_runner: PageRunner, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        """```sh
dynamicemb --version > here
dynamicemb trian 2> mistake || test $? = 2
grep "did you mean train" mistake
```
"""
    )
    page_runner.run(blocks_of(page), tmp_path, {})
    script = [str(Path(sys.executable).parent / "dynamicemb"), "--version"]
    told = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    assert (tmp_path / "work" / "here").read_text() == told.stdout
