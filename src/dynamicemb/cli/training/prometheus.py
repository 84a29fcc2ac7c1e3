"""The metrics of a run for Prometheus, over HTTP."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from dynamicemb.errors import UsageError

if TYPE_CHECKING:
    from dynamicemb.cli.training.run import Run

LOOPBACK = "127.0.0.1"
#: Of a table: counts that only grow.
COUNTERS = ("hits", "misses", "inserts", "evictions", "failures", "rejections")


def exposition(run: Run) -> str:
    """The state of a run in Prometheus' text format."""
    lines: list[str] = []

    def add(name: str, kind: str, values: dict[str, float]) -> None:
        lines.append(f"# TYPE dynamicemb_{name} {kind}")
        lines.extend(
            f"dynamicemb_{name}{labels} {value!r}"
            for labels, value in values.items()
            if not math.isnan(value)
        )

    add("steps_total", "counter", {"": float(run.steps)})
    add("examples_total", "counter", {"": float(run.examples)})
    if run.history.points:
        last = run.history.points[-1]
        add("examples_per_second", "gauge", {"": last.speed})
        for key in ("loss", "auc", "ne"):
            by_model = {f'{{model="{name}"}}': one[key] for name, one in last.metrics.items()}
            add(f"window_{key}", "gauge", by_model)
        for key in next(iter(last.tables.values()), {}):
            counter = key in COUNTERS
            by_table = {f'{{table="{name}"}}': float(one[key]) for name, one in last.tables.items()}
            name = f"table_{key}_total" if counter else f"table_{key}"
            add(name, "counter" if counter else "gauge", by_table)
    return "\n".join(lines) + "\n"


@contextmanager
def serve_metrics(run: Run, port: int) -> Iterator[str]:
    """Serve ``/metrics`` on the loopback address until the block ends; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.partition("?")[0] == "/metrics"
            body = (exposition(run) if known else "see /metrics\n").encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: requests come every few seconds."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise UsageError(f"--metrics-port {port} cannot be used: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="dynamicemb-metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
