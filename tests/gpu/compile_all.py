"""Compiles every kernel of the dry run for several GPUs, and says what it takes.

    python tests/gpu/compile_all.py [--every] [--write]

Prints one JSON object: {kernel/constants/warps: {sm: [registers, stack, shared]}}, of one launch of
each kernel for one table and one for several, or of every launch. ``--write``: to the recorded
table that the test compares with.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from dry_run import Launch, record
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90, 100)
RECORDED = Path(__file__).with_name("resources.json")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(launch: Launch, sm: int) -> Any:
    names = launch.function.arg_names
    constant_names = names[len(launch.types) :]
    signature = dict(zip(names, launch.types, strict=False))
    signature |= dict.fromkeys(constant_names, "constexpr")
    source = ASTSource(
        fn=launch.function,
        signature=signature,
        constexprs=dict(zip(constant_names, launch.constants, strict=True)),
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(launch.types)
            if kind.startswith("*")
        },
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": launch.warps, "enable_fp_fusion": False},
    )


def resources(kernel: Any) -> list[int]:
    """(registers, bytes of stack, bytes of shared memory) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        out = subprocess.run(
            [str(CUOBJDUMP), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return [int(re.search(rf"{word}:(\d+)", out)[1]) for word in ("REG", "STACK", "SHARED")]  # type: ignore[index]


def chosen(every: bool) -> list[Launch]:
    """Every launch, or the first two of each kernel that differ in the number of tables."""
    launches = record()
    if every:
        return launches
    first: dict[tuple[str, bool], Launch] = {}
    for launch in launches:
        names = launch.function.arg_names[len(launch.types) :]
        one = dict(zip(names, launch.constants, strict=True)).get("ONE", True)
        first.setdefault((launch.function.fn.__name__, bool(one)), launch)
    return list(first.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--sm", type=int, nargs="*", default=ARCHITECTURES)
    args = parser.parse_args()
    table = {
        one.name: {str(sm): resources(compiled(one, sm)) for sm in args.sm}
        for one in chosen(args.every)
    }
    text = json.dumps(table, indent=1, sort_keys=True)
    if args.write:
        RECORDED.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
