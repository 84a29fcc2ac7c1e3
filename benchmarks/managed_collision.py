"""Mapping ids to slots: our ManagedCollisionModule against TorchRec's MCHManagedCollisionModule.

    python benchmarks/managed_collision.py              about two minutes
    python benchmarks/managed_collision.py --quick      100k slots, 10k ids
    python benchmarks/managed_collision.py --json out.json

1,000,000 slots and 100,000 ids a batch, as in a call of the module's forward (a dictionary with one
JaggedTensor). The stream drifts: ids are ranks of a Zipf 1.05 distribution over 1,500,000 ids, and
with every batch 1,000 ids leave the universe and as many new ones come, anywhere in the ranking;
"uniform" draws from 1,500,000 ids evenly. The modules begin with the same state, the 999,999 ids
that are frequent at first, and have seen 20 batches before. They take turns on the same batches.
Training is the mean of a step, because TorchRec's costs fall on every tenth (interval 10) step;
evaluation is the median. "longest / median" is about our steps that no other process disturbed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from dynamicemb.cli.benching.timing import Sample, keep_freed_memory, waited_ms
from dynamicemb.cli.machine import environment

POLICIES = ("LRU", "LFU", "DistanceLFU")


class Stream:
    """Batches of ids; see above."""

    def __init__(self, kind: str, universe: int, batch: int, drift: int) -> None:
        self.batch, self.drift = batch, drift
        self.generator = torch.Generator().manual_seed(1)
        self.ids = torch.arange(universe)
        self.next = universe
        self.cdf = None
        if kind == "zipf":
            weights = torch.arange(1, universe + 1, dtype=torch.float64) ** -1.05
            self.cdf = weights.cumsum(0) / weights.sum()

    def known(self, count: int) -> torch.Tensor:
        """So many ids, the frequent ones, in any order."""
        order = torch.randperm(count, generator=self.generator)
        return _spread(self.ids[:count][order])

    def __call__(self) -> torch.Tensor:
        places = torch.randint(0, len(self.ids), (self.drift,), generator=self.generator)
        self.ids[places] = torch.arange(self.next, self.next + self.drift)
        self.next += self.drift
        if self.cdf is None:
            ranks = torch.randint(0, len(self.ids), (self.batch,), generator=self.generator)
        else:
            draw = torch.rand(self.batch, generator=self.generator, dtype=torch.float64)
            ranks = torch.searchsorted(self.cdf, draw).clamp_(max=len(self.ids) - 1)
        return _spread(self.ids[ranks])


def _spread(ids: torch.Tensor) -> torch.Tensor:
    """Over 64 bits."""
    return ids * -7046029254386353131


def modules(policy: str, slots: int, ids: torch.Tensor) -> dict[str, Any]:
    """All with these ids in their slots."""
    from torchrec.modules import mc_modules

    from dynamicemb.managed_collision import ManagedCollisionModule

    cpu = torch.device("cpu")
    made = getattr(mc_modules, f"{policy}_EvictionPolicy")
    filled = mc_modules.MCHManagedCollisionModule(slots, cpu, made(), 1)
    filled(features(ids))
    contenders = {
        "ours": ManagedCollisionModule(slots, cpu, made()),
        "MCH, interval 10": mc_modules.MCHManagedCollisionModule(slots, cpu, made(), 10),
        "MCH, interval 1": mc_modules.MCHManagedCollisionModule(slots, cpu, made(), 1),
    }
    for module in contenders.values():
        module.load_state_dict(filled.state_dict())
        module.validate_state()
    return contenders


def features(ids: torch.Tensor) -> dict[str, Any]:
    from torchrec import JaggedTensor

    return {"table": JaggedTensor(values=ids, lengths=torch.tensor([len(ids)]))}


def measure(kind: str, policy: str, slots: int, batch: int, steps: int) -> dict[str, Any]:
    stream = Stream(kind, slots * 3 // 2, batch, batch // 100)
    contenders = modules(policy, slots, stream.known(slots - 1))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    clean: list[float] = []
    evals: dict[str, list[float]] = {name: [] for name in contenders}
    for step in range(20 + steps):
        values = stream()
        for name, module in contenders.items():
            waited, start = waited_ms(), time.perf_counter()
            module(features(values))
            if step >= 20:
                taken = Sample(1e3 * (time.perf_counter() - start), waited_ms() - waited)
                times[name].append(taken.ms)
                if name == "ours" and taken.clean:
                    clean.append(taken.ms)
            module.evict()
    for _ in range(11):
        values = stream()
        for name, module in contenders.items():
            module.eval()
            start = time.perf_counter()
            module(features(values))
            evals[name].append(1e3 * (time.perf_counter() - start))
    return {
        "stream": kind,
        "policy": policy,
        "train_ms": {name: statistics.mean(one) for name, one in times.items()},
        "train_median_ms": {name: statistics.median(one) for name, one in times.items()},
        "evaluate_ms": {name: statistics.median(one) for name, one in evals.items()},
        "longest_over_median": max(clean) / statistics.median(clean),
        "clean_steps": len(clean),
    }


def line(result: dict[str, Any]) -> str:
    train, evaluate = result["train_ms"], result["evaluate_ms"]
    text = f"{result['stream']:8} {result['policy']:12} train {train['ours']:6.2f} ms"
    for name in ("MCH, interval 10", "MCH, interval 1"):
        text += f", {name} {train[name]:6.1f} ({train[name] / train['ours']:.1f}x)"
    mch = evaluate["MCH, interval 1"]
    text += f"; evaluate {evaluate['ours']:.2f} ms, MCH {mch:.1f} ({mch / evaluate['ours']:.1f}x)"
    return text + f"; longest / median {result['longest_over_median']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--policy", choices=POLICIES, action="append")
    parser.add_argument("--stream", choices=("zipf", "uniform"), action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    slots, batch = (100_000, 10_000) if arguments.quick else (1_000_000, 100_000)
    results = []
    for kind in arguments.stream or ("zipf", "uniform"):
        for policy in arguments.policy or POLICIES:
            results.append(measure(kind, policy, slots, batch, arguments.steps))
            print(line(results[-1]), flush=True)
    if arguments.json:
        report = {"environment": environment(), "slots": slots, "batch": batch, "rows": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
