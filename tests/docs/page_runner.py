"""A page's code blocks in a fresh process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from markdown_blocks import Block

TIMEOUT_S = 300.0  # of one page; the machine may be busy


class PageRunner:
    """Runs the blocks of a page in a fresh process, through page_process.py."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        program = Path(__file__).with_name("page_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert "ready" in self._answer(TIMEOUT_S)

    def run(self, blocks: list[Block], folder: Path, environment: dict[str, str]) -> str:
        """What ``blocks`` print; an assertion with it if one of them fails."""
        work, log = folder / "work", folder / "log"
        work.mkdir()
        steps = [
            {
                "kind": "python" if block.kind == "python" else "shell",
                "code": block.code,
                "file": str(block.page),
                "line": block.line,
            }
            for block in blocks
        ]
        first = (self._folder.name, str(Path(sys.executable).parent), os.environ["PATH"])
        environment = {"PATH": os.pathsep.join(first), **environment}
        request = {
            "folder": str(work),
            "log": str(log),
            "environment": environment,
            "steps": steps,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        group = self._answer(TIMEOUT_S)["pid"]
        try:
            status = self._answer(TIMEOUT_S).get("status")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        output = log.read_text(errors="replace")
        assert status is not None, f"no end after {TIMEOUT_S} s\n{output}"
        assert status == 0, output
        return output

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return {}
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()
