"""The ``dynamicemb`` command: finds the subcommand, and turns mistakes into one line."""

from __future__ import annotations

import io
import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from dynamicemb.cli.arguments import suggestion
from dynamicemb.cli.output import printable
from dynamicemb.errors import DynamicEmbError

#: Subcommand -> (module with ``main(arguments) -> exit status``, one line of help).
COMMANDS = {
    "train": ("dynamicemb.cli.train", "train a click model with dynamic tables, and report on it"),
    "inspect": ("dynamicemb.cli.inspect", "show the tables of a checkpoint, or rows of it"),
    "verify": ("dynamicemb.cli.verify", "compare every checksum of checkpoints, and more"),
    "convert": ("dynamicemb.cli.convert", "write the tables of a checkpoint in another layout"),
    "diff": ("dynamicemb.cli.diff", "compare the rows of two checkpoints"),
    "serve": ("dynamicemb.cli.serve", "answer lookups in a checkpoint over HTTP, and follow it"),
    "bench": ("dynamicemb.cli.bench", "time dynamic against static tables on this machine"),
    "doctor": ("dynamicemb.cli.doctor", "what is installed, what works, and what is missing"),
}
FAILURE = 1
MISTAKE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def usage() -> str:
    lines = "\n".join(f"  {name:10} {help}" for name, (_, help) in COMMANDS.items())
    return f"usage: dynamicemb COMMAND [options]\n\n{lines}\n\ndynamicemb COMMAND --help says more"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 for a failure, 2 for a mistake in it, 130
    after an interrupt."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _allow_more_files()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has not all letters
    time = "%(asctime)s " if given[:1] == ["serve"] else ""  # it runs for days
    logging.basicConfig(level=logging.WARNING, format=f"{time}%(levelname)s: %(message)s")
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(usage() + "\n")
        return 0 if given else MISTAKE
    if given[0] == "--version":
        from dynamicemb import __version__

        sys.stdout.write(f"dynamicemb {__version__}\n")
        return 0
    if given[0] not in COMMANDS:
        kind = "option" if given[0].startswith("-") else "command"
        return _failed(f"unknown {kind} {given[0]}{suggestion(given[0], COMMANDS)}\n{usage()}")
    command: Callable[[Sequence[str]], int]
    try:
        command = import_module(COMMANDS[given[0]][0]).main
        status = command(given[1:])
        sys.stdout.flush()
        return status
    except (DynamicEmbError, ImportError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except BrokenPipeError:  # `dynamicemb ... | head`: nobody reads any more
        _end_output()
        return BROKEN_PIPE
    except OSError as error:  # a full disk, a file that may not be read
        _end_output()
        where = error.filename or "standard output, or a file"
        return _failed(f"{where}: {error.strerror or error}", FAILURE)


def _allow_more_files() -> None:
    """Let this process have as many files open as it may: readers hold those of a checkpoint."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _failed(message: str, status: int = MISTAKE) -> int:
    sys.stderr.write(f"dynamicemb: {printable(message, keep=chr(10))}\n")
    return status


def _end_output() -> None:
    """What was not written yet never will be; without this, Python tries it again at its end."""
    with suppress(OSError, ValueError):  # it may be no file of the operating system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
