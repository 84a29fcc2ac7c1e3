"""``dynamicemb doctor``: what is installed, what works, what is missing and how to get it."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dynamicemb.cli.arguments import Parser, option
from dynamicemb.cli.checkup.finding import Finding, Status
from dynamicemb.cli.checkup.hardware import hardware_findings
from dynamicemb.cli.checkup.packages import engine_finding, package_findings
from dynamicemb.cli.machine import environment
from dynamicemb.cli.output import Output
from dynamicemb.errors import check_path, wrong_value

BROKEN = 1


@dataclass
class DoctorOptions:
    """Every option; the order is that of the help."""

    folder: str | None = option(
        None, "a folder on the disk for checkpoints and SSD stores; without: the temporary one"
    )
    redis: str | None = option(None, "the URL of a server to try, redis://...")
    json: bool = option(False, "one JSON object instead of text")


def main(arguments: Sequence[str]) -> int:
    """Run the command; 0, or 1 if something essential is broken."""
    parser = Parser(
        "doctor",
        "Say what is installed, what this machine has, what works, by tiny runs of "
        "it, and what is missing, with the command to get it. The exit status is 1 if something "
        "essential is broken.",
    )
    options, _ = parser.read(DoctorOptions, arguments)
    folder = Path(tempfile.gettempdir())
    if options.folder is not None:
        folder = Path(check_path("--folder", options.folder, "a folder"))
    if not folder.is_dir():
        raise wrong_value("--folder", str(folder), "a folder that exists")
    for noisy in ("torchrec", "torch", "fbgemm_gpu"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    sections: dict[str, Iterable[Finding]] = {
        "installed": package_findings(),
        "machine": hardware_findings(folder),
        "works": _trials(folder, options.redis),
    }
    output = None if options.json else Output()
    found: dict[str, list[Finding]] = {}
    for title, findings in sections.items():
        found[title] = list(findings)
        if output is not None:
            output.title(title)
            output.table(("", "", ""), [_cells(one) for one in found[title]])
            output.line()
    broken = [one for some in found.values() for one in some if one.status is Status.BROKEN]
    healthy = not any(one.essential for one in broken)
    if output is None:
        about = {"healthy": healthy, "machine": environment()}
        lists = {title: [asdict(one) for one in some] for title, some in found.items()}
        sys.stdout.write(json.dumps(about | lists, indent=1) + "\n")
    else:
        _conclude(output, found, broken, healthy)
    return 0 if healthy else BROKEN


def _trials(folder: Path, redis: str | None) -> Iterable[Finding]:
    if engine_finding().status is Status.BROKEN:
        return ()
    from dynamicemb.cli.checkup.trials import trial_findings

    return trial_findings(folder, redis)


def _cells(one: Finding) -> tuple[str, str, str]:
    return (one.name, one.status.value, one.detail)


def _conclude(
    output: Output, found: dict[str, list[Finding]], broken: list[Finding], healthy: bool
) -> None:
    commands = {one.command: one.name for some in found.values() for one in some if one.command}
    if commands:
        output.title("what helps")
        output.table(("", ""), [(name, command) for command, name in commands.items()])
        output.line()
    if not healthy:
        names = ", ".join(one.name for one in broken if one.essential)
        output.line(f"Broken, and needed: {names}.")
    elif broken:
        output.line(f"Works; broken, and not needed: {', '.join(one.name for one in broken)}.")
    else:
        output.line("All that is here works.")
