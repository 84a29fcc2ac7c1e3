"""Compiles every kernel of the dry run for several GPUs, and says what it takes.

    python tests/gpu/compile_all.py [--only NAME] [--write]

Prints one JSON object: {kernel/constants/warps: {sm: [registers, stack, shared]}}. ``--write``: to
the recorded table that the test compares with.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--sm", type=int, nargs="*", default=ARCHITECTURES)
    parser.add_argument("--part", default="0/1", help="k/n: every n-th kernel, from the k-th on")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    launches = [one for one in record() if args.only in one.name][part::parts]
    table = {
        one.name: {str(sm): resources(compiled(one, sm)) for sm in args.sm} for one in launches
    }
    text = json.dumps(table, indent=0, sort_keys=True)
    if args.write:
        RECORDED.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
