"""The end of a run in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamicemb.cli.training.screen import duration, size_of

if TYPE_CHECKING:
    from dynamicemb.cli.training.run import Run


def verdict(run: Run) -> str:
    """The tables that count against the others, over the second half of the run."""
    names = list(run.history.points[-1].metrics)
    means = {name: run.mean_auc(name) for name in names}
    text = "AUC, predicted before trained on, mean of the second half: " + ", ".join(
        f"{name} {value:.4f}" for name, value in means.items()
    )
    for other in run.options.kinds[1:]:
        won = means[run.main] - means[other]
        word = "above" if won >= 0 else "below"
        text += f"; the {run.main} tables are {abs(won):.4f} {word} the {other} ones"
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
    delta = run.deltas.last
    if delta is not None:
        lines.append(
            f"for serving: {run.deltas.folder}, newest: {delta.path} ({delta.rows:,} rows)"
        )
    return lines
