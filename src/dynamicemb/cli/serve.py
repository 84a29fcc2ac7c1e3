"""``dynamicemb serve CHECKPOINT``: lookups over HTTP, from the newest state there is."""

from __future__ import annotations

import ipaddress
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dynamicemb.cli.arguments import Parser
from dynamicemb.cli.http import HttpServer, serving
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.memory import Memory, return_freed_memory
from dynamicemb.cli.serving.options import ServeOptions
from dynamicemb.cli.serving.service import VITAL, Service
from dynamicemb.cli.signals import interrupts
from dynamicemb.errors import CheckpointError, UsageError, check_path

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(
        "serve",
        "Answer lookups in the tables of a checkpoint over HTTP, in JSON or bytes. "
        "CHECKPOINT is a folder of DynamicEmbDump or dump_delta, or one with such folders in it, "
        "like that of a training run: the newest is served. Deltas and new checkpoints are taken "
        "as they appear. Ctrl-C or SIGTERM ends it after the requests that were begun.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder")
    options, given = parser.read(ServeOptions, arguments)
    path = Path(check_path("CHECKPOINT", given["checkpoint"], "a folder"))
    if options.wait and options.poll_seconds == 0:
        raise UsageError("--wait needs a look now and then; allowed: --poll-seconds above 0")
    if not options.wait and not path.is_dir():
        raise CheckpointError(f"CHECKPOINT is {str(path)!r}; allowed: a folder that exists")
    torch.set_num_threads(options.threads)
    library = logging.getLogger("dynamicemb")
    level = library.level
    library.setLevel(logging.INFO)
    try:
        return _serve(path, options)
    finally:
        library.setLevel(level)


def _serve(path: Path, options: ServeOptions) -> int:
    settings = {
        "verify": options.verify,
        "preload": options.preload,
        "missing": options.missing,
        "rank": options.rank,
    }
    follower = Follower(path, options.poll_seconds, settings)
    memory = Memory(options.memory_mb << 20, options.max_ids)
    service = Service(follower, max_ids=options.max_ids, memory=memory)
    server = HttpServer(
        service,
        options.host,
        options.port,
        idle_seconds=options.idle_seconds,
        max_connections=options.max_connections,
        vital=VITAL,
        admit=memory.admit,
        names=options.allow_host,
    )
    service.connections = lambda: server.connections
    return_freed_memory()
    if not _is_loopback(server.host):
        logger.warning(
            "%s is no loopback address: everybody who reaches it can read the tables", server.host
        )
    with interrupts() as interrupted, serving(server, options.grace_seconds) as url:
        sys.stdout.write(f"listening on {url}\n")
        sys.stdout.flush()
        follower.start()
        try:
            while not follower.looked.wait(0.1) and not interrupted:
                pass
            if follower.standing.state is None and not interrupted:
                if not options.wait:
                    raise CheckpointError(str(follower.standing.problem))
                logger.info("waits: %s", follower.standing.problem)
            interrupted.wait()
            service.stopping = True
            logger.info("ends after the requests that were begun")
        finally:
            follower.stop()
    return 0


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
