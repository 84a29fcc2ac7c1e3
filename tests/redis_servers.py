"""Real redis-servers that tests start, stop, stall and restart, and a proxy that cuts."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 600.0  # the machine may be busy, or its processes stopped for a while
PATIENT = f"timeout={WAIT_S:.0f}s"  # the option of a URL


def binary(name: str = "redis-server") -> str:
    """The path of redis-server; installed first where root may."""
    found = shutil.which(name)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 600}
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        install = ["apt-get", "install", "-y", "--no-install-recommends", "redis-server"]
        if subprocess.run(install, env=environment, **quiet).returncode:  # type: ignore[call-overload]
            subprocess.run(["apt-get", "update"], **quiet)  # type: ignore[call-overload]
            subprocess.run(install, env=environment, **quiet)  # type: ignore[call-overload]
        found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install redis-server")
    return found


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to clients: a server that is
    stopped finds it free again."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """A redis-server on a port of its own, with its files in a folder of its own."""

    def __init__(self, *arguments: str, sentinel: str | None = None) -> None:
        self.folder = tempfile.mkdtemp(prefix="redis-test-")
        self.arguments = arguments
        self.sentinel = sentinel
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def socket_path(self) -> str:
        return os.path.join(self.folder, "redis.sock")

    def url(self, rest: str = "", *, scheme: str = "redis", user: str = "", port: int = 0) -> str:
        """The server's URL; with ``rest``, a database and options. Its timeout is one that never
        comes, unless ``rest`` has another."""
        if "timeout=" not in rest:
            rest += f"{'&&' if '?' in rest else '?'}{PATIENT}"
        return f"{scheme}://{user}127.0.0.1:{port or self.port}/{rest}"

    def start(self) -> None:
        base = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder]
        if self.sentinel is not None:
            config = Path(self.folder, "sentinel.conf")
            if not config.exists():
                config.write_text(self.sentinel)
            command = [binary(), str(config), "--sentinel", *base]
        else:
            plain = ["--save", "", "--unixsocket", self.socket_path, "--loglevel", "warning"]
            command = [binary(), *base, *plain, *self.arguments]
        log = open(os.path.join(self.folder, "log"), "ab")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        port = self._port_of_arguments()
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
                return
            except OSError:
                assert self.process.poll() is None, Path(self.folder, "log").read_text()
                assert time.monotonic() < deadline, "redis-server does not start"
                time.sleep(0.02)

    def _port_of_arguments(self) -> int:
        if "--tls-port" in self.arguments:
            return int(self.arguments[self.arguments.index("--tls-port") + 1])
        return self.port

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(WAIT_S)
            self.process = None

    def stall(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self, **settings: Any) -> Any:
        import redis

        return redis.Redis(port=self.port, socket_timeout=WAIT_S, **settings)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Proxy:
    """Passes connections on to a port. ``cut_after(n)``: the next connection that carries more than
    n bytes of replies is reset there, once; connections after it live. ``pieces`` of replies, of so
    many bytes, take ``pause_s`` each."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.pieces, self.pause_s = 0, 0.0
        self._cuts: list[int] = []
        self.resets = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, *replies: int) -> None:
        with self._lock:
            self._cuts.extend(replies)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with client, server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    try:
                        data = source.recv(65536)
                        if not data:
                            return
                        if source is client:
                            server.sendall(data)
                            continue
                        for at in range(0, len(data), self.pieces) if self.pieces else ():
                            time.sleep(self.pause_s)
                            client.sendall(data[at : at + self.pieces])
                        if self.pieces:
                            continue
                        cut = self._cut(passed + len(data))
                        client.sendall(data if cut is None else data[: max(0, cut - passed)])
                        passed += len(data)
                    except OSError:
                        return
                    if cut is not None:  # closed so, the client sees a reset
                        now = struct.pack("ii", 1, 0)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
                        return

    def _cut(self, passed: int) -> int | None:
        with self._lock:
            if not self._cuts or passed <= self._cuts[0]:
                return None
            self.resets += 1
            return self._cuts.pop(0)

    def close(self) -> None:
        self._listener.close()
