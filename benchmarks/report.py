"""What is printed: comparison lines with their verdicts, tables, and the machine they are from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One line of the comparison; times in ``unit``, None where a side is missing."""

    case: str
    distribution: str
    peer: str
    unit: str
    ours: float | None
    theirs: float | None
    target: float | None
    missing: str = ""  # what to install
    disturbed: tuple[str, ...] = ()  # who has fewer than three samples that count

    @property
    def ratio(self) -> float | None:
        if self.ours is None or self.theirs is None:
            return None
        return self.ours / self.theirs

    @property
    def verdict(self) -> str:
        if self.theirs is None:
            return "peer not installed"
        if self.ours is None:
            return "ours not installed"
        if self.target is None or self.ratio is None:
            return "no target"
        return "OK" if self.ratio <= self.target else "MISS"


def show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_table(lines: list[dict[str, Any]]) -> None:
    """A Markdown table with aligned columns."""
    if not lines:
        return
    widest = max(lines, key=len)
    names = list(widest)
    cells = [names] + [[show(line.get(name)) for name in names] for line in lines]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]

    def text(row: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"

    print(text(cells[0]))
    print("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    for row in cells[1:]:
        print(text(row))
    sys.stdout.flush()


def print_rows(rows: list[Row]) -> None:
    print_table(
        [
            {
                "case": row.case,
                "ids": row.distribution,
                "against": row.peer,
                "unit": row.unit,
                "ours": row.ours,
                "theirs": row.theirs,
                "ratio": row.ratio,
                "target": "-" if row.target is None else f"<= {row.target:.2f}",
                "": row.verdict,
            }
            for row in rows
        ]
    )
    for peer, how in {row.peer: row.missing for row in rows if row.missing}.items():
        print(f"  {peer} is not installed: {how}")
    disturbed = [f"{who} ({r.case}, {r.distribution})" for r in rows for who in r.disturbed]
    if disturbed:
        print(
            f"  disturbed by other processes, not reliable: {', '.join(dict.fromkeys(disturbed))}"
        )
    sys.stdout.flush()


def summary(rows: list[Row]) -> str:
    """The last line: how many comparisons ended how."""
    verdicts = [row.verdict for row in rows]
    kinds = ("OK", "MISS", "peer not installed", "ours not installed", "no target")
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    return f"summary: {len(verdicts)} comparisons: {counts}"


def available_bytes() -> int:
    """Memory that can be had without swapping; everything, where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return sys.maxsize


def environment() -> dict[str, Any]:
    """Where and when: what a figure needs beside it."""
    packages = ("dynamicemb", "torch", "fbgemm-gpu-cpu", "torchrec")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "available_gb": round(available_bytes() / 1e9, 1),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()
