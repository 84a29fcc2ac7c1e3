"""The CPU benchmark: our times, the peers' times in the same run, the ratios and the targets.

    python benchmarks/cpu.py                      everything; about ten minutes
    python benchmarks/cpu.py --quick              1M rows, few samples, short growth tables
    python benchmarks/cpu.py --only forward,slots --json out.json

Workload: a table of 4,000,000 rows of 64 float32, random 64-bit ids, batches of 65,536 ids, all of
them in the table; uniform and Zipf 1.05; pooled means 6,553 bags of 10. Forward is an evaluation
forward, train is a whole step (forward, backward, update). How a call is timed is in
``dynamicemb/cli/benching/timing.py``, what it is compared with in ``contenders.py`` beside it and
in ``peers.py``. Ratio = our time / the peer's time; a ratio above its target is a MISS. A peer that
is not installed has its line too, with what to install. The exit status
is 0 in every one of these cases: this is a measurement, not a test.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import ours
import peers
from dynamicemb.cli.benching import contenders
from dynamicemb.cli.benching.contenders import Contender, NotInstalled
from dynamicemb.cli.benching.timing import Result, interleave, keep_freed_memory
from dynamicemb.cli.benching.workload import BAG, BATCH, DIM, DISTRIBUTIONS, Batch, Workload
from dynamicemb.cli.machine import available_bytes, environment
from report import Row, print_rows, print_table, summary

# TDE has no package to run here. Measured side by side on 2026-11-15, 4M ids, uniform, one thread:
# its naive map with the LFU-LRU strategy took 162 ns an id, boost::unordered_flat_map 62 ns.
TDE_OVER_BOOST = 162 / 62
BARE_ROW_BYTES = DIM * 4
BATCH_SIZES = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
TABLE_SIZES = (1_000_000, 4_000_000, 32_000_000)
GROWTH_LOAD = 0.75
# Slots of a table at most: row, key, digest, score and state, and the ids and batches beside it.
BYTES_PER_SLOT = 320

Target = float | Mapping[str, float] | None


@dataclass
class Run:
    """The options and the results so far."""

    rows: int
    repeats: int
    threads: int
    quick: bool
    tfra_python: str | None
    boost_include: str | None
    comparisons: list[Row] = field(default_factory=list)
    growth: list[dict[str, Any]] = field(default_factory=list)
    _work: Workload | None = None

    @property
    def work(self) -> Workload:
        """The main table's ids; one table at a time."""
        if self._work is None or self._work.n != self.rows:
            self._work = Workload(self.rows)
        return self._work

    def measure(
        self, contenders: Mapping[str, Contender], batches: list[Batch]
    ) -> dict[str, Result]:
        """Median time of one batch for every contender; small batches are timed several at once."""
        calls = max(1, 8192 // batches[0].ids.numel())

        def several(contender: Contender) -> Callable[[int], None]:
            def call(i: int) -> None:
                for batch in batches[i * calls : (i + 1) * calls]:
                    contender.run(batch)

            return call

        def one(contender: Contender) -> Callable[[int], Any]:
            return lambda i: contender.run(batches[i])

        bind = one if calls == 1 else several
        results = interleave(
            {name: bind(contender) for name, contender in contenders.items()},
            batches=len(batches) // calls,
            repeats=self.repeats,
        )
        return {
            name: Result(result.ms / calls, result.clean, result.taken)
            for name, result in results.items()
        }


def per_id(results: Mapping[str, Result], name: str, batches: list[Batch]) -> float | None:
    result = results.get(name)
    return None if result is None else result.ms * 1e6 / batches[0].ids.numel()


def undisturbed(*results: Mapping[str, Result]) -> str:
    """Whether every time of a line rests on samples that other processes did not disturb."""
    return "yes" if all(r.clean >= 3 for of in results for r in of.values()) else "no"


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def built(
    factories: Mapping[str, Callable[[], Contender]],
) -> Iterator[tuple[dict[str, Contender], dict[str, str]]]:
    """The contenders that could be built, and why the others could not; freed at the end."""
    contenders: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for name, make in factories.items():
        try:
            contenders[name] = make()
        except NotInstalled as error:
            missing[name] = str(error)
    try:
        yield contenders, missing
    finally:
        for contender in contenders.values():
            contender.close()
        contenders.clear()
        gc.collect()


# Comparisons with a target ------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A peer of a case: how to build it, and the ratio to reach (None: for information)."""

    make: Callable[[], Contender]
    target: Target = None

    def target_for(self, distribution: str) -> float | None:
        if isinstance(self.target, Mapping):
            return self.target[distribution]
        return self.target


def compare(
    run: Run,
    case: str,
    make_ours: Callable[[], Contender],
    against: Mapping[str, Peer],
    *,
    batches: Mapping[str, list[Batch]],
    unit: str,
) -> list[Row]:
    """Time ours and all peers together and add one row per peer and distribution."""
    rows = []
    with built({"ours": make_ours} | {k: p.make for k, p in against.items()}) as (here, missing):
        for distribution, of in batches.items():
            results = run.measure(here, of)
            times = {
                name: per_id(results, name, of) if unit == "ns/id" else result.ms
                for name, result in results.items()
            }
            for name, peer in against.items():
                disturbed = tuple(
                    who for who in ("ours", name) if who in results and results[who].clean < 3
                )
                rows.append(
                    Row(
                        case,
                        distribution,
                        name,
                        unit,
                        times.get("ours"),
                        times.get(name),
                        peer.target_for(distribution),
                        missing.get(name, ""),
                        disturbed,
                    )
                )
    run.comparisons += rows
    return rows


def main_batches(run: Run, bag: int = 1) -> dict[str, list[Batch]]:
    return {d: run.work.batches(d, bag=bag) for d in DISTRIBUTIONS}


def forward(run: Run) -> None:
    """unpooled evaluation forward"""
    work = run.work
    rows = compare(
        run,
        "unpooled forward",
        lambda: contenders.Forward(contenders.build(work)),
        {
            "FBGEMM TBE, no pooling": Peer(lambda: contenders.Tbe(work, "none"), 0.40),
            "FBGEMM TBE, bags of 1": Peer(lambda: contenders.Tbe(work, "sum"), 0.65),
            "F.embedding": Peer(lambda: contenders.FunctionalEmbedding(work), 1.0),
            "TorchRec MCH + EC": Peer(lambda: peers.ManagedCollision(work), 0.20),
        },
        batches=main_batches(run),
        unit="ns/id",
    )
    print_rows(rows)


def pooled(run: Run) -> None:
    """pooled evaluation forward, bags of 10"""
    work = run.work
    rows = compare(
        run,
        "pooled forward",
        lambda: contenders.Forward(contenders.build(work, pooling="sum")),
        {
            "FBGEMM TBE SUM": Peer(lambda: contenders.Tbe(work, "sum"), 0.70),
            "nn.EmbeddingBag": Peer(
                lambda: contenders.EmbeddingBag(work), {"uniform": 1.3, "zipf": 1.5}
            ),
        },
        batches=main_batches(run, BAG),
        unit="ns/id",
    )
    print_rows(rows)


def train_adagrad(run: Run) -> None:
    """training step, rowwise Adagrad"""
    work = run.work
    rows = compare(
        run,
        "train, rowwise Adagrad",
        lambda: contenders.Train(contenders.build(work, optimizer="rowwise_adagrad")),
        {
            "FBGEMM TBE, bags of 1": Peer(
                lambda: contenders.Tbe(work, "sum", "rowwise_adagrad"), 0.70
            ),
            "FBGEMM TBE, no pooling": Peer(
                lambda: contenders.Tbe(work, "none", "rowwise_adagrad"), 0.10
            ),
            "nn.Embedding + Adagrad (full)": Peer(
                lambda: contenders.SparseEmbedding(work, "adagrad")
            ),
        },
        batches=main_batches(run),
        unit="ms",
    )
    print_rows(rows)


def train_sgd(run: Run) -> None:
    """training step, SGD"""
    work = run.work
    rows = compare(
        run,
        "train, SGD",
        lambda: contenders.Train(contenders.build(work, optimizer="sgd")),
        {
            "FBGEMM TBE, bags of 1": Peer(lambda: contenders.Tbe(work, "sum", "sgd"), 0.65),
            "FBGEMM TBE, no pooling": Peer(lambda: contenders.Tbe(work, "none", "sgd")),
            "nn.Embedding + SGD": Peer(lambda: contenders.SparseEmbedding(work, "sgd")),
        },
        batches=main_batches(run),
        unit="ms",
    )
    print_rows(rows)


def train_adam(run: Run) -> None:
    """training step, Adam"""
    work = run.work
    rows = compare(
        run,
        "train, Adam",
        lambda: contenders.Train(contenders.build(work, optimizer="adam")),
        {"nn.Embedding + SparseAdam": Peer(lambda: contenders.SparseEmbedding(work, "adam"), 0.22)},
        batches=main_batches(run),
        unit="ms",
    )
    print_rows(rows)


def tfra(run: Run) -> None:
    """TFRA: lookup and training steps"""
    work = run.work
    batches = main_batches(run)

    def worker(optimizer: str | None) -> Callable[[], Contender]:
        return lambda: peers.Tfra(
            work, batches, python=run.tfra_python, optimizer=optimizer, threads=run.threads
        )

    rows = compare(
        run,
        "lookup",
        lambda: contenders.Forward(contenders.build(work)),
        {"TFRA": Peer(worker(None), 0.22)},
        batches=batches,
        unit="ns/id",
    )
    for optimizer, label in (("sgd", "SGD"), ("adagrad", "Adagrad"), ("adam", "Adam")):

        def make_ours(optimizer: str = optimizer) -> Contender:
            return contenders.Train(contenders.build(work, optimizer=optimizer))

        rows += compare(
            run,
            f"train, {label}",
            make_ours,
            {
                "TFRA": Peer(worker(optimizer), 0.15),
                "TFRA, TF1 optimizer": Peer(worker(f"tf1-{optimizer}")),
            },
            batches=batches,
            unit="ms",
        )
    print_rows(rows)


def slots(run: Run) -> None:
    """id to slot, one thread"""
    work = run.work
    with torch_threads(1):
        rows = compare(
            run,
            "id to slot, 1 thread",
            lambda: ours.FindSlots(contenders.build(work)),
            {"boost flat map": Peer(lambda: peers.BoostFlatMap(work, run.boost_include), 0.65)},
            batches=main_batches(run),
            unit="ns/id",
        )
    boost = next(row for row in rows if row.distribution == "uniform")
    derived = None if boost.theirs is None else boost.theirs * TDE_OVER_BOOST
    tde = Row(boost.case, "uniform", "TDE + LFU-LRU [1]", boost.unit, boost.ours, derived, 0.40)
    tde.missing, tde.disturbed = boost.missing, boost.disturbed
    run.comparisons.append(tde)
    print_rows([*rows, tde])
    print(
        "[1] derived, not run: TDE has no package. Boost's time in this run times 162/62, which is "
        "what both took side by side on 2026-11-15 (4M ids, uniform)."
    )


# Growth of cost ------------------------------------------------------------------------------


def growth_line(run: Run, section: str, **values: Any) -> dict[str, Any]:
    """Keep the line for the JSON file, and return it for the table."""
    run.growth.append({"section": section} | values)
    return values


def size(run: Run) -> None:
    """growth with the table, load 0.75, ns per id (F.embedding alone, after ours is freed)"""
    lines = []
    for n in (min(run.rows, TABLE_SIZES[0]),) if run.quick else TABLE_SIZES:
        needed = n / GROWTH_LOAD * BYTES_PER_SLOT
        if needed > (available := available_bytes()):
            note = f"skipped: needs {needed / 1e9:.0f} GB, {available / 1e9:.0f} GB are free"
            lines.append(growth_line(run, "size", ids=n, distribution=note))
            continue
        run._work = None  # one set of ids at a time
        lines += size_lines(run, n)
    print_table(lines)


def size_of_ours(
    run: Run,
    work: Workload,
    batches: Mapping[str, list[Batch]],
    found: dict[str, dict[str, Result]],
) -> float:
    """Add our times (and boost's) to ``found``; bytes per id of our table."""
    module = contenders.build(work, load=GROWTH_LOAD)
    factories: dict[str, Callable[[], Contender]] = {
        "boost": lambda: peers.BoostFlatMap(work, run.boost_include),
        "slot": lambda: ours.FindSlots(module),
    }
    for d, of in batches.items():
        found[d] |= run.measure({"forward": contenders.Forward(module)}, of)
        found[d] |= run.measure({"train": contenders.Train(module)}, of)
    with torch_threads(1), built(factories) as (here, _):
        for d, of in batches.items():
            found[d] |= run.measure(here, of)
    stats = module.tables[0].stats()
    return stats.bytes / stats.size


def size_lines(run: Run, n: int) -> list[dict[str, Any]]:
    work = Workload(n)
    batches = {d: work.batches(d) for d in DISTRIBUTIONS}
    found: dict[str, dict[str, Result]] = {d: {} for d in DISTRIBUTIONS}
    bytes_per_id = size_of_ours(run, work, batches, found)
    gc.collect()
    with built({"F.embedding": lambda: contenders.FunctionalEmbedding(work)}) as (here, _):
        for d, of in batches.items():
            found[d] |= run.measure(here, of)
    return [
        growth_line(
            run,
            "size",
            ids=n,
            distribution=d,
            **{
                "forward": per_id(found[d], "forward", batches[d]),
                "F.embedding": per_id(found[d], "F.embedding", batches[d]),
                "train (rowwise Adagrad)": per_id(found[d], "train", batches[d]),
                "id to slot, 1 thread": per_id(found[d], "slot", batches[d]),
                "boost flat, 1 thread": per_id(found[d], "boost", batches[d]),
                "bytes per id": bytes_per_id,
                "undisturbed": undisturbed(found[d]),
            },
        )
        for d in DISTRIBUTIONS
    ]


def batch(run: Run) -> None:
    """growth with the batch, ns per id"""
    sizes = (1024, BATCH) if run.quick else BATCH_SIZES
    print_table(steps(run, "batch", [(size, run.threads) for size in sizes]))


def threads(run: Run) -> None:
    """growth with the threads, ns per id"""
    print_table(steps(run, "threads", [(BATCH, n) for n in (1, 2)]))


def steps(run: Run, section: str, points: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Forward and training step at each (batch size, threads); the peers take turns with ours."""
    work = run.work
    lines = []
    module = contenders.build(work)
    forwards: dict[str, Callable[[], Contender]] = {
        "ours": lambda: contenders.Forward(module),
        "F.embedding": lambda: contenders.FunctionalEmbedding(work),
    }
    trains: dict[str, Callable[[], Contender]] = {
        "ours": lambda: contenders.Train(module),
        "TBE, bags of 1": lambda: contenders.Tbe(work, "sum", "rowwise_adagrad"),
    }
    with built(forwards) as (forward_here, _), built(trains) as (train_here, _):
        for size, count in points:
            for distribution in DISTRIBUTIONS:
                of = work.batches(distribution, size=size)
                with torch_threads(count):
                    evaluated = run.measure(forward_here, of)
                    trained = run.measure(train_here, of)
                lines.append(
                    growth_line(
                        run,
                        section,
                        batch=size,
                        threads=count,
                        distribution=distribution,
                        **{
                            "forward": per_id(evaluated, "ours", of),
                            "F.embedding": per_id(evaluated, "F.embedding", of),
                            "train (rowwise Adagrad)": per_id(trained, "ours", of),
                            "TBE train, bags of 1": per_id(trained, "TBE, bags of 1", of),
                            "undisturbed": undisturbed(evaluated, trained),
                        },
                    )
                )
    return lines


def memory(run: Run) -> None:
    """bytes per id, against the bare row of 256 bytes"""
    lines = []
    work = Workload(100_000 if run.quick else 1_000_000)
    states = {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 4 * DIM, "adam": 8 * DIM}
    for optimizer, state in states.items():
        for load in (0.5, 0.75):
            stats = contenders.build(work, optimizer=optimizer, load=load).tables[0].stats()
            bare = BARE_ROW_BYTES + state
            lines.append(
                growth_line(
                    run,
                    "memory",
                    optimizer=optimizer,
                    load=stats.size / stats.capacity,
                    **{
                        "bare row and state": bare,
                        "bytes per slot": stats.bytes / stats.capacity,
                        "slot / bare": stats.bytes / stats.capacity / bare,
                        "bytes per id": stats.bytes / stats.size,
                        "id / bare": stats.bytes / stats.size / bare,
                    },
                )
            )
            gc.collect()
    print_table(lines)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "forward": forward,
    "pooled": pooled,
    "train-adagrad": train_adagrad,
    "train-sgd": train_sgd,
    "train-adam": train_adam,
    "tfra": tfra,
    "slots": slots,
    "batch": batch,
    "threads": threads,
    "memory": memory,
    "size": size,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1M rows, 5 samples")
    parser.add_argument("--rows", type=int, help="rows of the main table (4000000)")
    parser.add_argument("--threads", type=int, default=2, help="threads of all contenders (2)")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(SECTIONS),
        metavar="A,B",
        help="sections to run, of: " + ", ".join(SECTIONS),
    )
    parser.add_argument("--json", metavar="OUT", help="write the results to this file too")
    parser.add_argument("--tfra-python", metavar="PYTHON", help="interpreter that has TFRA")
    parser.add_argument("--boost-include", metavar="FOLDER", help="where boost/ is, if not found")
    options = parser.parse_args()
    unknown = [name for name in options.only if name not in SECTIONS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: allowed are {', '.join(SECTIONS)}")
    for name in ("rows", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    return options


def main() -> None:
    options = parse()
    run = Run(
        rows=options.rows or (1_000_000 if options.quick else 4_000_000),
        repeats=5 if options.quick else 15,
        threads=options.threads,
        quick=options.quick,
        tfra_python=options.tfra_python,
        boost_include=options.boost_include,
    )
    keep_freed_memory()
    torch.set_num_threads(run.threads)
    where = environment() | {"rows": run.rows, "repeats": run.repeats, "threads": run.threads}
    print(", ".join(f"{name} {value}" for name, value in where.items() if name != "packages"))
    print(
        ", ".join(f"{name} {value or 'not installed'}" for name, value in where["packages"].items())
    )
    for name in options.only:
        section = SECTIONS[name]
        print(f"\n## {name}: {section.__doc__}\n", flush=True)
        section(run)
    print(f"\n{summary(run.comparisons)}")
    if options.json:
        rows = [
            asdict(row) | {"ratio": row.ratio, "verdict": row.verdict} for row in run.comparisons
        ]
        with open(options.json, "w") as file:
            json.dump({"environment": where, "rows": rows, "growth": run.growth}, file, indent=1)


if __name__ == "__main__":
    main()
