"""The options of ``dynamicemb serve``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamicemb.cli.arguments import MAX_PORT, MAX_THREADS, option
from dynamicemb.cli.http import LOOPBACK
from dynamicemb.cli.serving.memory import DEFAULT_BYTES, PER_CONNECTION
from dynamicemb.errors import wrong_value


def _name(name: str, value: str) -> str:
    if value != "*" and not re.fullmatch(r"[A-Za-z0-9._-]+", value):
        raise wrong_value(name, value, "a name without a port, or *")
    return value


@dataclass
class ServeOptions:
    """Every option of a server; the order is that of the help."""

    host: str = option(LOOPBACK, "address to listen at; others than loopback have no password")
    allow_host: list[str] = option(  # noqa: RUF009
        [],
        "a name that clients may use for this server, beside addresses, localhost, --host and the "
        "name of this machine; * allows all; once for each name",
        check=_name,
        repeated=True,
    )
    port: int = option(
        8642, "port to listen at; 0: a free one, which is printed", minimum=0, maximum=MAX_PORT
    )
    poll_seconds: float = option(
        1.0, "seconds between two looks for a delta or a new checkpoint; 0: none", minimum=0.0
    )
    wait: bool = option(False, "wait for the first checkpoint to appear instead of failing")
    verify: bool = option(
        True, "compare all checksums before anything is served; this reads every byte once"
    )
    preload: bool = option(False, "let the system read the files ahead")
    missing: float = option(0.0, "what an id without a row reads")
    rank: int | None = option(
        None, "of tables that are not spread over ranks: whose copy", minimum=0
    )
    threads: int = option(1, "threads of one lookup", minimum=1, maximum=MAX_THREADS)
    max_ids: int = option(100_000, "ids of a request at most", minimum=1)
    memory_mb: int = option(
        DEFAULT_BYTES >> 20,
        "memory for large requests and their answers, in MiB; a request that finds none is "
        f"answered 429. Each connection takes up to {PER_CONNECTION / 2**20:g} beside it",
        minimum=1,
    )
    max_connections: int = option(256, "connections at a time at most", minimum=1)
    idle_seconds: float = option(
        60.0,
        "a connection that sends nothing, or does not read a block of its answer, for so long is "
        "closed",
        above=0.0,
    )
    grace_seconds: float = option(
        10.0, "at the end: how long requests that were begun may take", minimum=0.0
    )
