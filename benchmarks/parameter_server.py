"""A parameter server under static tables: rows to and from Redis, ids to slots, training.

    python benchmarks/parameter_server.py               about a minute; starts a redis-server itself
    python benchmarks/parameter_server.py --quick
    python benchmarks/parameter_server.py --json out.json

Rows: 10,000 rows of 256 bytes from and to tensors, against redis-py's `mset` and `mget` with keys
and values that are bytes objects already, in commands of 1,000 keys. Ratio: our rows per second /
theirs. Contenders take turns.

Ids to slots: `IDTransformer.transform`, 1,000,000 slots, 100,000 ids a batch, all known, batches
made before; the median of 21, and the least. Between them ten checksums over 32 KB, arithmetic
only: how fast the processor is at that time. The figures of torchrec_dynamic_embedding, which has
one thread, were measured before on a machine like the one of README.md, and are not from this run.

Training: an EmbeddingBagCollection with one table of 64 columns under DistributedModelParallel,
row-wise Adagrad, bags of 4, Zipf 1.05 ids; the table holds all ids, or a tenth of them with the
rest in Redis, with 0, 1 and 4 batches prefetched. Warm: every id has been seen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from dynamicemb.cli.benching.timing import interleave, keep_freed_memory
from dynamicemb.cli.machine import environment
from dynamicemb.table.engine import _engine

ROWS, WIDTH, CHUNK = 10_000, 64, 1000
#: Milliseconds of torchrec_dynamic_embedding for 100,000 ids ("naive"), and for evicting 500,000.
UPSTREAM = {"zipf": (4.3, 6.5), "uniform": (12.0, 12.0), "evict": (138.0, 166.0)}


class Server:
    """A redis-server of the benchmark's own."""

    def __init__(self) -> None:
        if shutil.which("redis-server") is None:
            raise SystemExit("redis-server is not installed: apt-get install redis-server")
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        self.folder = tempfile.mkdtemp()
        command = f"redis-server --port {self.port} --bind 127.0.0.1 --dir {self.folder}".split()
        self.process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
        )
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except OSError:
                time.sleep(0.02)

    def url(self, options: str = "") -> str:
        return f"redis://127.0.0.1:{self.port}/?timeout=60s{options}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def measure_rows(server: Server, repeats: int) -> list[dict[str, Any]]:
    import redis

    from dynamicemb.tiers.remote.open import open_rows
    from dynamicemb.tiers.remote.rows import Part, RowFormat

    row_format = RowFormat((Part("weight", torch.float32, WIDTH),))
    plain = redis.Redis(port=server.port, socket_timeout=60)
    batches = 8
    ids = [torch.randint(-(2**63), 2**63 - 1, (ROWS,)) for _ in range(batches)]
    weights = torch.rand(ROWS, WIDTH)
    values = [row.numpy().tobytes() for row in weights]
    ours = {n: open_rows(server.url(f"&num_threads={n}"), "t", row_format) for n in (1, 2, 4)}
    keys = [[b"plain:%016x" % (i % 2**64) for i in one.tolist()] for one in ids]

    def plain_write(batch: int) -> None:
        for at in range(0, ROWS, CHUNK):
            some = slice(at, at + CHUNK)
            plain.mset(dict(zip(keys[batch][some], values[some], strict=True)))

    def plain_read(batch: int) -> None:
        for at in range(0, ROWS, CHUNK):
            plain.mget(keys[batch][at : at + CHUNK])

    lines = []
    for what in ("write", "read"):
        contenders: dict[str, Any] = {"redis-py": plain_write if what == "write" else plain_read}
        for threads, rows in ours.items():

            def write(batch: int, rows: Any = rows) -> None:
                rows.push(ids[batch], row_format.pack([weights]))

            def read(batch: int, rows: Any = rows) -> None:
                row_format.unpack(rows.pull(ids[batch])[1])

            contenders[f"ours, {threads} connections"] = write if what == "write" else read
        if what == "read":
            for batch in range(batches):
                plain_write(batch)
                ours[1].push(ids[batch], row_format.pack([weights]))
        found = interleave(contenders, batches=batches, repeats=repeats, seconds=12)
        base = found["redis-py"].ms
        lines += [
            {
                "case": what,
                "who": name,
                "ms": round(one.ms, 2),
                "rows_per_second": round(ROWS / one.ms * 1e3),
                "ratio": round(base / one.ms, 2),
                "target": None if name == "redis-py" else 0.9,
            }
            for name, one in found.items()
        ]
    return lines


