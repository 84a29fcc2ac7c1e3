"""The end of a run in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamicemb.cli.training.screen import duration, size_of

if TYPE_CHECKING:
    from dynamicemb.cli.training.run import Run


def verdict(run: Run) -> str:
    """The dynamic tables against the hashed ones, over the second half of the run."""
    names = list(run.history.points[-1].metrics)
    means = {name: run.mean_auc(name) for name in names}
    text = "AUC, predicted before trained on, mean of the second half: " + ", ".join(
        f"{name} {value:.4f}" for name, value in means.items()
    )
    if "hashed" in means:
        won = means["dynamic"] - means["hashed"]
        text += f"; the dynamic tables {'won' if won >= 0 else 'lost'} {abs(won):.4f}"
    return text


def summary(run: Run) -> list[str]:
    """The lines, for the screen and the report."""
    lines = [
        f"{run.steps:,} steps, {run.examples:,} examples in {duration(run.seconds)} "
        f"({run.examples / max(1e-9, run.seconds):,.0f} examples/s)"
    ]
    if not run.history.points:
        return lines
    last = run.history.points[-1]
    for name, one in last.metrics.items():
        lines.append(
            f"{name}: loss {one['loss']:.4f}, AUC {one['auc']:.4f}, normalised entropy "
            f"{one['ne']:.4f} over the last {min(run.options.window, run.examples):,} examples"
        )
    lines.append(verdict(run))
    for name, table in last.tables.items():
        lines.append(
            f"table {name}: {table['rows']:,.0f} rows in {table['capacity']:,.0f} slots "
            f"({size_of(table['bytes'])}); {table['inserts']:,.0f} inserted, "
            f"{table['evictions']:,.0f} evicted, {table['rejections']:,.0f} not admitted, "
            f"{table['failures']:,.0f} without a place"
        )
    return lines
