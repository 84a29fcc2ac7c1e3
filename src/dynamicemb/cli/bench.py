"""``dynamicemb bench``: dynamic against static tables on this machine, as a table to paste."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dynamicemb.cli.arguments import MAX_THREADS, Parser, add_options, build_options, option
from dynamicemb.cli.benching.cases import (
    CASES,
    FBGEMM,
    OURS,
    TORCH,
    Measured,
    bytes_needed,
    devices,
    measure,
)
from dynamicemb.cli.benching.markdown import markdown
from dynamicemb.cli.benching.timing import keep_freed_memory
from dynamicemb.cli.benching.workload import DISTRIBUTIONS, Workload
from dynamicemb.cli.machine import available_bytes, environment
from dynamicemb.cli.output import bytes_text
from dynamicemb.errors import UsageError

#: What ``--quick`` takes where nothing else is said.
QUICK = {"rows": 20_000, "batch": 4096, "seconds": 2.0}
MAX_REPEATS = 15


@dataclass
class BenchOptions:
    """Every option; the order is that of the help."""

    rows: int = option(1_000_000, "rows of a table, all of them there", minimum=100)
    dim: int = option(64, "columns of a row, float32", minimum=1)
    batch: int = option(65_536, "ids of a batch", minimum=1)
    bag: int = option(10, "ids of a bag where rows are pooled", minimum=1)
    ids: str = option("zipf", "how often an id comes", choices=DISTRIBUTIONS)
    device: str = option(
        "auto", "auto (the CPU, and a GPU if there is one)", choices=("auto", "cpu", "cuda")
    )
    threads: int | None = option(
        None, "threads; without: as many as torch takes", minimum=1, maximum=MAX_THREADS
    )
    seconds: float = option(60.0, "about how long it may take for each device", above=0.0)
    quick: bool = option(False, "a small table and few samples: does it run at all")
    json: bool = option(False, "one JSON object instead of text")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(
        "bench",
        "Time lookups and training steps of a dynamic table beside torch.nn.Embedding, "
        "torch.nn.EmbeddingBag and, where it is installed, FBGEMM's table-batched embeddings, with "
        "the same batches in the same process, and print a table in Markdown.",
    )
    add_options(parser, BenchOptions)
    given = vars(parser.parse(arguments))
    if given.get("quick"):
        given = QUICK | given
    options = build_options(BenchOptions, given, None)
    if options.bag > options.batch:
        raise UsageError(f"--bag is {options.bag}; allowed: at most --batch, {options.batch}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda; allowed: cpu, since there is no GPU here")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # else torch warns of what it does itself
    keep_freed_memory()
    results = _measure_all(options)
    about = {
        "machine": environment() | {"threads": torch.get_num_threads()},
        "workload": {
            name: value
            for name, value in asdict(options).items()
            if name in ("rows", "dim", "batch", "bag", "ids", "quick")
        },
    }
    if options.json:
        lines = [asdict(one) | {"ratio": _ratios(one)} for one in results]
        sys.stdout.write(json.dumps(about | {"results": lines}, indent=1) + "\n")
    else:
        sys.stdout.write(_text(about, results))
    return 0


def _measure_all(options: BenchOptions) -> list[Measured]:
    results = []
    for device in devices(options.device):
        _check_memory(options, device)
        work = Workload(options.rows, dim=options.dim, device=device)
        batches = {
            pooled: work.batches(options.ids, size=options.batch, bag=options.bag if pooled else 1)
            for pooled in (False, True)
        }
        for number, case in enumerate(CASES):
            _tell(f"{device.type}: {case.name} ({number + 1} of {len(CASES)})")
            results.append(
                measure(
                    case,
                    work,
                    batches[case.pooled],
                    repeats=3 if options.quick else MAX_REPEATS,
                    seconds=options.seconds / len(CASES) / 2,  # the other half builds the tables
                )
            )
    _tell("")
    return results


def _check_memory(options: BenchOptions, device: torch.device) -> None:
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info()[0]
    needed = max(bytes_needed(case, options.rows, options.dim) for case in CASES)
    if needed > free:
        raise UsageError(
            f"--rows {options.rows} of --dim {options.dim} need about {bytes_text(needed)} on the "
            f"{device.type}; free: {bytes_text(free)}"
        )


def _tell(text: str) -> None:
    """What goes on, if somebody looks at a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def _ratios(one: Measured) -> dict[str, float | None]:
    return {peer: one.ratio(peer) for peer in (TORCH, FBGEMM)}


def _text(about: dict[str, Any], results: Sequence[Measured]) -> str:
    disturbed = [any(time.clean < 3 for time in one.times.values()) for one in results]
    lines = [
        {"device": one.device, "case": one.case + (" [1]" if marked else "")}
        | {
            f"{name}, ms": one.times[name].ms if name in one.times else None
            for name in (OURS, TORCH, FBGEMM)
        }
        | {f"ratio to {peer}": ratio for peer, ratio in _ratios(one).items()}
        for one, marked in zip(results, disturbed, strict=True)
    ]
    text = [markdown(lines), "", *_notes(about, results)]
    if any(disturbed):
        text.append("[1] Other processes took processor time; not reliable.")
    return "\n".join(text) + "\n"


def _notes(about: dict[str, Any], results: Sequence[Measured]) -> list[str]:
    machine, work = about["machine"], about["workload"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    commit = f" ({machine['commit']})" if machine["commit"] else ""
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    missing = {
        f"{one.device}, {peer}: {why}" for one in results for peer, why in one.missing.items()
    }
    return [
        f"One table of {work['rows']:,} rows of {work['dim']} float32, all ids there; batches of "
        f"{work['batch']:,} ids, {work['ids']}; pooled: bags of {work['bag']}. Times are medians "
        "of one batch; train is forward, backward and update. A ratio below 1 is in favour of "
        "dynamicemb, which gets any 64-bit ids; the static tables get row numbers.",
        "",
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['threads']} "
        f"threads{gpu}; Python {machine['python']}, {packages}{commit}.",
        *(f"Not measured: {line}." for line in sorted(missing)),
    ]