def measure_transform(slots: int, batch: int, repeats: int) -> list[dict[str, Any]]:
    from dynamicemb.tde.id_transformer import IDTransformer
    from dynamicemb.tde.tensor_list import TensorList

    default = torch.get_num_threads()
    generator = torch.Generator().manual_seed(1)
    weights = torch.arange(1, slots + 1, dtype=torch.float64) ** -1.05
    cdf = weights.cumsum(0) / weights.sum()
    known = torch.randperm(slots, generator=generator) * -7046029254386353131
    lines = []
    for kind in ("zipf", "uniform"):
        transformer = IDTransformer(slots)
        for clock, some in enumerate(known.split(batch)):
            transformer.transform(TensorList([some]), TensorList([torch.empty_like(some)]), clock)
        out = TensorList([torch.empty(batch, dtype=torch.int64)])
        batches = []  # made before: drawing them would empty the caches between two calls
        for _ in range(2 * repeats):
            if kind == "zipf":
                draw = torch.rand(batch, generator=generator, dtype=torch.float64)
                at = torch.searchsorted(cdf, draw).clamp_(max=slots - 1)
            else:
                at = torch.randint(0, slots, (batch,), generator=generator)
            batches.append(TensorList([known[at]]))
        times: dict[int, list[float]] = {1: [], 2: []}
        bare: list[float] = []
        for turn, ids in enumerate(batches):
            threads = 1 + turn % 2
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            transformer.transform(ids, out, 10**6 + turn)
            times[threads].append((time.perf_counter() - begin) * 1e3)
            bare.append(_arithmetic_us())
        for threads, taken in times.items():
            case = f"transform, {kind}, {threads} threads"
            lines.append(_transform_line(case, taken, UPSTREAM[kind]))
            lines[-1]["arithmetic_us"] = round(statistics.median(bare), 1)
    torch.set_num_threads(1)
    times = {1: []}
    for _ in range(3):
        begin = time.perf_counter()
        transformer.evict(slots // 2)
        times[1].append((time.perf_counter() - begin) * 1e3)
        for some in known.split(batch):  # back again
            moment = transformer._transformer.time
            transformer.transform(
                TensorList([some]), TensorList([torch.empty_like(some)]), moment + 1
            )
    lines.append(_transform_line("evict half, 1 threads", times[1], UPSTREAM["evict"]))
    torch.set_num_threads(default)
    return lines


_BYTES = torch.zeros(32768, dtype=torch.uint8)


def _arithmetic_us() -> float:
    """Microseconds of ten checksums over bytes in the first-level cache."""
    begin = time.perf_counter()
    for _ in range(10):
        _engine.xxh64(_BYTES.data_ptr(), len(_BYTES))
    return (time.perf_counter() - begin) * 1e6


def _transform_line(case: str, taken: list[float], upstream: tuple[float, float]) -> dict[str, Any]:
    ms = statistics.median(taken)
    return {
        "case": case,
        "ms": round(ms, 2),
        "least_ms": round(min(taken), 2),
        "upstream_ms": list(upstream),
        "times_faster": [round(one / ms, 2) for one in upstream],
        "target": 2.5,
    }


def _data(ids: int, bags: int, steps: int) -> list[Any]:
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(2)
    weights = torch.arange(1, ids + 1, dtype=torch.float64) ** -1.05
    cdf = weights.cumsum(0) / weights.sum()
    lengths = torch.full((bags,), 4)
    out = []
    for _ in range(steps):
        draw = torch.rand(bags * 4, generator=generator, dtype=torch.float64)
        values = torch.searchsorted(cdf, draw).clamp_(max=ids - 1)
        out.append((KeyedJaggedTensor(keys=["f"], values=values, lengths=lengths),))
    return out


def _model(slots: int) -> tuple[Any, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    configs = [
        EmbeddingBagConfig(name="t", embedding_dim=64, num_embeddings=slots, feature_names=["f"])
    ]
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
            self.over = torch.nn.Sequential(
                torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
            )

        def forward(self, features: Any) -> torch.Tensor:
            return self.over(self.emb(features).values())

    model = DistributedModelParallel(
        Model(), device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder(fused)]
    )
    return model, configs


def measure_training(server: Server, ids: int, bags: int, steps: int) -> list[dict[str, Any]]:
    import torch.distributed as dist

    import torchrec_dynamic_embedding as tde
    from torchrec_dynamic_embedding.dataloader import DataLoader

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = _data(ids, bags, steps)
    everything = [
        (type(data[0][0])(keys=["f"], values=some, lengths=torch.tensor([len(some)])),)
        for some in torch.arange(ids).split(ids // 20)
    ]

    def run(model: Any, batches: Any) -> float:
        begin = time.perf_counter()
        count = 0
        for (features,) in batches:
            loss = model(features).square().mean()
            loss.backward()
            count += 1
        return count * bags * 4 / (time.perf_counter() - begin)

    lines = []
    base = 0.0
    for name, depth in (
        ("all in memory", None),
        ("prefetch 0", 0),
        ("prefetch 1", 1),
        ("prefetch 4", 4),
    ):
        model, configs = _model(ids if depth is None else ids // 10)
        speed: float
        if depth is None:
            run(model, data[:5])
            speed = base = run(model, data)
        else:
            group_url = server.url(f"&prefix=train{depth}")
            loader = tde.wrap(group_url, everything, model, {"emb": configs}, num_prefetch=0)
            list(loader)  # every id has a row at the server
            tde.save(model)
            loader = DataLoader(model._id_transformer_group, data, num_prefetch=depth)
            speed = run(model, loader)
        lines.append(
            {
                "case": name,
                "ids_per_second": round(speed),
                "of_all_in_memory": round(speed / base, 2),
            }
        )
    dist.destroy_process_group()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_freed_memory()
    quick = arguments.quick
    server = Server()
    try:
        result: dict[str, Any] = {
            "environment": environment(),
            "rows": measure_rows(server, 3 if quick else 21),
            "transform": measure_transform(
                *((10_000, 1000, 5) if quick else (1_000_000, 100_000, 21))
            ),
            "training": measure_training(
                server, *((2000, 10, 4) if quick else (100_000, 1024, 60))
            ),
        }
    finally:
        server.close()
    for name in ("rows", "transform", "training"):
        print(f"\n{name}")
        for line in result[name]:
            print("  " + ", ".join(f"{k} {v}" for k, v in line.items() if v is not None))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
