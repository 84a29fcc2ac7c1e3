"""CPU against CUDA on a GPU machine: equal bits, step by step, for every shape.

    PYTHONPATH=src python tests/gpu/on_device.py [--steps N] [--seconds S] [--seed K] [NAME ...]

Needs the C++ extension (tests/gpu/build_engine.sh). With ``--seconds``, random shapes until then;
``--steps 0`` leaves the named shapes out, ``--small`` their large forms.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import full_buckets  # noqa: E402
from lives import SHAPES, Shape, live  # noqa: E402

from dynamicemb.optimizers import OptimizerArgs  # noqa: E402
from dynamicemb.table.cpu import CpuTable  # noqa: E402
from dynamicemb.table.cuda import KINDS, CudaTable  # noqa: E402

MAKES = (CpuTable, partial(CudaTable, device="cuda"))


def large(shape: Shape) -> Shape:
    """The same with sizes that fill the GPU."""
    factor = 100
    return replace(
        shape,
        capacity=shape.capacity * factor,
        width=128 if shape.width <= 128 else shape.width,
        ids=shape.ids * factor,
        spread=shape.spread * factor,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    failures = 0
    sizes = {"small": lambda shape: shape} | ({} if args.small else {"large": large})
    for name in args.names if args.steps else ():
        for size, resized in sizes.items():
            shape = resized(SHAPES[name])
            begin = time.perf_counter()
            try:
                live(shape, MAKES, args.steps)
                outcome = "equal"
            except Exception as error:
                failures += 1
                text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
                outcome = f"DIFFERENT {text[-600:]}"
            print(f"{name}, {size}: {outcome} ({time.perf_counter() - begin:.1f} s)", flush=True)
    if args.steps:
        for seed in range(3 * len(full_buckets.WIDTHS)):
            try:
                served = full_buckets.live(MAKES, seed, 40 * args.steps)
                outcome = f"equal, {served} rows left by a queue"
            except AssertionError as error:
                failures += 1
                outcome = f"DIFFERENT {str(error)[-600:]}"
            print(f"full buckets, seed {seed}: {outcome}", flush=True)
        for how in ("train", "insert", "assign"):
            left = [full_buckets.lowered(make, how) for make in MAKES]
            failures += left != [[0, 1, 31, 2]] * 2
            print(f"full buckets, score lowered by {how}: {left}", flush=True)
    generator = random.Random(args.seed)
    end = time.perf_counter() + args.seconds
    lives = 0
    while time.perf_counter() < end:
        shape = replace(
            generator.choice(list(SHAPES.values())),
            ids=generator.choice((1, 5, 100, 1000, 10000)),
            spread=generator.choice((50, 5000, 50000)),
            capacity=generator.choice((256, 4096, 65536)),
            width=generator.choice((16, 64, 128)),
            kind=generator.choice(KINDS),
            args=OptimizerArgs(),
        )
        try:
            live(shape, MAKES, 20, every=5)
        except Exception as error:
            failures += 1
            print(f"{shape}: {str(error)[-600:]}", flush=True)
        lives += 1
    if args.seconds:
        print(f"{lives} random lives of 20 steps, {failures} failures", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
