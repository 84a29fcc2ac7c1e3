"""Puts the tables of measured numbers into the documents, from benchmarks/results.

    python benchmarks/result_tables.py

Of every kind of result the newest file counts. Text between ``<!-- table: NAME -->`` and ``<!-- end
of table -->`` is replaced; a test compares, so that no number in a document differs from its file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "guides" / "single_process.md",
    ROOT / "README.md",
)
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def newest(kind: str) -> tuple[str, dict[str, Any]]:
    """The name and content of the newest result called ``DATE-kind-MACHINE.json``."""
    file = max(RESULTS.glob(f"[0-9]*-{kind}-*.json"))
    found: dict[str, Any] = json.loads(file.read_text())
    return file.name, found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|---" + "|--:" * (len(head) - 1) + "|")
    return "\n".join(lines)


def source(name: str, result: dict[str, Any], command: str) -> str:
    """Where the numbers are from."""
    where = result.get("environment", result)
    machine = where.get("machine") or f"{where['cores']} cores of an {where['cpu']}"
    packages = where.get("packages", {})
    peers = ", ".join(f"{one} {packages[one]}" for one in ("torch", "torchrec") if one in packages)
    return (
        f"`{command}`, {where['date'][:10]}, commit `{where['commit']}`, {machine}"
        f"{', ' + peers if peers else ''}. Whole result: `benchmarks/results/{name}`.\n"
    )


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None or row.get("ratio") is None:
        return "-"
    ratio, target = row["ratio"], row.get("target")
    if target is None or ratio <= target:
        return f"{ratio:.2f}"
    text = f"{ratio:.2f}"
    return f"**{ratio:.3f}**" if float(text) <= target else f"**{text}**"  # by how little


def cpu_rows(chosen: Callable[[dict[str, Any]], bool]) -> str:
    """Our time over theirs, by distribution of the ids; over its target in bold."""
    _, result = newest("cpu")
    by_case: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        derived = row["peer"].endswith("[1]")  # from numbers of another machine, not run
        if row.get("ratio") is not None and chosen(row) and not derived:
            by_case.setdefault((row["case"], row["peer"]), {})[row["distribution"]] = row
    rows = []
    for (case, peer), found in by_case.items():
        targets = sorted({f"{row['target']:g}" for row in found.values() if row["target"]})
        rows.append(
            [
                f"{case}, against {peer}",
                _ratio(found.get("uniform")),
                _ratio(found.get("zipf")),
                " / ".join(targets) or "-",
            ]
        )
    return table(["our time / theirs", "uniform ids", "Zipf 1.05 ids", "target"], rows)


def cpu() -> str:
    name, result = newest("cpu")
    return f"{source(name, result, 'python benchmarks/cpu.py')}\n{cpu_rows(lambda row: True)}"


def summary() -> str:
    """What the README shows: the comparison that users ask for first."""
    chosen = (
        ("unpooled forward", "FBGEMM TBE, bags of 1"),
        ("unpooled forward", "F.embedding"),
        ("unpooled forward", "TorchRec MCH"),
        ("pooled forward", "FBGEMM TBE SUM"),
        ("train", "FBGEMM TBE, bags of 1"),
        ("train", "SparseAdam"),
        ("train", "TFRA"),
    )

    def wanted(row: dict[str, Any]) -> bool:
        return any(case in row["case"] and peer in row["peer"] for case, peer in chosen)

    name, result = newest("cpu")
    return f"{source(name, result, 'python benchmarks/cpu.py')}\n{cpu_rows(wanted)}"


def torchrec() -> str:
    name, result = newest("torchrec")
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row.get("ratio") is not None:
            by_case.setdefault(row["case"], {})[row["distribution"]] = row
    rows = [
        [
            case.replace("(es)", "" if " 1 process" in case else "es"),
            *(
                cell
                for one in ("uniform", "zipf")
                for cell in (
                    f"{found[one]['ours']:.1f} ms" if one in found else "-",
                    _ratio(found.get(one)),
                )
            ),
        ]
        for case, found in by_case.items()
    ]
    head = ["training step", "uniform ids", "/ TorchRec", "Zipf 1.05 ids", "/ TorchRec"]
    return f"{source(name, result, 'python benchmarks/torchrec_dmp.py')}\n{table(head, rows)}"


def checkpoint() -> str:
    name, result = newest("checkpoint")
    rows = [[what, f"{share:.2f}"] for what, share in result["share_of_dd"].items()]
    return (
        f"{source(name, result, 'python benchmarks/checkpoint.py --gigabytes 1 --rounds 7')}\n"
        + table([f"{result['bytes'] / 1e9:.1f} GB", "share of dd's speed"], rows)
    )


def managed_collision() -> str:
    name, result = newest("managed-collision")
    rows = [
        [
            f"{row['stream']}, {row['policy']}",
            *(f"{row['train_ms'][who]:.1f}" for who in _mappers(result)),
            *(f"{row['evaluate_ms'][who]:.1f}" for who in _mappers(result)),
        ]
        for row in result["rows"]
    ]
    head = ["ms a batch", *(f"training, {who}" for who in _mappers(result))]
    head += [f"evaluation, {who}" for who in _mappers(result)]
    return f"{source(name, result, 'python benchmarks/managed_collision.py')}\n{table(head, rows)}"


def _mappers(result: dict[str, Any]) -> list[str]:
    return list(result["rows"][0]["train_ms"])


def redis() -> str:
    name, result = newest("parameter-server")
    rows = [
        [f"{row['case']}, {row['who']}", f"{row['rows_per_second']:,}", f"{row['ratio']:.2f}"]
        for row in result["rows"]
    ]
    head = ["rows of 256 bytes, 10,000 at a time", "rows / s", "/ redis-py"]
    training = [
        [row["case"], f"{row['ids_per_second']:,}", f"{row['of_all_in_memory']:.2f}"]
        for row in result["training"]
    ]
    return (
        f"{source(name, result, 'python benchmarks/parameter_server.py')}\n{table(head, rows)}\n\n"
        + table(["training over Redis", "ids / s", "/ all in memory"], training)
    )


def tiers() -> str:
    name, result = newest("tiers")
    stores: dict[str, dict[str, float]] = {}
    for row in result["stores"]:
        stores.setdefault(row["store"], {})[row["case"]] = row["wall_ms"]
    cases = list(dict.fromkeys(row["case"] for row in result["stores"]))
    rows = [
        [store, *(f"{found[case]:.1f}" if case in found else "-" for case in cases)]
        for store, found in stores.items()
    ]
    training = [
        [
            f"{row['store']}, {row['cache_percent']} % of the rows in the cache",
            f"{row['ids_per_second']:,.0f}",
            f"{row['hit_rate']:.4f}" if "hit_rate" in row else "-",
        ]
        for row in result["training"]
    ]
    return (
        f"{source(name, result, 'python benchmarks/tiers.py')}\n"
        + table(["ms for 10,000 rows of 256 bytes", *cases], rows)
        + "\n\n"
        + table(["training through a cache", "ids / s", "hit rate"], training)
    )


def gpu() -> str:
    name, result = newest("gpu")
    rows = [
        [
            optimizer,
            *(
                f"{result['module'][optimizer][what]:.2f}"
                for what in ("train_one_thread_ms", "train_device_ms", "eval_throughput_ms")
            ),
        ]
        for optimizer in ("sgd", "adam", "exact_row_wise_adagrad")
        if optimizer in result["module"]
    ]
    head = ["10 tables, dim 128, ms", "training step", "device alone", "evaluation forward"]
    words = (
        f"`python benchmarks/gpu/run_all.py`, {result['date'][:10]}, commit {result['commit']}, "
        f"one {result['gpu']}, torch {result['torch']}, Triton {result['triton']}; "
        f"{result['module']['ids']:,} ids a step, backward in the thread of the caller. "
        f"Whole result: `benchmarks/results/{name}`.\n"
    )
    return f"{words}\n{table(head, rows)}"


def initial_values() -> str:
    name, result = newest("initial-values")
    columns = list(dict.fromkeys((row["task"], row["optimizer"]) for row in result["rows"]))
    by_start: dict[str, dict[tuple[str, str], str]] = {}
    for row in result["rows"]:
        cell = " ".join(f"{value:.3f}" for value in row["auc"])
        by_start.setdefault(row["start"], {})[row["task"], row["optimizer"]] = cell
    rows = [[start, *(cells[one] for one in columns)] for start, cells in by_start.items()]
    head = ["rows start from", *(f"{task}, {optimizer}" for task, optimizer in columns)]
    return f"{source(name, result, 'python benchmarks/initial_values.py ml-100k.inter')}\n" + table(
        head, rows
    )


TABLES: dict[str, Callable[[], str]] = {
    "checkpoint": checkpoint,
    "cpu": cpu,
    "gpu": gpu,
    "initial_values": initial_values,
    "managed_collision": managed_collision,
    "redis": redis,
    "summary": summary,
    "tiers": tiers,
    "torchrec": torchrec,
}


def filled(text: str) -> str:
    """``text`` with its tables as the results are now."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n\n{place[3]}", text)


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))


if __name__ == "__main__":
    main()
