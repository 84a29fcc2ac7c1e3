"""A conversion that is killed; without what a child process does not need, for its speed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dynamicemb.cli.app import main


def killed_convert(where: str, arguments: list[str]) -> None:
    """The command in a process that kills itself: among the rows, before or after the target is
    put in its place."""
    from dynamicemb.cli.contents import staging, writing

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    rows, put = writing._rows, staging._put

    def first_rows(*given: Any) -> Iterator[Any]:
        for batch in rows(*given):
            yield batch
            die()

    def put_and_die(*paths: Path) -> None:
        if where == "after":
            put(*paths)
        die()

    torch.set_num_threads(1)
    if where == "rows":
        writing._rows = first_rows
    else:
        staging._put = put_and_die
    main(arguments)
