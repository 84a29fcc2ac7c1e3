"""Plots as SVG, drawn here: nothing to install, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
COLORS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers in [low, high]."""
    raw = (high - low) / count
    if raw <= 0:
        return [low]
    power = 10 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda one: abs(one - raw))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def number(value: float) -> str:
    """A short form: 1.2M, 65k, 0.755."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, height: float, hint: str = "") -> str:
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{COLORS[0]}">{title}</rect>'
    )


class _Frame:
    """Axes: from values to places in the picture."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, (y if y[1] > y[0] else (y[0] - 0.5, y[0] + 0.5))

    def place_x(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def place_y(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, y_label: str, x_ticks: Mapping[float, str] | None = None) -> str:
        parts = []
        for value in ticks(*self.y):
            y = self.place_y(value)
            ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            parts += [f'<line class="grid" {ends}/>', _text(LEFT - 6, y + 4, number(value), "end")]
        for value, text in (x_ticks or {one: number(one) for one in ticks(*self.x)}).items():
            parts.append(_text(self.place_x(value), HEIGHT - BOTTOM + 16, text, "middle"))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle"))
        label = _text(-(TOP + HEIGHT - BOTTOM) / 2, 13, y_label, "middle")
        parts.append(f'<g transform="rotate(-90)">{label}</g>')
        return "".join(parts)


def _svg(title: str, body: str, names: Sequence[str] = ()) -> str:
    legend = "".join(
        f'<span><i style="background:{COLORS[n % len(COLORS)]}"></i>{escape(name)}</span>'
        for n, name in enumerate(names)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
        "</figure>"
    )


def lines(
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
) -> str:
    """A line for each series over ``x``; values that are not finite are left out."""
    every = [v for values in series.values() for v in values if math.isfinite(v)] or [0.0]
    low, high = min(every), max(every)
    room = 0.05 * (high - low)
    frame = _Frame((min(x), max(x)), (0.0 if from_zero else low - room, high + room))
    body = frame.axes(x_label, y_label)
    for n, values in enumerate(series.values()):
        points = [
            (frame.place_x(a), frame.place_y(b))
            for a, b in zip(x, values, strict=True)
            if math.isfinite(b)
        ]
        color = COLORS[n % len(COLORS)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        body += f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>'
        if len(points) == 1:
            (a, b), *_ = points
            body += f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>'
    return _svg(title, body, list(series))


def histogram(
    title: str, values: np.ndarray, *, x_label: str, y_label: str, logarithmic: bool = False
) -> str:
    """Bars over 32 intervals of ``values``; ``logarithmic``: of their powers of two."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return _svg(f"{title}: nothing to show", "")
    if logarithmic:
        values = np.log2(np.maximum(values, 1))
        edges = np.arange(0, math.floor(values.max()) + 2).astype(float)
    else:
        low, high = float(values.min()), float(values.max())
        edges = np.linspace(low, high if high > low else low + 1, 33)
    counts, _ = np.histogram(values, edges)
    frame = _Frame((float(edges[0]), float(edges[-1])), (0.0, float(counts.max()) * 1.05))
    places = {float(e): number(2.0**e) for e in edges[:-1]} if logarithmic else None
    body = frame.axes(x_label, y_label, places)
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        x, top = frame.place_x(left), frame.place_y(float(count))
        width = max(1.0, frame.place_x(right) - x - 1)
        body += _bar(x, top, width, frame.place_y(0) - top, f"{count:,}")
    return _svg(title, body)


def bars(title: str, values: Mapping[str, float], unit: str) -> str:
    """Named horizontal bars, the longest first."""
    ordered = sorted(values.items(), key=lambda one: -one[1])
    longest = max((value for _, value in ordered), default=0.0) or 1.0
    step = min(26.0, (HEIGHT - TOP) / max(1, len(ordered)))
    body = ""
    for n, (name, value) in enumerate(ordered):
        y = TOP + n * step
        width = max(1.0, value / longest * (WIDTH - 260))
        middle = y + step / 2 + 3
        body += _text(150, middle, name, "end") + _bar(156, y, width, step - 5)
        body += _text(162 + width, middle, f"{value:.3g} {unit}")
    return _svg(title, body)
