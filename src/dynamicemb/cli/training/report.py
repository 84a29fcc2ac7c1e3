"""The report of a run: one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dynamicemb.cli.training import plots
from dynamicemb.cli.training.learner import slots_of
from dynamicemb.cli.training.screen import size_of
from dynamicemb.cli.training.summary import summary, verdict
from dynamicemb.cli.training.tables import full_bytes
from dynamicemb.cli.training.why import by_frequency, sharing
from dynamicemb.cli.yaml import write_yaml

if TYPE_CHECKING:
    from dynamicemb.cli.training.run import Run

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;
background:#fff;color:#1f2937}
h1,h2{line-height:1.2}figure{margin:0}figcaption{font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:1.5rem}
svg{width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor}
.wide{overflow-x:auto;margin:1rem 0}
.grid{stroke:#8884}.legend{font-size:13px;min-height:1.5em}.legend span{margin-right:1em}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
table{border-collapse:collapse}td,th{border:1px solid #8886;padding:.2em .6em;text-align:right}
td:first-child,th:first-child{text-align:left}pre{overflow:auto;background:#8882;padding:1em}
@media(prefers-color-scheme:dark){body{background:#111827;color:#e5e7eb}}
"""


def write_report(run: Run, file: Path) -> Path:
    """Write the report of a run that has at least one point; returns ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(report_html(run), encoding="utf-8")
    return file


def report_html(run: Run) -> str:
    sections = [
        "<h1>dynamicemb train</h1>",
        f"<p>{escape(run.source.description)}; model {escape(run.options.model)}, device "
        f"{escape(str(run.device))}.</p>",
        f"<p id=verdict><strong>{escape(verdict(run))}</strong></p>",
        _grid(_kinds(run)),
        f'<div class="plots">{"".join(_over_time(run))}</div>',
        _why(run),
        f'<h2>The tables at the end</h2><div class="plots">{"".join(_distributions(run))}</div>',
        f'<h2>Time</h2><div class="plots">{_time(run)}</div>',
        "<h2>Summary</h2><ul>"
        + "".join(f"<li>{escape(line)}</li>" for line in summary(run))
        + "</ul>",
        f"<h2>Options</h2><pre>{escape(write_yaml(run.options.public()))}</pre>",
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>dynamicemb train</title><style>{STYLE}</style></head><body>"
        + "\n".join(sections)
        + "</body></html>\n"
    )


def _kinds(run: Run) -> list[list[str]]:
    """The models side by side."""
    last = run.history.points[-1].metrics
    slots = {kind: f"{slots_of(kind, run.options):,}" for kind in run.options.kinds}
    memory = size_of(full_bytes(run.options))
    head = ["tables", "rows of a table", "memory of a full one", "AUC (second half)"]
    grid = [[*head, "AUC (last window)", "loss", "normalised entropy"]]
    for name, one in last.items():
        known = name in slots
        grid.append(
            [
                name if known else f"{name}: the true odds",
                slots[name] if known else "",
                memory if known else "",
                f"{run.mean_auc(name):.4f}",
                *(f"{one[key]:.4f}" for key in ("auc", "loss", "ne")),
            ]
        )
    return grid


def _over_time(run: Run) -> list[str]:
    points = run.history.points
    days = [point.day for point in points]
    known = [day for day in days if day is not None]
    x: list[float] = known if len(known) == len(points) else run.history.series("examples")
    x_label = "day" if len(known) == len(points) else "examples"
    names = list(points[-1].metrics)
    tables = list(points[-1].tables)
    others = [name for name in names if name not in run.options.kinds]

    def quality(title: str, key: str, label: str) -> str:
        series = {name: run.history.series("metrics", name, key) for name in names}
        return plots.lines(title, x, series, x_label=x_label, y_label=label, dashed=others)

    def of_tables(title: str, key: str, label: str, unit: float = 1.0) -> str:
        series = {
            name: [one / unit for one in run.history.series("tables", name, key)] for name in tables
        }
        return plots.lines(title, x, series, x_label=x_label, y_label=label, from_zero=True)

    result = [quality("AUC over a sliding window (predicted before trained on)", "auc", "AUC")]
    base = run.options.kinds[-1]
    if len(run.options.kinds) > 1:
        against = run.history.series("metrics", base, "auc")
        gained = {
            kind: [
                a - b
                for a, b in zip(run.history.series("metrics", kind, "auc"), against, strict=True)
            ]
            for kind in run.options.kinds[:-1]
        }
        result.append(
            plots.lines(
                f"AUC above that of the {base} tables",
                x,
                gained,
                x_label=x_label,
                y_label="difference",
                from_zero=min(min(one) for one in gained.values()) > 0,
            )
        )
    return [
        *result,
        quality("Normalised entropy over the same window", "ne", "NE"),
        of_tables("Table growth", "rows", "rows"),
        of_tables("Memory of the tables", "bytes", "MiB", 2**20),
        of_tables("Hit rate: distinct ids of a batch with a row", "hit_rate", "share"),
        of_tables("Rows evicted so far", "evictions", "rows"),
    ]


#: What a kind of table does with its ids.
MEANINGS = {
    "dynamic": "A dynamic table gives every id a fresh row of its own and makes room by removing "
    "the row with the smallest score. What is lost is the history of ids that come back after "
    "their row went.",
    "zch": "With managed collision (zch) ids have static rows of their own too, which start anew "
    "when another id takes them; the map from ids to rows and its buffers take memory that the "
    "dynamic table has for more rows.",
    "hashed": "In a hashed table ids that fall into the same row share one vector, and a new id "
    "starts from what ids before it left there: the longer the stream, the more ids a row has had.",
}


def _why(run: Run) -> str:
    kinds = run.options.kinds
    if "hashed" not in kinds or len(kinds) < 2:
        return ""
    last = run.history.points[-1]
    head = ["table", "rows made so far", "slots", "distinct ids in the window", "hashed rows"]
    grid = [[*head, "ids of the window that share a hashed row"]]
    for name, one in sharing(run).items():
        table = last.tables[name]
        grid.append(
            [
                name,
                f"{table['inserts']:,.0f}",
                f"{table['capacity']:,.0f}",
                f"{one.ids:,}",
                f"{slots_of('hashed', run.options):,}",
                f"{100 * one.shared:.0f} %",
            ]
        )
    groups = by_frequency(run)
    names = list(groups[0].auc) if groups else []
    split = [["examples of the window", "how many", *names]]
    for group in groups:
        split.append(
            [group.name, f"{group.examples:,}", *(f"{group.auc[one]:.4f}" for one in names)]
        )
    return (
        "<h2>Why</h2><p>All models have the same dense layers, the same optimizers and the same "
        "bytes of rows, optimizer state and index. "
        + " ".join(escape(MEANINGS[kind]) for kind in kinds)
        + "</p>"
        + _grid(grid)
        + "<p>AUC of the window's examples by how often their rarest id occurred in it:</p>"
        + _grid(split)
    )


def _distributions(run: Run) -> list[str]:
    result = []
    together = sharing(run)
    for shown, table in run.tables.items():
        scores = table.scores()
        if len(scores):
            result.append(
                plots.histogram(
                    f"Scores of the rows of table {shown} ({run.options.score})",
                    scores,
                    x_label="score",
                    y_label="rows",
                    logarithmic=run.options.score.endswith("lfu"),
                )
            )
    for name, one in together.items():
        result.append(
            plots.histogram(
                f"How often ids of table {name} occurred in the window",
                one.frequencies,
                x_label="occurrences",
                y_label="ids",
                logarithmic=True,
            )
        )
    return result


def _time(run: Run) -> str:
    steps = max(1, run.steps)
    per_step = {name: 1000 * one / steps for name, one in run.timer.seconds.items()}
    return plots.bars("Milliseconds of a step, by what they went into", per_step, "ms")


def _grid(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:]
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
