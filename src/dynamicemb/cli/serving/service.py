"""The pages of ``dynamicemb serve``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import torch

from dynamicemb.cli.exposition import TYPE, Counter, Family, Histogram, exposition, labels
from dynamicemb.cli.http import BYTES, Refused, Request, Response, json_response
from dynamicemb.cli.serving import answers
from dynamicemb.cli.serving.answers import Lookup
from dynamicemb.cli.serving.bodies import (
    check_number_of_ids,
    ids_of,
    ids_of_wish,
    json_body,
    member,
    names_of,
)
from dynamicemb.cli.serving.follow import Follower
from dynamicemb.cli.serving.memory import DEFAULT_BYTES, SMALL, Memory
from dynamicemb.cli.serving.states import State

TABLES = "/v1/tables"
#: Pages that are answered however many connections and requests there are.
VITAL = ("/healthz", "/metrics")


class Service:
    """Answers from the state that a follower holds when a request begins."""

    def __init__(
        self,
        follower: Follower,
        *,
        max_ids: int,
        memory: Memory | None = None,
        connections: Callable[[], int] | None = None,
    ) -> None:
        self._follower, self._max_ids = follower, max_ids
        self.memory = memory or Memory(DEFAULT_BYTES, max_ids)
        self.max_body = self.memory.max_body
        self.connections = connections or (lambda: 0)
        self.stopping = False
        self._began = time.time()
        self._requests = Counter("requests_total", "Requests, by page and status.")
        self._seconds = Histogram(
            "request_seconds", "From a request's first line until its answer begins to be sent."
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
        large = len(request.body) > SMALL
        ids, kind = ids_of(request, self._max_ids, self.memory)
        lookup = self._asked(state, full, ids)
        if kind == BYTES:
            headers = {
                "X-Rows": str(len(ids)),
                "X-Dim": str(lookup.table.dim),
                "X-Checkpoint": state.checkpoint,
                "X-Delta": str(state.sequence),
            }
            return answers.bytes_response(lookup, headers, self.memory, large=large)
        return answers.json_response(_place(state) | {"table": full}, lookup, self.memory)

    def _lookups(self, request: Request) -> Response:
        """Several tables, all at one state."""
        state = self._state()
        lookups = self.memory.read(request.body, lambda body: self._wanted(state, body))
        number = sum(len(lookup.ids) for lookup in lookups.values())
        check_number_of_ids(number, self._max_ids)
        self.memory.keep(request.lease, number)
        return answers.json_response_of_tables(_place(state), lookups, self.memory)

    def _wanted(self, state: State, body: bytearray) -> dict[str, Lookup]:
        wanted = member(json_body(body), "tables")
        if not isinstance(wanted, dict):
            raise Refused(400, 'tables is no object; allowed: {"tables": {"NAME": {"ids": [...]}}}')
        return {
            name: self._asked(state, self._named(state, name), ids_of_wish(value, self._max_ids))
            for name, value in wanted.items()
        }

    def _asked(self, state: State, full: str, ids: torch.Tensor) -> Lookup:
        def count(number: int, misses: int) -> None:
            self._ids.add(number, labels(table=full))
            self._misses.add(misses, labels(table=full))

        return Lookup(state.tables[full], ids, count)

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
        memory = self.memory
        yield _gauge("memory_limit_bytes", memory.size, "For requests and answers in flight.")
        yield _gauge("memory_reserved_bytes", memory.reserved, "Of that limit, what is reserved.")
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


def _about(state: State, full: str) -> dict[str, Any]:
    table = state.tables[full]
    return {
        "name": full,
        "short_name": table.name if state.names.get(table.name) == full else None,
        "dim": table.dim,
        "dtype": str(table.dtype).removeprefix("torch."),
        "rows": state.rows[full],
    }
