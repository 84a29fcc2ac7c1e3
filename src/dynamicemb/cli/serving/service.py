"""The pages of ``dynamicemb serve``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import torch

from dynamicemb.checkpoint.http_table import pack_rows
from dynamicemb.cli.exposition import TYPE, Counter, Family, Histogram, exposition, labels
from dynamicemb.cli.http import BYTES, Refused, Request, Response, json_object, json_response
from dynamicemb.cli.serving.bodies import (
    check_number_of_ids,
    ids_of,
    ids_of_value,
    json_body,
    member,
    names_of,
    numbers,
)
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.states import State

#: Bytes of JSON that an id may take, with its comma and some room, and of what is around the ids.
BYTES_PER_ID, BYTES_AROUND = 32, 4096
TABLES = "/v1/tables"


class Service:
    """Answers from the state that a follower holds when a request begins."""

    def __init__(
        self, follower: Follower, *, max_ids: int, connections: Callable[[], int] | None = None
    ) -> None:
        self._follower, self._max_ids = follower, max_ids
        self.max_body = BYTES_AROUND + BYTES_PER_ID * max_ids
        self.connections = connections or (lambda: 0)
        self.stopping = False
        self._began = time.time()
        self._requests = Counter("requests_total", "Requests, by page and status.")
        self._seconds = Histogram(
            "request_seconds", "From a request's first line until its answer is ready to be sent."
        )
        self._ids = Counter("lookup_ids_total", "Ids that were looked up.")
        self._misses = Counter("lookup_misses_total", "Ids that have no row.")

    # ---- pages ----

    def respond(self, request: Request) -> Response:
        route, methods, page = self._route(request.path)
        try:
            if request.method not in methods:
                allowed = ", ".join(methods)
                raise Refused(
                    405, f"{request.method} of this; allowed: {allowed}", {"Allow": allowed}
                )
            response = page(request)
        except Refused as refused:
            response = refused.response()
        response.route = route
        return response

    def done(self, response: Response, seconds: float) -> None:
        self._requests.add(1, labels(route=response.route, code=str(response.status)))
        self._seconds.add(seconds, labels(route=response.route))

    def _route(self, path: str) -> tuple[str, tuple[str, ...], Callable[[Request], Response]]:
        """The name of a page in the metrics, the methods that it has, and its function."""
        if path.startswith(TABLES + "/"):
            name, slash, rest = path[len(TABLES) + 1 :].partition("/")
            if slash and rest == "lookup":
                return "lookup", ("POST", "GET", "HEAD"), lambda r: self._lookup(r, unquote(name))
            if not slash:
                return "table", ("GET", "HEAD"), lambda _: self._table(unquote(name))
        pages: dict[str, tuple[str, tuple[str, ...], Callable[[Request], Response]]] = {
            TABLES: ("tables", ("GET", "HEAD"), lambda _: self._tables()),
            "/v1/lookup": ("lookups", ("POST",), self._lookups),
            "/healthz": ("healthz", ("GET", "HEAD"), lambda _: self._health()),
            "/readyz": ("readyz", ("GET", "HEAD"), lambda _: self._ready()),
            "/metrics": ("metrics", ("GET", "HEAD"), lambda _: self._metrics()),
        }

        def missing(_: Request) -> Response:
            known = ", ".join((f"{TABLES}/NAME", f"{TABLES}/NAME/lookup", *pages))
            raise Refused(404, f"there is no {path[:200]!r} here; allowed: {known}")

        return pages.get(path, ("other", ("GET", "HEAD", "POST"), missing))

    def _state(self) -> State:
        state = self._follower.standing.state
        if state is None:
            raise Refused(503, "no checkpoint is open yet", {"Retry-After": "1"})
        return state

    def _named(self, state: State, name: str) -> str:
        full = state.names.get(name)
        if full is None:
            raise Refused(
                404, f"there is no table {name[:200]!r}; allowed: {names_of(sorted(state.tables))}"
            )
        return full

    def _lookup(self, request: Request, name: str) -> Response:
        state = self._state()
        full = self._named(state, name)
        ids, kind = ids_of(request, self._max_ids)
        found, rows = self._find(state, full, ids)
        if kind == BYTES:
            headers = {
                "X-Rows": str(len(ids)),
                "X-Dim": str(state.tables[full].dim),
                "X-Checkpoint": state.checkpoint,
                "X-Delta": str(state.sequence),
            }
            return Response(pack_rows(found, rows), BYTES, headers=headers)
        return json_response(_place(state) | {"table": full} | _answer(found, rows))

    def _lookups(self, request: Request) -> Response:
        """Several tables, all at one state."""
        state = self._state()
        wanted = member(json_body(request.body), "tables")
        if not isinstance(wanted, dict):
            raise Refused(400, 'tables is no object; allowed: {"tables": {"NAME": {"ids": [...]}}}')
        ids = {}
        for name, value in wanted.items():
            ids[name] = self._named(state, name), ids_of_value(member(value, "ids"))
        check_number_of_ids(sum(len(some) for _, some in ids.values()), self._max_ids)
        answers = {
            name: json_object(_answer(*self._find(state, *one))) for name, one in ids.items()
        }
        return json_response(_place(state) | {"tables": json_object(answers)})

    def _find(
        self, state: State, full: str, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found, rows = state.tables[full].find(ids)
        self._ids.add(len(ids), labels(table=full))
        self._misses.add(len(ids) - int(found.sum()), labels(table=full))
        return found, rows

    def _tables(self) -> Response:
        state = self._state()
        tables = [_about(state, name) for name in state.tables]
        return json_response(_place(state) | {"tables": tables})

    def _table(self, name: str) -> Response:
        state = self._state()
        return json_response(_place(state) | _about(state, self._named(state, name)))

    # ---- how it is ----

    def _health(self) -> Response:
        """200 only if the newest there is is served."""
        follower, standing = self._follower, self._follower.standing
        if self.stopping:
            status = "stopping"
        elif standing.state is None:
            status = "opening"
        else:
            status = "ok" if follower.following else "not following"
        about: dict[str, Any] = {"status": status, "problem": standing.problem}
        if standing.state is not None:
            about |= _place(standing.state) | {
                "base": standing.state.base,
                "created": standing.state.created,
                "folder": standing.state.folder,
                "tables": len(standing.state.tables),
                "rows": sum(standing.state.rows.values()),
            }
        about["follows"] = follower.poll_seconds > 0
        looked = follower.looked_at
        about["looked_seconds_ago"] = None if looked is None else round(time.time() - looked, 3)
        return json_response(about, 200 if status == "ok" else 503)

    def _ready(self) -> Response:
        """200 while lookups are answered, of whatever age."""
        if self.stopping:
            raise Refused(503, "the server ends")
        return json_response({"status": "ready"} | _place(self._state()))

    def _metrics(self) -> Response:
        return Response((exposition(self._families()).encode(),), TYPE)

    def _families(self) -> Iterator[Family]:
        for one in (self._requests, self._seconds, self._ids, self._misses):
            yield one.family()
        follower = self._follower
        yield follower.opened.family()
        yield follower.problems.family()
        yield _gauge("following", follower.following, "1 if the newest there is is served.")
        yield _gauge("connections", self.connections(), "Open connections.")
        yield _gauge("start_time_seconds", self._began, "When the server began, in Unix time.")
        state = follower.standing.state
        if state is None:
            return
        yield _gauge("delta", state.sequence, "Number of the last delta applied; 0 is the base.")
        yield _gauge("state_since_seconds", state.since, "When the state came, in Unix time.")
        rows = {labels(table=name): float(n) for name, n in state.rows.items()}
        yield Family("table_rows", "gauge", rows, "Rows of a table.")
        which = {labels(checkpoint=state.checkpoint, base=state.base): 1.0}
        yield Family("state_info", "gauge", which, "Which checkpoint is served.")


def _gauge(name: str, value: float, help: str) -> Family:
    return Family(name, "gauge", {(): float(value)}, help)


def _place(state: State) -> dict[str, Any]:
    return {"checkpoint": state.checkpoint, "delta": state.sequence}


def _answer(found: torch.Tensor, rows: torch.Tensor) -> dict[str, Any]:
    return {"found": found.tolist(), "embeddings": numbers(rows)}


def _about(state: State, full: str) -> dict[str, Any]:
    table = state.tables[full]
    return {
        "name": full,
        "short_name": table.name if state.names.get(table.name) == full else None,
        "dim": table.dim,
        "dtype": str(table.dtype).removeprefix("torch."),
        "rows": state.rows[full],
    }
