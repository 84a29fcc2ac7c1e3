"""What is printed: comparison lines with their verdicts, and tables."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from dynamicemb.cli.benching.markdown import markdown


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
        if self.target is None or self.ratio is None:
            return "no target"
        return "OK" if self.ratio <= self.target else "MISS"


def print_table(lines: list[dict[str, Any]]) -> None:
    """A Markdown table with aligned columns."""
    if lines:
        print(markdown(lines))
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
    kinds = ("OK", "MISS", "peer not installed", "no target")
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    return f"summary: {len(verdicts)} comparisons: {counts}"
