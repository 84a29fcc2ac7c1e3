"""Everything that is measured on a GPU, into one JSON file and a short table.

PYTHONPATH=src python benchmarks/gpu/run_all.py --output FOLDER [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import hierarchical_kv
import module_step
import row_ops
import table_ops
from measure import Clock, machine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="load 0.5 and dim 64 only")
    parser.add_argument("--only", default="", help="module, rows or tables")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    bandwidth = clock.copy_bandwidth()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine(args.commit),
        "copy_TB_per_s": bandwidth / 1e12,
    }
    loads = (0.5,) if args.quick else (0.5, 0.75, 1.0)
    dims = (64,) if args.quick else (32, 64, 128)
    parts: dict[str, Callable[[], Any]] = {
        "tables": lambda: table_ops.run(clock, bandwidth, loads, dims),
        "rows": lambda: row_ops.run(clock, bandwidth),
        "module": lambda: module_step.run(clock),
    }
    for name, part in parts.items():
        if args.only in name:
            try:
                result[name] = part()
            except Exception:  # one part's failure must not lose the others' numbers
                result[name] = {"error": traceback.format_exc()}
            (args.output / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
            print(name, json.dumps(result[name], indent=1), flush=True)
    if "error" not in result.get("tables", {"error": ""}):
        result["over_hierarchical_kv"] = hierarchical_kv.compare(result["tables"])
        (args.output / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["over_hierarchical_kv"], indent=1), flush=True)


if __name__ == "__main__":
    main()
