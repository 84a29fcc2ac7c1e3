"""Draws training throughput against the size of the cache, from a result of benchmarks/tiers.py.

python benchmarks/tiers_plot.py RESULT.json docs/tiers_training.svg
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 380, 80, 60, 40, 150
COLORS = {"host": "#1f6feb", "ssd": "#c2410c", "no store": "#57606a"}
NAMES = {"host": "over main memory", "ssd": "over an SSD", "no store": "no store below"}


def draw(training: list[dict[str, Any]]) -> str:
    """The plot as SVG: both axes are logarithmic."""
    rates = [one["ids_per_second"] for one in training]
    low, high = 10 ** math.floor(math.log10(min(rates))), 10 ** math.ceil(math.log10(max(rates)))

    def x(percent: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log10(percent) / 2

    def y(rate: float) -> float:
        share = math.log(rate / low) / math.log(high / low)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Training, Zipf 1.05: ids per second by the share '
        "of ids that the cache holds</text>",
    ]
    for percent in (1, 10, 50, 100):
        parts.append(
            f'<line x1="{x(percent):.1f}" x2="{x(percent):.1f}" y1="{TOP}" '
            f'y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>'
            f'<text x="{x(percent):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{percent} %</text>"
        )
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        rate = 10**power
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" '
            'stroke="#e5e7eb"/>'
            f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,}</text>'
        )
    for kind, color in COLORS.items():
        points = sorted(
            (one["cache_percent"], one["ids_per_second"])
            for one in training
            if one["store"] == kind
        )
        if not points:
            continue
        if kind == "no store":
            points = [(1, points[0][1]), (100, points[0][1])]
        places = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        dash = ' stroke-dasharray="4 4"' if kind == "no store" else ""
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        )
        if kind != "no store":
            parts += [
                f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" fill="{color}"/>'
                for a, b in points
            ]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y(points[-1][1]) + 4:.1f}" fill="{color}">'
            f"{NAMES[kind]}</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 18}" text-anchor="middle">rows in the cache, of all ids'
        "</text></svg>\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    result = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(draw(result["training"]))
