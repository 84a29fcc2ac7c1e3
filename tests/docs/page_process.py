"""Runs the code blocks of pages, each page in a process of its own.

A program: it imports torch and TorchRec once, then forks for every request, a line of JSON on its
standard input with ``folder``, ``log``, ``environment`` and ``steps`` ({kind, code, file, line});
it answers {"pid"} and, when that process is done, {"status"}. Its argument is the folder for what
warm_commands.py writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import warm_commands


def run(request: dict[str, Any]) -> None:
    """The steps of a page: Python blocks share one module, shell blocks are a bash each."""
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    page = types.ModuleType("__main__")
    sys.modules["__main__"] = page
    for step in request["steps"]:
        print(f"--- {step['file']}:{step['line']}", flush=True)
        if step["kind"] == "python":  # with the lines of the page, so that a traceback shows them
            code = "\n" * (step["line"] - 1) + step["code"]
            exec(compile(code, step["file"], "exec", dont_inherit=True), page.__dict__)
            sys.stdout.flush()
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", step["code"]], check=True)


def child(request: dict[str, Any]) -> None:
    os.setsid()  # what a page leaves running ends with its group
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    status = 0
    try:
        run(request)
    except SystemExit as end:
        status = int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import torchrec.distributed.model_parallel  # noqa: F401

        import dynamicemb.cli.app  # noqa: F401

    def answer(**values: int) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    warm_commands.start(Path(sys.argv[1]))
    answer(ready=1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        answer(pid=pid)
        answer(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
