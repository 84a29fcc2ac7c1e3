"""What it costs to refuse a file: memory and processor time, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """Peak memory beyond that of the process before, in MiB; seconds of the processor; the error,
    "" for none."""

    memory: float
    seconds: float
    error: str


def costs(paths: Mapping[str, Path]) -> dict[str, Cost]:
    """Of opening each path, as a reader does that its name begins with ("checkpoint", "content" or
    "store"), one after the other, each in a fork of one process."""
    given = json.dumps({name: str(path) for name, path in paths.items()})
    done = subprocess.run(
        [sys.executable, __file__], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: Cost(**cost) for name, cost in json.loads(done.stdout).items()}


def _openers() -> dict[str, Callable[[str], object]]:
    import pyarrow.parquet  # noqa: F401  (so that its own memory is not counted)
    import safetensors  # noqa: F401

    import dynamicemb.cli.contents.one_embedding  # noqa: F401
    from dynamicemb import DynamicEmbTableOptions
    from dynamicemb.checkpoint import CheckpointReader
    from dynamicemb.cli.contents.find import ReadOptions, open_content
    from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
    from dynamicemb.tiers import SsdStore

    options = DynamicEmbTableOptions(dim=4, max_capacity=128)
    sgd = Optimizer(OptimizerKind.SGD, OptimizerArgs())
    return {
        "checkpoint": CheckpointReader.open,
        "content": lambda path: open_content(path, ReadOptions()),
        "store": lambda path: SsdStore(options, sgd, path=path),
    }


def _peak() -> float:
    with open("/proc/self/status") as file:
        (line,) = (one for one in file if one.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _measure(open_it: Callable[[str], object], path: str) -> dict[str, object]:
    memory, seconds, error = _peak(), time.process_time(), ""
    try:
        open_it(path)
    except Exception as problem:
        error = f"{type(problem).__name__}: {str(problem)[:300]}"
    return {
        "memory": _peak() - memory,
        "seconds": time.process_time() - seconds,
        "error": error,
    }


def _in_a_fork(open_it: Callable[[str], object], path: str) -> object:
    here, there = os.pipe()
    if os.fork() == 0:
        with os.fdopen(there, "w") as pipe:
            json.dump(_measure(open_it, path), pipe)
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        return json.loads(pipe.read())


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    openers = _openers()
    found = {
        name: _in_a_fork(openers[name.partition(" ")[0]], path)
        for name, path in json.loads(sys.stdin.read()).items()
    }
    sys.stdout.write(json.dumps(found))
