"""Plots as SVG, drawn here: nothing to install, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 44
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
    """A short form: 1.2M, 650k, 3,050, 0.755."""
    for size, letter, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e5)):
        if abs(value) >= least:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _power(exponent: int) -> str:
    """2 to the power of ``exponent`` in a short form: 512, 1k, 2k."""
    for less, letter in ((30, "G"), (20, "M"), (10, "k")):
        if exponent >= less:
            return f"{2 ** (exponent - less)}{letter}"
    return str(2**exponent)


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
    dashed: Sequence[str] = (),
) -> str:
    """A line for each series over ``x``, some of them dashed; values that are not finite are left
    out."""
    every = [v for values in series.values() for v in values if math.isfinite(v)] or [0.0]
    low, high = min(every), max(every)
    room = 0.05 * (high - low)
    frame = _Frame((min(x), max(x)), (0.0 if from_zero else low - room, high + room))
    body = frame.axes(x_label, y_label)
    for n, (name, values) in enumerate(series.items()):
        points = [
            (frame.place_x(a), frame.place_y(b))
            for a, b in zip(x, values, strict=True)
            if math.isfinite(b)
        ]
        color = COLORS[n % len(COLORS)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dash = ' stroke-dasharray="6 4"' if name in dashed else ""
        body += f'<polyline fill="none" stroke="{color}" stroke-width="2"{dash} points="{path}"/>'
        if len(points) == 1:
            (a, b), *_ = points
            body += f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>'
    return _svg(title, body, list(series))


def _edges(values: np.ndarray) -> np.ndarray:
    """Of at most 32 intervals; those of integers have equally many of them."""
    low, high = float(values.min()), float(values.max())
    if np.array_equal(values, np.floor(values)) and high - low < 2**53:
        width = math.ceil((high - low + 1) / 32)
        count = math.ceil((high - low + 1) / width)
        return low - 0.5 + width * np.arange(count + 1)
    return np.linspace(low, high if high > low else low + 1, 33)


def histogram(
    title: str, values: np.ndarray, *, x_label: str, y_label: str, logarithmic: bool = False
) -> str:
    """Bars over at most 32 intervals of ``values``; ``logarithmic``: of their powers of two."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return _svg(f"{title}: nothing to show", "")
    if logarithmic:
        values = np.log2(np.maximum(values, 1))
        edges = np.arange(0, math.floor(values.max()) + 2).astype(float)
    else:
        edges = _edges(values)
    counts, _ = np.histogram(values, edges)
    frame = _Frame((float(edges[0]), float(edges[-1])), (0.0, float(counts.max()) * 1.05))
    some = edges[:-1:2] if len(edges) > 9 else edges[:-1]  # as many as there is room for
    places = {float(e): _power(int(e)) for e in some} if logarithmic else None
    body = frame.axes(x_label, y_label, places)
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        x, top = frame.place_x(left), frame.place_y(float(count))
        width = max(1.0, frame.place_x(right) - x - 1)
        body += _bar(x, top, width, frame.place_y(0) - top, f"{count:,}")
    return _svg(title, body)


def bars(title: str, values: Mapping[str, float], unit: str) -> str:
    """Named horizontal bars with their shares of the whole, the longest first."""
    ordered = sorted(values.items(), key=lambda one: -one[1])
    longest = max((value for _, value in ordered), default=0.0) or 1.0
    whole = sum(values.values()) or 1.0
    step = min(26.0, (HEIGHT - TOP) / max(1, len(ordered)))
    body = ""
    for n, (name, value) in enumerate(ordered):
        y = TOP + n * step
        width = max(1.0, value / longest * (WIDTH - 270))
        middle = y + step / 2 + 3
        body += _text(150, middle, name, "end") + _bar(156, y, width, step - 5)
        share = f"{100 * value / whole:.0f} %"
        body += _text(162 + width, middle, f"{value:.3g} {unit}, {share}")
    return _svg(title, body)
