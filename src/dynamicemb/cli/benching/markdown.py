"""Measurements as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def show(value: Any) -> str:
    """A cell: numbers with three digits that count, ``None`` as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table with aligned columns, those of the line that has most of them."""
    names = max((list(line) for line in lines), key=len)
    cells = [names] + [[show(line.get(name)) for name in names] for line in lines]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]

    def text(row: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([text(cells[0]), rule, *map(text, cells[1:])])
