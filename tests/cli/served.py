"""Checkpoints to serve, and a real server process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dynamicemb import BatchedDynamicEmbeddingTables, DynamicEmbTableOptions
from dynamicemb.table import Table

#: Long enough for a machine that is busy with something else.
PATIENCE_S = 300
DIM = 4
NAMES = ("user", "item")
IDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), *range(100, 400)])


def make_tables(value: float = 0.0) -> BatchedDynamicEmbeddingTables:
    """Two tables whose rows of IDS are all ``value``."""
    options = [DynamicEmbTableOptions(dim=DIM, max_capacity=4096) for _ in NAMES]
    model = BatchedDynamicEmbeddingTables(options, table_names=list(NAMES), optimizer="sgd", seed=1)
    for table in model.tables:
        set_rows(table, value)
    return model


def set_rows(table: Table, value: float, ids: torch.Tensor = IDS) -> None:
    table.insert(ids, torch.full((len(ids), DIM), value))


def damage(folder: Path, what: str = "*item*_emb_values.*") -> bytes:
    """Change a byte of a file in a checkpoint; the bytes before."""
    file = file_of(folder, what)
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    return content


def file_of(folder: Path, what: str = "*item*_emb_values.*") -> Path:
    (file,) = folder.rglob(what)
    return file


class ServerProcess:
    """``dynamicemb serve`` in a process of its own; use as a context manager."""

    def __init__(self, path: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "dynamicemb.cli", "serve", str(path), "--port", "0"]
        self.log = ""
        # A file takes all of a long log; a pipe that nobody reads would stop the server.
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, "--poll-seconds", "0.02", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"listening on (http://([0-9.]+):(\d+))\n", line)
        if found is None:
            self.process.kill()
            raise AssertionError(f"{line!r}: {self.ended()}")
        self.url, self.port = found[1], int(found[3])

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> str:
        """Wait for the end; what it wrote."""
        self.process.communicate(timeout=PATIENCE_S)
        if not self._stderr.closed:
            with self._stderr:
                self._stderr.seek(0)
                self.log = self._stderr.read()
        return self.log

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status. ``log`` has what it wrote."""
        self.process.send_signal(number)
        self.ended()
        return self.process.returncode

    def get(self, path: str) -> tuple[int, Any]:
        return exchange(self.port, "GET", path)

    def wait_for(self, **expected: Any) -> dict[str, Any]:
        """The health, once it has these values."""
        end = time.monotonic() + PATIENCE_S
        while True:
            about = self.get("/healthz")[1]
            if all(about.get(name) == value for name, value in expected.items()):
                return dict(about)
            assert time.monotonic() < end, about
            assert self.process.poll() is None
            time.sleep(0.01)

    def listens(self) -> bool:
        """Whether this process, and no other that took the port after it, listens at it."""
        inodes = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(f":{self.port:04X}") and fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a connection that was closed just then
                if os.readlink(file) in inodes:
                    return True
        return False

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)


def exchange(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and content of one request; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, sent, headers or {})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.headers["Content-Type"] == "application/json" and content:
        return answer.status, json.loads(content)
    return answer.status, content
