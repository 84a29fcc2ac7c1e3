"""The ``dynamicemb`` command without the seconds that importing torch takes.

A process that has imported it all waits at a socket; a small program that is called ``dynamicemb``
hands it its arguments, folder, environment and standard files, and ends as the command does, which
runs in a fork of that process. Signals reach the command; when the program is killed, it ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

_CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, lambda number, frame: server.send(bytes([number])))
text = json.dumps(request).encode()
socket.send_fds(server, [len(text).to_bytes(8, "little")], [0, 1, 2])
server.sendall(text)
status = server.recv(1)
sys.exit(status[0] if status else 1)
"""


def start(folder: Path) -> None:
    """Fork the process that waits, and write the program to ``folder``."""
    path = str(folder / "socket")
    client = folder / "dynamicemb"
    client.write_text(_CLIENT.format(python=sys.executable, path=path))
    client.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    if os.fork() == 0:
        _wait(listener)


def _wait(listener: socket.socket) -> None:
    parent = os.getppid()
    listener.settimeout(1.0)
    while os.getppid() == parent:  # ends with the process that forked it
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _run(connection)
            connection.close()
    os._exit(0)


def _run(connection: socket.socket) -> None:
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(length, "little"):
        text += connection.recv(1 << 16)
    request = json.loads(text)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["dynamicemb", *request["arguments"]]
    threading.Thread(target=_pass_signals_on, args=(connection,), daemon=True).start()
    from dynamicemb.cli.app import main

    try:
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        connection.send(bytes([status & 255]))
    os._exit(status)


def _pass_signals_on(connection: socket.socket) -> None:
    while number := connection.recv(1):
        os.kill(os.getpid(), number[0])
    os.kill(os.getpid(), signal.SIGKILL)
