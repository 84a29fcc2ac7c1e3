"""Training through TorchRec's DistributedModelParallel: dynamic tables against TorchRec's own.

    python benchmarks/torchrec_dmp.py                     1 and 2 processes; some minutes
    python benchmarks/torchrec_dmp.py --quick             200k rows, few steps
    python benchmarks/torchrec_dmp.py --only sequence --processes 2 --json out.json

One table of 1,000,000 rows of 64 float32, row-wise Adagrad and SGD; 65,536 ids a step over all
processes, in the table already; uniform and Zipf 1.05; pooled means 6,553 bags of 10. Static is
TorchRec's row-wise sharding of a fused table, dynamic is ours, with and without index dedup (which
TorchRec's own has on CUDA only). Both run in the same processes over gloo and take turns on the
same batches. A step is forward and backward, with the update in it, from one barrier to the next;
medians. The processes share the machine's cores: 2 threads for one process, 1 each for two.

(The file is not called torchrec.py: that would hide the package from the other benchmarks.)
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dynamicemb.cli.benching.timing import keep_freed_memory
from dynamicemb.cli.benching.workload import BAG, DIM, DISTRIBUTIONS, Batch, Workload
from dynamicemb.cli.machine import environment
from report import Row, print_rows, summary

CASES = ("sequence", "pooled")
OPTIMIZERS = {"SGD": "EXACT_SGD", "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD"}
TARGET = 1.0
WARMUP = 3


def build(case: str, kind: str, optimizer: str, work: Workload, ranks: int) -> Any:
    """The model of one contender, its table full."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    from dynamicemb import DynamicEmbTableOptions
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints
    from dynamicemb.shard import (
        DynamicEmbeddingBagCollectionSharder,
        DynamicEmbeddingCollectionSharder,
    )

    pooled = case == "pooled"
    fused: dict[str, Any] = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.01}
    shape = {"num_embeddings": work.n, "embedding_dim": DIM, "name": "t", "feature_names": ["f"]}
    config = (EmbeddingBagConfig if pooled else EmbeddingConfig)(**shape)
    meta = torch.device("meta")
    net = (EmbeddingBagCollection if pooled else EmbeddingCollection)(tables=[config], device=meta)
    cpu = torch.device("cpu")
    if kind == "static":
        sharder: Any = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(
            fused_params=fused
        )
        tables = construct_module_sharding_plan(
            net,
            per_param_sharding={"t": row_wise(compute_kernel="fused")},
            sharder=sharder,
            local_size=ranks,
            world_size=ranks,
            device_type="cpu",
        )
        plan = ShardingPlan({"": tables})
        return DistributedModelParallel(net, device=cpu, plan=plan, sharders=[sharder])
    sharder = (
        DynamicEmbeddingBagCollectionSharder(fused_params=fused)
        if pooled
        else DynamicEmbeddingCollectionSharder(
            fused_params=fused, use_index_dedup=kind == "dynamic, dedup"
        )
    )
    # As many slots as a half full table has: what growth would end at.
    options = DynamicEmbTableOptions(max_capacity=2 * -(-work.n // ranks))
    planner = DynamicEmbeddingShardingPlanner(
        [config],
        topology=Topology(world_size=ranks, compute_device="cpu", ddr_cap=2**45),
        constraints={
            "t": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)
        },
        debug=False,
    )
    plan = planner.collective_plan(net, [sharder])
    model = DistributedModelParallel(net, device=cpu, plan=plan, sharders=[sharder])
    for module in model.module.dynamic_modules():
        own = work.ids[module.routings["t"].owned(work.ids)]
        for ids in own.split(2**16):
            module.tables[0].insert(ids, torch.zeros(len(ids), DIM))
    return model


def features_of(batch: Batch, kind: str, case: str, rank: int, ranks: int) -> tuple[Any, Any]:
    """This rank's part of a batch, and the gradient of its output."""
    from torchrec import KeyedJaggedTensor

    ids = batch.rows if kind == "static" else batch.ids
    bag = BAG if case == "pooled" else 1
    bags = len(ids) // bag // ranks
    ids = ids[rank * bags * bag : (rank + 1) * bags * bag]
    lengths = torch.full((bags,), bag)
    features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths)
    return features, batch.grad[rank * bags : (rank + 1) * bags].contiguous()


def measure(rank: int, ranks: int, meeting: str, options: argparse.Namespace, results: Any) -> None:
    """One process of a benchmark."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    keep_freed_memory()
    torch.set_num_threads(max(2 // ranks, 1))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    work = Workload(options.rows)
    rows = []
    for case in options.only:
        kinds = ["static", "dynamic"] + (["dynamic, dedup"] if case == "sequence" else [])
        for title, optimizer in OPTIMIZERS.items():
            models = {kind: build(case, kind, optimizer, work, ranks) for kind in kinds}
            for distribution in DISTRIBUTIONS:
                bag = BAG if case == "pooled" else 1
                batches = work.batches(distribution, bag=bag)
                given = {
                    kind: [features_of(one, kind, case, rank, ranks) for one in batches]
                    for kind in kinds
                }
                times: dict[str, list[float]] = {kind: [] for kind in kinds}
                for turn in range(WARMUP + options.repeats):
                    order = list(kinds)
                    random.Random(turn).shuffle(order)  # the same on every rank
                    for place, kind in enumerate(order):
                        features, gradient = given[kind][(turn * 7 + place * 5) % len(batches)]
                        dist.barrier()
                        start = time.perf_counter()
                        out = models[kind](features)
                        values = out.values() if case == "pooled" else out["f"].values()
                        values.backward(gradient)
                        dist.barrier()
                        if turn >= WARMUP:
                            times[kind].append((time.perf_counter() - start) * 1e3)
                medians = {kind: statistics.median(times[kind]) for kind in kinds}
                for kind in kinds[1:]:
                    suffix = ", index dedup" if "dedup" in kind else ""
                    rows.append(
                        Row(
                            case=f"{case}, {title}, {ranks} process(es){suffix}",
                            distribution=distribution,
                            peer="TorchRec static tables",
                            unit="ms",
                            ours=medians[kind],
                            theirs=medians["static"],
                            target=TARGET,
                        )
                    )
            del models
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="200k rows, 5 steps")
    parser.add_argument("--rows", type=int, help="rows of the table (1000000)")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2], choices=(1, 2, 4), help="(1 2)"
    )
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--json", metavar="OUT", help="write the results to this file too")
    options = parser.parse_args()
    options.repeats = 5 if options.quick else 15
    options.rows = options.rows or (200_000 if options.quick else 1_000_000)
    return options


def main() -> None:
    options = parse()
    where = environment() | {"rows": options.rows, "repeats": options.repeats}
    print(", ".join(f"{name} {value}" for name, value in where.items() if name != "packages"))
    print(", ".join(f"{name} {value}" for name, value in where["packages"].items()))
    rows: list[Row] = []
    context = mp.get_context("spawn")
    for ranks in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            results = context.SimpleQueue()
            meeting = str(Path(folder) / "store")
            processes = mp.spawn(
                measure, args=(ranks, meeting, options, results), nprocs=ranks, join=False
            )
            found = results.get()
            processes.join()
        print(f"\n## {ranks} process(es)\n", flush=True)
        print_rows(found)
        rows.extend(found)
    print(f"\n{summary(rows)}")
    if options.json:
        lines = [asdict(row) | {"ratio": row.ratio, "verdict": row.verdict} for row in rows]
        with open(options.json, "w") as file:
            json.dump({"environment": where, "rows": lines}, file, indent=1)


if __name__ == "__main__":
    main()
