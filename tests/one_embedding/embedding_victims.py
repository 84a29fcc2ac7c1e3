"""Processes that train and save until they are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from embeddings import DIM, make, uniform_tables

TIMEOUT_S = 600
IDS = 12000
BATCH = 500


def ids_of_step(step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, IDS, (BATCH, 2), generator=draw)


def train_steps(embedding: Any, steps: range) -> None:
    adam = torch.optim.Adam(embedding.parameters(), lr=0.05)
    for step in steps:
        adam.zero_grad()
        ids = ids_of_step(step)
        ((embedding(ids) - (ids % 5)[..., None]) ** 2).mean().backward()
        adam.step()


def open_embedding(path: str, store: str) -> Any:
    """96 floats to a row: a cache of 1 MiB holds 2,560 of the 5,000 and more that there are."""
    tables = uniform_tables(0.1, 0.2)
    return make(path, store, dim=4 * DIM, size_factor=3, tables=tables, resume=True)


def train_and_save(path: str, store: str, every: int, report: Connection) -> None:
    """Train for ever, saving "last" and saying how many steps it has."""
    torch.set_num_threads(1)
    embedding = open_embedding(path, store)
    for begin in range(0, 1_000_000, every):
        train_steps(embedding, range(begin, begin + every))
        report.send(("saving", begin + every))
        embedding.save_snapshot("last")
        report.send(("saved", begin + every))


def die_in_save(path: str, store: str, method: str, report: Connection) -> None:
    """Train 8 steps, save "last", train 8 more, and be killed when the second save calls ``method``
    of the store."""
    torch.set_num_threads(1)
    embedding = open_embedding(path, store)
    train_steps(embedding, range(8))
    embedding.save_snapshot("last")
    train_steps(embedding, range(8, 16))

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    report.send("saved")
    setattr(embedding._snapshots.store, method, die)
    embedding.save_snapshot("last")
    report.send("survived")


def start(work: Any, *arguments: Any) -> tuple[Any, Any]:
    """(the process that does ``work``, its reports)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "dynamicemb"])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*arguments, sending))
    process.start()
    sending.close()  # so that the end of the process ends the pipe
    return process, receiving


def kill_while_it_saves(path: Path, store: str) -> int:
    """Kill a process in its third save, after 12 steps, or soon after; the steps of the last save
    that it reported."""
    process, reports = start(train_and_save, str(path), store, 4)
    saved = 0
    while True:
        assert reports.poll(TIMEOUT_S)
        what, steps = reports.recv()
        if what == "saving" and steps == 12:
            break
        saved = steps if what == "saved" else saved
    os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT_S)
    try:
        while True:  # what it still said before it died
            what, steps = reports.recv()
            saved = steps if what == "saved" else saved
    except EOFError:
        pass
    return saved
