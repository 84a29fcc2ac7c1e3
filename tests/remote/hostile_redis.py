"""Servers that speak Redis' protocol badly, and a program that tries everything against them.

As a program: ``python hostile_redis.py URL...`` runs every operation of a table at every URL and
prints, as JSON, per URL and operation what came of it, how long it took, and by how much the memory
of the process grew.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

from redis_servers import WAIT_S

#: A server's replies to a command, piece by piece.
Behaviour = Callable[[list[bytes]], Iterator[bytes]]

DRIP_S = 0.05
GREETINGS = {
    b"CLIENT": b"+OK\r\n",
    b"AUTH": b"+OK\r\n",
    b"SELECT": b"+OK\r\n",
    b"PING": b"+PONG\r\n",
}
_ONE_VALUE = b"$1\r\na\r\n"


def always(*texts: bytes) -> Behaviour:
    """The same reply to every command."""
    return lambda _: iter(texts)


def drips(_: list[bytes]) -> Iterator[bytes]:
    yield b"$1000000\r\n"
    while True:
        time.sleep(DRIP_S)
        yield b"a"


def drips_a_line(_: list[bytes]) -> Iterator[bytes]:
    yield b"-ERR "
    while True:
        time.sleep(DRIP_S)
        yield b"a"


def _endless(begin: bytes, piece: bytes) -> Behaviour:
    block = piece * (65536 // len(piece))
    return lambda _: itertools.chain([begin], itertools.repeat(block))


def pages(command: list[bytes]) -> Iterator[bytes]:
    """A scan that never ends, of new keys of table "t" with new cursors; DBSIZE is 10."""
    if command[0] == b"DBSIZE":
        yield b":10\r\n"
        return
    if command[0] != b"SCAN":
        yield b"*2\r\n$1\r\n7\r\n*0\r\n"
        return
    cursor = int(command[1]) + 1
    ids = range(cursor * 10_000, cursor * 10_000 + 10_000)
    yield page(b"%d" % cursor, [b"{:t:%02x}%016x" % (_shard(id_), id_) for id_ in ids])


def page(cursor: bytes, keys: list[bytes]) -> bytes:
    """A reply to SCAN."""
    text = b"".join(b"$%d\r\n%s\r\n" % (len(key), key) for key in keys)
    return b"*2\r\n$%d\r\n%s\r\n*%d\r\n%s" % (len(cursor), cursor, len(keys), text)


def _shard(number: int) -> int:
    shard = 0
    for byte in number.to_bytes(8, "big"):
        shard ^= byte
    return shard


def endless(*keys: bytes) -> Behaviour:
    """A scan that never ends, of the same keys; the largest database that is believed."""

    def answer(command: list[bytes]) -> Iterator[bytes]:
        if command[0] == b"DBSIZE":
            yield b":%d\r\n" % 2**32
        elif command[0] == b"SCAN":
            yield page(b"%d" % (int(command[1]) + 1), list(keys))
        else:
            yield b"*2\r\n$1\r\n7\r\n*0\r\n"

    return answer


def a_large_database(command: list[bytes]) -> Iterator[bytes]:
    """DBSIZE as no Redis has it."""
    yield b":%d\r\n" % (2**32 + 1) if command[0] == b"DBSIZE" else b"*2\r\n$1\r\n7\r\n*0\r\n"


#: Every reply that Redis does not give, by name.
BEHAVIOURS: dict[str, Behaviour] = {
    "drips": drips,
    "drips a line": drips_a_line,
    "silence": always(),
    "half a reply": always(b"$10\r\nabc"),
    "half an array": always(b"*3\r\n$1\r\na\r\n"),
    "bulk of 2 GB": _endless(b"$2147483648\r\n", b"a"),
    "bulk of 1 GB in an array": _endless(b"*2\r\n$1073741824\r\n", b"a"),
    "array of 10^8": _endless(b"*100000000\r\n", _ONE_VALUE),
    "arrays of 10^5 in arrays": _endless(b"*1000\r\n", b"*100000\r\n" + b"*0\r\n" * 1000),
    "empty arrays": _endless(b"*200000\r\n", b"*0\r\n"),
    "long values": _endless(b"*1000\r\n", b"$60000\r\n" + b"a" * 60000 + b"\r\n"),
    "an endless line": _endless(b"+", b"a"),
    "an endless error": _endless(b"-ERR ", b"a"),
    "a long error": always(b"-ERR " + b"x" * 60_000 + b"\r\n"),
    "an endless length": _endless(b"$", b"1"),
    "integers": always(b":1\r\n"),
    "large integers": always(b":9223372036854775807\r\n"),
    "too large integers": always(b":" + b"9" * 40 + b"\r\n"),
    "no integers": always(b":abc\r\n"),
    "status": always(b"+OK\r\n"),
    "another status": always(b"+QUEUED\r\n"),
    "values": always(b"$5\r\nhello\r\n"),
    "nil": always(b"$-1\r\n"),
    "no array": always(b"*-1\r\n"),
    "an empty array": always(b"*0\r\n"),
    "the wrong number": always(b"*2\r\n$-1\r\n$-1\r\n"),
    "negative lengths": always(b"$-5\r\n"),
    "negative counts": always(b"*-7\r\n"),
    "a page that does not go on": always(b"*2\r\n$1\r\n7\r\n*0\r\n"),
    "pages of new keys": pages,
    "empty pages": endless(),
    "pages of another table": endless(b"{:u:07}0000000000000007"),
    "a large database": a_large_database,
    "a cursor that is none": always(b"*2\r\n$3\r\nabc\r\n*0\r\n"),
    "a page of numbers": always(b"*2\r\n$1\r\n0\r\n*2\r\n:1\r\n:2\r\n"),
    "200,000 levels": always(b"*1\r\n" * 200_000),
    "garbage": always(bytes(range(256)) * 100),
    "no end of a value": always(b"$3\r\nabcdef\r\n"),
    "a push": always(b">2\r\n$1\r\na\r\n:1\r\n"),
    "an attribute": always(b"|1\r\n$1\r\na\r\n:1\r\n+OK\r\n"),
    "RESP3's null": always(b"_\r\n"),
    "errors in arrays": always(b"*1\r\n-ERR no\r\n"),
    "MOVED to nowhere": always(b"-MOVED here\r\n"),
    "ASK": always(b"-ASK 99999999 nowhere:x\r\n"),
    "MOVED for ever": always(b"-MOVED 5 127.0.0.1:PORT\r\n"),
    "MOVED of a slot that is none": always(b"-MOVED 99999999 127.0.0.1:PORT\r\n"),
    "ASK for ever": always(b"-ASK 5 127.0.0.1:PORT\r\n"),
    "TRYAGAIN": always(b"-TRYAGAIN later\r\n"),
    "CLUSTERDOWN": always(b"-CLUSTERDOWN it is\r\n"),
    "LOADING": always(b"-LOADING for ever\r\n"),
    "too many clients": always(b"-ERR max number of clients reached\r\n"),
    "HTTP": always(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "more replies than commands": always(b"+OK\r\n+OK\r\n:1\r\n$-1\r\n"),
}
#: What is an honest reply to an operation.
HONEST = {
    ("integers", "contains"),
    ("integers", "erase"),
    ("integers", "contains, upstream"),
    ("status", "insert"),
    ("status", "insert with a ttl"),
    ("status", "insert, upstream"),
    ("the wrong number", "find, upstream"),  # right here: a row has two parts
}


#: The same for a cluster, which is asked for one value at a time in upstream's layout.
HONEST_OF_CLUSTER = HONEST | {("nil", "find, upstream")}


class HostileRedis:
    """Answers every command by ``behaviour``. honest_start: except those of connecting, which are
    answered as Redis does. ``commands``: the names of the others, in the order in which they came.
    """

    def __init__(self, behaviour: Behaviour, *, honest_start: bool = True, tls: Any = None) -> None:
        self._behaviour, self._honest_start, self._tls = behaviour, honest_start, tls
        self.commands: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            stream = connection.makefile("rb")
            while True:
                count = int(stream.readline().strip()[1:])
                command = []
                for _ in range(count):
                    size = int(stream.readline().strip()[1:])
                    command.append(stream.read(size + 2)[:-2])
                if self._honest_start and command[0] in GREETINGS:
                    connection.sendall(GREETINGS[command[0]])
                    continue
                self.commands.append(command[0])
                for piece in self._behaviour(command):
                    connection.sendall(piece.replace(b"PORT", b"%d" % self.port))


ONE_NODE = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:PORT\r\n"


def of_a_cluster(
    behaviour: Behaviour, slots: bytes = ONE_NODE, last_key_of_mget: int = -1
) -> Behaviour:
    """A cluster that answers CLUSTER SLOTS and COMMAND so, and all else by ``behaviour``."""

    def answer(command: list[bytes]) -> Iterator[bytes]:
        name = command[0].upper()
        if name == b"CLUSTER" or name == b"CLUSTER SLOTS":
            yield slots
        elif name == b"COMMAND":
            last = [last_key_of_mget if name == b"mget" else 1 for name in _COMMANDS]
            yield b"*%d\r\n" % len(_COMMANDS)
            for name, position in zip(_COMMANDS, last, strict=True):
                text = b"*6\r\n$%d\r\n%s\r\n:-2\r\n*0\r\n:1\r\n:%d\r\n:1\r\n"
                yield text % (len(name), name, position)
        else:
            yield from behaviour(command)

    return answer


_COMMANDS = [b"get", b"set", b"mget", b"mset", b"exists", b"unlink"]


def _node(number: int) -> bytes:
    host = b"127.0.%d.%d" % divmod(number, 250)
    return b"*2\r\n$%d\r\n%s\r\n:PORT\r\n" % (len(host), host)


def _ranges(count: int) -> bytes:
    """CLUSTER SLOTS of so many servers."""
    text, ends = b"*%d\r\n" % count, [16384 * number // count for number in range(count + 1)]
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        text += b"*3\r\n:%d\r\n:%d\r\n" % (begin, end - 1) + _node(number)
    return text


def _moved_each_time() -> Behaviour:
    numbers = itertools.count()
    return lambda _: iter([b"-MOVED 5 127.0.%d.%d:PORT\r\n" % divmod(next(numbers) % 60000, 250)])


_NO_ROW = always(b"*1\r\n$-1\r\n")
#: Clusters that describe themselves as none is, by name.
CLUSTERS: dict[str, Behaviour] = {
    "keys of MGET up to argument 10^8": of_a_cluster(_NO_ROW, last_key_of_mget=10**8),
    "keys of MGET up to argument 10^13": of_a_cluster(_NO_ROW, last_key_of_mget=10**13),
    "10,000 replicas": of_a_cluster(
        _NO_ROW,
        b"*1\r\n*10003\r\n:0\r\n:16383\r\n" + b"".join(map(_node, range(10_001))),
    ),
    "all slots 20,000 times": of_a_cluster(_NO_ROW, b"*20000\r\n" + ONE_NODE[4:] * 20_000),
    "16,384 servers": of_a_cluster(_NO_ROW, _ranges(16384)),
    "1,000 servers": of_a_cluster(_NO_ROW, _ranges(1000)),  # as many as there may be
    "MOVED to a new server each time": of_a_cluster(_moved_each_time()),
}
#: Honest replies of theirs.
HONEST_OF_CLUSTERS = {(name, "find") for name in CLUSTERS if name.startswith("keys of MGET")}


#: By (server, operation).
Outcomes = dict[tuple[str, str], dict[str, Any]]
TYPED = ("StoreError:", "InvalidArgumentError:", "CorruptStoreError:")
MOST_MB = 64


def tried(servers: dict[str, tuple[str, HostileRedis]]) -> Outcomes:
    """What came of every operation at the URLs, in which PORT stands for the server's, in a process
    of their own. Closes the servers."""
    refusing = HostileRedis(always())
    refusing.close()
    urls = {n: url.replace("PORT", str(server.port)) for n, (url, server) in servers.items()}
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    first = f"redis://127.0.0.1:{refusing.port}/?retry_limit=0"
    command = [sys.executable, __file__, first, *urls.values()]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=WAIT_S
        )
    finally:
        for _, server in servers.values():
            server.close()
    assert done.returncode == 0, done.stderr
    by_url = json.loads(done.stdout)
    return {(n, op): outcome for n, url in urls.items() for op, outcome in by_url[url].items()}


def check(outcomes: Outcomes, seconds: float, honest: Set[tuple[str, str]] = HONEST) -> None:
    """All are typed, and take at most so long and MOST_MB."""
    wrong = {
        case: outcome["what"]
        for case, outcome in outcomes.items()
        if not outcome["what"].startswith(TYPED)
        and not (outcome["what"] == "done" and case in honest)
    }
    assert wrong == {}
    assert {case: o for case, o in outcomes.items() if o["seconds"] > seconds} == {}
    assert {case: o for case, o in outcomes.items() if o["grew_mb"] > MOST_MB} == {}


def operations(url: str) -> dict[str, Callable[[], object]]:
    """Everything that a table does with a server."""
    import torch
    from row_makers import FORMAT, IDS, make

    from dynamicemb.tiers.remote.open import open_rows

    ids, rows = IDS[:1], make(IDS[:1])  # a single id: a count of 1 fits, any other does not

    def table(more: str = "") -> Any:
        return open_rows(url + more, "t", FORMAT)

    packed, upstream, ttl = table(), table("&&layout=upstream"), table("&&ttl=1d")
    return {
        "find": lambda: packed.pull(ids),
        "insert": lambda: packed.push(ids, rows),
        "insert with a ttl": lambda: ttl.push(ids, rows),
        "contains": lambda: packed.contains(ids),
        "erase": lambda: packed.erase(ids),
        "size": packed.count,
        "export": lambda: list(packed.iterate(10)),
        "clear": packed.clear,
        "find, upstream": lambda: upstream.pull(ids),
        "insert, upstream": lambda: upstream.push(ids, torch.cat([rows])),
        "contains, upstream": lambda: upstream.contains(ids),
    }


def memory_mb(name: str) -> float:
    """VmRSS, or VmHWM: the most there was."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) / 1024


def attempt(work: Callable[[], object]) -> dict[str, Any]:
    """What came of it."""
    Path("/proc/self/clear_refs").write_text("5")  # the most there was is what there is
    before, begin, what = memory_mb("VmRSS"), time.monotonic(), "done"
    try:
        work()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    return {
        "what": what,
        "seconds": time.monotonic() - begin,
        "grew_mb": memory_mb("VmHWM") - before,
    }


def main(urls: list[str]) -> None:
    for work in operations(urls[0]).values():  # what is loaded and made only once
        attempt(work)
    by_url = {url: {n: attempt(work) for n, work in operations(url).items()} for url in urls[1:]}
    print(json.dumps(by_url))


if __name__ == "__main__":
    main(sys.argv[1:])
