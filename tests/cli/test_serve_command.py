"""``dynamicemb serve`` as a process: deltas under load, damage, signals."""

from __future__ import annotations

import contextlib
import http.client
import signal
import threading
from pathlib import Path

import pytest
import torch
from served import (
    DIM,
    IDS,
    PATIENCE_S,
    ServerProcess,
    damage,
    exchange,
    file_of,
    make_tables,
    set_rows,
)

from dynamicemb import DynamicEmbDump, StoreError
from dynamicemb.cli.app import main
from dynamicemb.incremental_dump import dump_delta
from dynamicemb.serving import HttpTable

DELTAS = 20
BOTH = {"tables": {name: {"ids": IDS[:20].tolist()} for name in ("user", "item")}}


class Reader(threading.Thread):
    """Looks all ids up until it sees the last delta; ``wrong`` says what was not one state."""

    def __init__(self, server: ServerProcess, kind: str) -> None:
        super().__init__()
        self._server, self._kind = server, kind
        self.wrong: list[str] = []
        self.seen: list[float] = []

    def run(self) -> None:
        read = self._bytes() if self._kind == "bytes" else self._json
        while not self.seen or self.seen[-1] < DELTAS:
            values = read()
            self.seen.append(values[0])
            if len(set(values)) != 1 or self.seen != sorted(self.seen):
                self.wrong.append(str((self.seen[-3:], set(values))))
                return

    def _bytes(self):  # type: ignore[no-untyped-def]
        table = HttpTable(self._server.url, "item", timeout=PATIENCE_S)
        return lambda: table(IDS).reshape(-1).tolist()

    def _json(self) -> list[float]:
        """Both tables, and the number of the delta that the answer says it is of."""
        status, answer = exchange(self._server.port, "POST", "/v1/lookup", BOTH)
        assert status == 200
        rows = [row for one in answer["tables"].values() for row in one["embeddings"]]
        return [float(answer["delta"]), *(value for row in rows for value in row)]


def test_clients_see_whole_states_while_deltas_are_applied_and_the_end_is_clean(
    memory_path: Path,
) -> None:
    model = make_tables()
    dump_delta(memory_path, model)
    options = ("--missing", "-1", "--max-ids", str(len(IDS)), "--threads", "2", "--preload")
    with ServerProcess(memory_path, *options, "--no-verify", "--grace-seconds", "300") as server:
        server.wait_for(status="ok", delta=0)
        readers = [Reader(server, kind) for kind in ("bytes", "json", "bytes", "json")]
        for one in readers:
            one.start()
        for value in range(1, DELTAS + 1):
            for table in model.tables:
                set_rows(table, float(value))
            dump_delta(memory_path, model)
        for one in readers:
            one.join(PATIENCE_S)
            assert not one.is_alive()
            assert one.wrong == []
            assert one.seen[-1] == DELTAS
        table = HttpTable(server.url, "user")
        assert table(torch.tensor([5])).tolist() == [[-1.0] * DIM]
        with pytest.raises(StoreError, match=f"at most {len(IDS)}"):
            table(torch.arange(len(IDS) + 1))
        about = server.wait_for(status="ok", delta=DELTAS)
        assert about["rows"] == 2 * len(IDS)
        _end_with_a_request_in_flight(server)


def _end_with_a_request_in_flight(server: ServerProcess) -> None:
    """A request whose head was read when SIGTERM comes is answered; new ones are not taken."""
    assert server.listens()
    waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    with server.connect() as connection, contextlib.closing(waiting):
        waiting.request("GET", "/healthz")
        waiting.getresponse().read()
        idle = waiting.sock
        connection.sendall(
            b"POST /v1/tables/user/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16\r\n"
            b"Content-Type: application/octet-stream\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = connection.makefile("rb")
        assert answer.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert answer.readline() == b"\r\n"
        server.process.send_signal(signal.SIGTERM)
        assert idle.recv(1) == b""  # those that wait are closed, after the port
        assert not server.listens()
        assert server.process.poll() is None
        connection.sendall(b"".join(int(n).to_bytes(8, "little") for n in (0, 1)))
        text = answer.read()
    assert text.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in text
    assert len(text.partition(b"\r\n\r\n")[2]) == 2 * DIM * 4 + 1
    log = server.ended()
    assert server.process.returncode == 0, log
    assert f"delta {DELTAS}" in log
    assert "ends after the requests that were begun" in log
    assert "Traceback" not in log


def test_it_waits_for_a_checkpoint_and_serves_the_last_good_state_beside_a_damaged_delta(
    memory_path: Path,
) -> None:
    model = make_tables()
    made, chain = memory_path / "made", memory_path / "chain"
    dump_delta(made, model)
    for table in model.tables:
        set_rows(table, 1.0)
    dump_delta(made, model)
    content = damage(made / "delta_00000001")
    with ServerProcess(chain, "--host", "0.0.0.0", "--wait") as server:
        server.wait_for(status="opening")
        assert server.get("/v1/tables")[0] == 503
        chain.mkdir()
        (made / "base").rename(chain / "base")
        server.wait_for(status="ok", delta=0, rows=2 * len(IDS))
        delta = (made / "delta_00000001").rename(chain / "delta_00000001")
        about = server.wait_for(status="not following", delta=0)
        assert "delta_00000001" in about["problem"]
        table = HttpTable(server.url.replace("0.0.0.0", "127.0.0.1"), "item")
        assert table(IDS).unique().tolist() == [0.0]
        metrics = server.get("/metrics")[1].decode()
        assert "dynamicemb_following 0.0" in metrics
        assert server.get("/healthz")[0] == 503
        assert server.get("/readyz")[0] == 200
        file_of(delta).write_bytes(content)
        server.wait_for(status="ok", delta=1)
        assert torch.equal(table(IDS), torch.ones(len(IDS), DIM))
        assert server.end(signal.SIGINT) == 0
    assert "0.0.0.0 is no loopback address" in server.log
    assert server.log.count("ERROR: goes on with") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "CHECKPOINT"),
        (("nowhere",), "CHECKPOINT is 'nowhere'; allowed: a folder that exists"),
        ((".", "--port", "70000"), "--port is 70000"),
        ((".", "--wait", "--poll-seconds", "0"), "--poll-seconds above 0"),
        ((".", "--prot", "1"), "did you mean --port?"),
        ((".", "--max-ids", "0"), "--max-ids is 0"),
        ((".", "--allow-host", "http://a.b"), "--allow-host is 'http://a.b'; allowed: a name"),
        ((".", "--allow-host", "a", "--allow-host", "b:80"), "--allow-host is 'b:80'"),
        ((".", "--max-ids", "1000000"), "--memory-mb is 256; allowed: at least"),
        ((".", "--host", "no.such.host.invalid"), "no.such.host.invalid"),
    ],
)
def test_mistakes_in_the_command_line_are_told(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_what_the_tables_refuse_is_an_error(
    memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DynamicEmbDump(memory_path, make_tables())
    assert main(["serve", str(memory_path), "--port", "0", "--rank", "5"]) == 2
    assert "rank is 5; allowed: 0 to 0" in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(threading.enumerate())  # of other tests: a dump in the background
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert f"dynamicemb: there is no checkpoint in '{tmp_path}'" in capsys.readouterr().err
    started = set(threading.enumerate()) - before
    assert not [one for one in started if one.name.startswith("dynamicemb-")]
