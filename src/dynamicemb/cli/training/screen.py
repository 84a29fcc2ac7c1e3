"""What a run shows while it works: one live screen, or lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from dynamicemb.cli.training.history import Point

if TYPE_CHECKING:
    from dynamicemb.cli.training.run import Run

REFRESH_SECONDS = 0.2
TABLE_COLUMNS = (
    *("table", "rows", "load", "hit rate", "inserts", "evictions", "rejections", "memory", "store"),
)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size_of(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def table_cells(name: str, table: dict[str, float]) -> list[str]:
    """The numbers of a table in the order of TABLE_COLUMNS."""
    return [
        name,
        f"{table['rows']:,.0f}",
        f"{table['load']:.2f}",
        f"{table['hit_rate']:.3f}",
        f"{table['inserts']:,.0f}",
        f"{table['evictions']:,.0f}",
        f"{table['rejections']:,.0f}",
        size_of(table["bytes"]),
        size_of(table["stored_bytes"]),
    ]


class PlainScreen:
    """Lines: one per point of the metrics, and one for each table."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, run: Run) -> None:
        points = run.history.points
        if not points or points[-1].step == self._shown:
            return
        self._shown = points[-1].step
        for line in self._lines(run, points[-1]):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _lines(self, run: Run, point: Point) -> list[str]:
        share = f" ({100 * point.examples / run.total:.0f} %)" if run.total else ""
        day = "" if point.day is None else f", day {point.day:.1f}"
        quality = "; ".join(
            f"{name} loss {one['loss']:.4f} AUC {one['auc']:.4f} NE {one['ne']:.4f}"
            for name, one in point.metrics.items()
        )
        lines = [
            f"{duration(point.seconds)} step {point.step:,}, {point.examples:,} examples{share}"
            f"{day}, {point.speed:,.0f} examples/s; {quality}"
        ]
        for name, table in point.tables.items():
            cells = table_cells(name, table)[1:]
            named = ", ".join(
                f"{column} {cell}" for column, cell in zip(TABLE_COLUMNS[1:], cells, strict=True)
            )
            lines.append(f"    {name}: {named}")
        return lines


class LiveScreen:
    """One screen that is drawn again a few times a second."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def update(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            self._live.update(picture(run), refresh=True)


def picture(run: Run) -> RenderableType:
    """The screen of a run as it is now."""
    done = run.examples / run.total if run.total else None
    head = Grid.grid(padding=(0, 2))
    day = run.source.day_of(run.examples)
    head.add_row(
        Text("dynamicemb train", style="bold"),
        f"step {run.steps:,}",
        f"{run.examples:,} examples" + (f" of {run.total:,}" if run.total else ""),
        "" if day is None else f"day {day:.1f}",
        f"{duration(run.seconds)} elapsed",
        "" if not done else f"{duration(_left(run))} left",
    )
    points = run.history.points
    progress = Grid.grid(padding=(0, 2))
    progress.add_row(
        ProgressBar(total=1.0, completed=done or 0.0, width=72),
        "" if done is None else f"{100 * done:.0f} %",
        f"{points[-1].speed:,.0f} examples/s" if points else "",
    )
    parts: list[RenderableType] = [head, progress]
    if points:
        count = min(run.options.window, points[-1].examples)
        title = Text(f"predicted before trained on, last {count:,} examples", style="italic")
        parts += [title, _quality(points[-1]), _tables(points[-1])]
    saved = "" if run.saved_step is None else f"checkpoint of step {run.saved_step:,}; "
    delta = "" if run.deltas.last is None else f"delta {run.deltas.last.sequence}; "
    parts.append(Text(f"{saved}{delta}Ctrl-C ends with a checkpoint", style="dim"))
    return Group(*parts)


def _left(run: Run) -> float:
    speed = run.history.points[-1].speed if run.history.points else run.examples / run.seconds
    return ((run.total or 0) - run.examples) / max(1.0, speed)


def _quality(point: Point) -> Grid:
    grid = Grid()
    grid.add_column("model")
    for name in ("loss", "AUC", "NE"):
        grid.add_column(name, justify="right")
    for name, one in point.metrics.items():
        grid.add_row(name, *(f"{one[key]:.4f}" for key in ("loss", "auc", "ne")))
    return grid


def _tables(point: Point) -> Grid:
    grid = Grid()
    for name in TABLE_COLUMNS:
        grid.add_column(name, justify="left" if name == "table" else "right")
    for name, table in point.tables.items():
        grid.add_row(*table_cells(name, table))
    return grid
