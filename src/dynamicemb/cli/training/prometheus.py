"""The metrics of a run for Prometheus, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamicemb.cli.exposition import TYPE, Family, exposition, labels
from dynamicemb.cli.http import HttpServer, Refused, Request, Response, serving
from dynamicemb.errors import UsageError

if TYPE_CHECKING:
    from dynamicemb.cli.training.run import Run

#: Of a table: counts that only grow.
COUNTERS = ("hits", "misses", "inserts", "evictions", "failures", "rejections")


def families(run: Run) -> Iterator[Family]:
    """The state of a run."""
    yield Family("steps_total", "counter", {(): float(run.steps)})
    yield Family("examples_total", "counter", {(): float(run.examples)})
    if not run.history.points:
        return
    last = run.history.points[-1]
    yield Family("examples_per_second", "gauge", {(): last.speed})
    for key in ("loss", "auc", "ne"):
        by_model = {labels(model=name): one[key] for name, one in last.metrics.items()}
        yield Family(f"window_{key}", "gauge", by_model)
    for key in next(iter(last.tables.values()), {}):
        by_table = {labels(table=name): float(one[key]) for name, one in last.tables.items()}
        if key in COUNTERS:
            yield Family(f"table_{key}_total", "counter", by_table)
        else:
            yield Family(f"table_{key}", "gauge", by_table)


class _Metrics:
    """The site: one page."""

    max_body = 0

    def __init__(self, run: Run) -> None:
        self._run = run

    def respond(self, request: Request) -> Response:
        if request.path != "/metrics":
            raise Refused(404, "see /metrics")
        return Response((exposition(families(self._run)).encode(),), TYPE)

    def done(self, response: Response, seconds: float) -> None:
        """Nothing: requests come every few seconds."""


@contextmanager
def serve_metrics(run: Run, port: int) -> Iterator[str]:
    """Serve ``/metrics`` on the loopback address until the block ends; yields the address."""
    try:
        server = HttpServer(_Metrics(run), port=port)
    except UsageError as error:
        raise UsageError(f"--metrics-port {port} cannot be used: {error.__cause__}") from error
    with serving(server) as url:
        yield f"{url}/metrics"
