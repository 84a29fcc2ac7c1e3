"""What HTTP costs: ``dynamicemb serve`` against lookups in the same files without it.

    python benchmarks/serve.py [--rows 1000000] [--dim 64] [--ids 1000] [--clients 1 2 4]

A real server process on the loopback address. Each client is a thread with one connection, which
sends the next batch of random ids when it has the rows of the last as a tensor. Direct lookups take
turns with one client, so that a slow second of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dynamicemb import DynamicEmbDump
from dynamicemb.cli.machine import environment
from dynamicemb.serving import HttpTable, ServingTable
from report import print_table
from serving import filled


@contextmanager
def server(path: Path, threads: int) -> Iterator[str]:
    """The address of a ``dynamicemb serve`` of ``path``."""
    command = [sys.executable, "-m", "dynamicemb.cli", "serve", str(path), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", str(threads)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        while True:
            try:
                urllib.request.urlopen(f"{url}/healthz", timeout=10).read()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def batches(rows: int, ids: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(rows, (ids,), generator=draw) * 7919 for _ in range(64)]


def ms(call: Callable[[torch.Tensor], object], batch: torch.Tensor) -> float:
    begin = time.perf_counter()
    call(batch)
    return 1e3 * (time.perf_counter() - begin)


def requests_per_second(url: str, work: list[torch.Tensor], clients: int, seconds: float) -> float:
    """Of ``clients`` threads of this process together."""
    done = [0] * clients
    begin = threading.Barrier(clients + 1)
    end = threading.Event()

    def run(client: int) -> None:
        table = HttpTable(url, "t")
        table.find(work[client])
        begin.wait()
        while not end.is_set():
            table.find(work[(client * 7 + done[client]) % len(work)])
            done[client] += 1

    threads = [threading.Thread(target=run, args=(n,)) for n in range(clients)]
    for one in threads:
        one.start()
    begin.wait()
    started = time.perf_counter()
    time.sleep(seconds)
    end.set()
    for one in threads:
        one.join()
    return sum(done) / (time.perf_counter() - started)


def as_json(url: str, ids: torch.Tensor) -> None:
    body = json.dumps({"ids": ids.tolist()}).encode()
    request = urllib.request.Request(f"{url}/v1/tables/t/lookup", body)
    json.loads(urllib.request.urlopen(request, timeout=60).read())


def latencies(url: str, direct: ServingTable, work: list[torch.Tensor]) -> list[dict[str, Any]]:
    """One request at a time."""
    table = HttpTable(url, "t")
    times: dict[str, list[float]] = {"direct": [], "bytes": [], "JSON": []}
    for turn in range(400):
        batch = work[turn % len(work)]
        times["direct"].append(ms(direct.find, work[(turn + 32) % len(work)]))
        times["bytes"].append(ms(table.find, batch))
        if turn % 10 == 0:
            times["JSON"].append(ms(lambda ids: as_json(url, ids), batch))
    base = statistics.median(times["direct"])
    return [
        {
            "lookup": name,
            "ms": statistics.median(some),
            "p99 ms": sorted(some)[int(0.99 * len(some))],
            "million rows/s": len(work[0]) / statistics.median(some) / 1e3,
            "times direct": statistics.median(some) / base,
        }
        for name, some in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=1000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=1, help="of one lookup")
    parser.add_argument("--folder", help="where to write the checkpoint; default: temporary")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    about = environment()
    print(f"{about}\n{given.rows:,} rows of {given.dim} float32, {given.ids:,} ids a request")
    work = batches(given.rows, given.ids)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        DynamicEmbDump(folder, filled(given.rows, given.dim), serving_index=True)
        with server(Path(folder), given.threads) as url:
            one_by_one = latencies(url, ServingTable(folder), work)
            rates = [
                (clients, requests_per_second(url, work, clients, given.seconds))
                for clients in given.clients
            ]
    together = [
        {"clients": clients, "requests/s": rate, "million rows/s": rate * given.ids / 1e6}
        for clients, rate in rates
    ]
    print_table(one_by_one)
    print_table(together)
    if given.json:
        options = {name: getattr(given, name) for name in ("rows", "dim", "ids", "threads")}
        result = {"environment": about, "options": options}
        result |= {"latency": one_by_one, "throughput": together}
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
